"""A pipeline and servers for the tests of serving."""

import time

import pytest

import mmspec


def pytest_pycollect_makemodule():
    """Skips this folder if the extra ``serve`` is not installed."""
    import tests.testkit.served  # noqa: F401


@pytest.fixture(scope="package")
def pipe():
    return mmspec.load("tiny-llava", device="cpu", dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="package")
def server(pipe):
    from tests.testkit.served import served

    with served(pipe) as running:
        yield running


@pytest.fixture
def slow(pipe, monkeypatch):
    """Makes every step of the engine take longer."""
    step = pipe.engine.core.step

    def delay(seconds):
        def slowly():
            time.sleep(seconds)
            step()

        monkeypatch.setattr(pipe.engine.core, "step", slowly)

    return delay
