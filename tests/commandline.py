"""Command lines of mmspec, run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mmspec.cli import main

Run = Callable[..., tuple[int, str, str]]


def runner(capfd: pytest.CaptureFixture[str], *first: str) -> Run:
    """Runs a command line that starts with these words; returns status, standard output and standard error."""

    def call(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()  # drop earlier output
        status = main([*first, *args])
        return status, *capfd.readouterr()

    return call


def assert_user_error(result: tuple[int, str, str], *expected: str) -> None:
    """One line on standard error that contains these parts, nothing on standard output, status 2."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in expected:
        assert part in err
