"""The process of ``mmspec serve``: start, signals, restart, mistakes on the command line."""

from __future__ import annotations

import signal
import subprocess
import time

import httpx
import psutil
import pytest

from mmspec.cli import main
from mmspec.serving.server import GRACE, listen
from tests.serve_process import KEY, answers, gone, long_stream, process
from tests.served import QUESTION, SCENE, data_uri, eventually, question


def workers_of(running: subprocess.Popen[str], url: str) -> list[psutil.Process]:
    """The server's processes that decode images, after a request with one."""
    response = httpx.post(f"{url}/chat/completions", json=question(QUESTION, data_uri(SCENE)), headers=KEY, timeout=60)
    assert response.status_code == 200
    workers = psutil.Process(running.pid).children(recursive=True)
    assert workers
    return workers


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
        (["--replicas", "2"], "--replicas goes with --engine ray: got --engine local"),
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
