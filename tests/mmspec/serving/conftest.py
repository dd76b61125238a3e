"""A pipeline and servers for the tests of serving."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import mmspec
from mmspec.pipeline import Pipeline

if TYPE_CHECKING:
    from tests.testkit.served import Served


def pytest_pycollect_makemodule() -> None:
    """Skips this folder if the extra ``serve`` is not installed."""
    import tests.testkit.served  # noqa: F401


@pytest.fixture(scope="package")
def pipe() -> Pipeline:
    return mmspec.load("tiny-llava", device="cpu", dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="package")
def server(pipe: Pipeline) -> Iterator[Served]:
    from tests.testkit.served import served

    with served(pipe) as running:
        yield running


@pytest.fixture
def slow(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every step of the engine take longer."""
    step = pipe.engine.core.step

    def delay(seconds: float) -> None:
        def slowly() -> None:
            time.sleep(seconds)
            step()

        monkeypatch.setattr(pipe.engine.core, "step", slowly)

    return delay
