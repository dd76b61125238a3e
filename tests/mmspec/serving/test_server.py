"""The process of ``mmspec serve``: start, signals, restart, mistakes on the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from mmspec.cli import main
from mmspec.serving.server import GRACE, listen
from tests.served import LONG, QUESTION, SCENE, data_uri, eventually, question

KEY = {"Authorization": "Bearer secret"}
COMMAND = [sys.executable, "-c", "import sys; from mmspec.cli import main; sys.exit(main())", "serve"]


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*COMMAND, "--device", "cpu", *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"http://\S+/v1", running.stdout.readline())
            assert found
            assert eventually(lambda: answers(found[0]), 30)
            yield running, found[0]
        finally:
            running.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url.removesuffix('/v1')}/health").status_code == 200
    except httpx.TransportError:
        return False


def gone(workers: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)


def workers_of(running: subprocess.Popen[str], url: str) -> list[psutil.Process]:
    """The server's processes that decode images, after a request with one."""
    response = httpx.post(f"{url}/chat/completions", json=question(QUESTION, data_uri(SCENE)), headers=KEY, timeout=60)
    assert response.status_code == 200
    workers = psutil.Process(running.pid).children(recursive=True)
    assert workers
    return workers


@contextmanager
def long_stream(url: str) -> Iterator[Iterator[str]]:
    """Lines of an answer that has begun, and takes longer than the grace period."""
    body = question(stream=True, n=8, **LONG)
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=KEY, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_a_kill_a_restart_and_an_orderly_end() -> None:
    with process("--port", "0", "--drafter", "none") as (running, url):
        workers = workers_of(running, url)
        with long_stream(url):
            running.kill()
            running.wait()
        assert eventually(lambda: gone(workers))
    port = url.removesuffix("/v1").rpartition(":")[2]  # free at once
    with process("--port", port, "--drafter", "none", "--api-key", "secret") as (running, again):
        assert again == url
        assert httpx.get(f"{url}/models").status_code == 401
        workers = workers_of(running, url)
        with long_stream(url) as lines:
            started = time.monotonic()
            running.send_signal(signal.SIGTERM)
            assert eventually(lambda: not answers(url), 2)
            assert running.poll() is None
            with pytest.raises(httpx.RemoteProtocolError):  # cancelled after the grace period
                list(lines)
            assert time.monotonic() - started > GRACE / 2
        assert running.wait(GRACE + 10) == 0
        assert time.monotonic() - started < GRACE + 7
        assert eventually(lambda: gone(workers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "a public address needs a key"),
        (["--host", "example.org"], "a public address needs a key"),
        (["--api-key", ""], "--api-key (or MMSPEC_API_KEY) must be printable"),
        (["--api-key", "a b"], "--api-key (or MMSPEC_API_KEY) must be printable"),
        (["--api-key", "a", "--no-auth"], "exclude each other"),
        (["--host", "203.0.113.1", "--no-auth"], "cannot listen on 203.0.113.1, port 8000"),
        (["--max-running", "0"], "0 is not in the range x>=1"),
        (["--frames", "513"], "513 is not in the range 1<=x<=512"),
        (["--model", "nobody/nothing", "--port", "0"], "cannot load model 'nobody/nothing'"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_port_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
        assert capfd.readouterr().err == f"error: cannot listen on 127.0.0.1, port {port}: Address already in use\n"
