"""Exceptions of libraries as errors of the user's."""

from __future__ import annotations

import pytest

from mmspec.errors import UserError, explained, first_line


def test_first_line() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("a" * 900)) == "a" * 400 + " ..."


def test_named_exceptions_become_one_line() -> None:
    with pytest.raises(UserError, match=r"^cannot read x: no$") as raised, explained("cannot read x", OSError):
        raise OSError("no\nfile")
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("error", [UserError("said"), KeyError("other")])
def test_other_exceptions_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained("cannot read x", OSError, ValueError):
        raise error
    assert raised.value is error
