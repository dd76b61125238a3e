"""The process of ``mmspec serve``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from tests.testkit.served import LONG, TIMEOUT, eventually, question

KEY = {"Authorization": "Bearer secret"}
COMMAND = [sys.executable, "-c", "import sys; from mmspec.cli import main; sys.exit(main())", "serve"]


@contextmanager
def process(*options: str, stderr: Any = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*COMMAND, "--model", "tiny-llava", "--device", "cpu", *options],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
    ) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"http://\S+/v1", running.stdout.readline())
            assert found
            assert eventually(lambda: answers(found[0]))
            yield running, found[0]
        finally:
            running.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url.removesuffix('/v1')}/health", timeout=TIMEOUT).status_code == 200
    except httpx.TransportError:
        return False


def gone(workers: list[psutil.Process]) -> bool:
    return not any(map(_runs, workers))


def _runs(one: psutil.Process) -> bool:
    try:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # since the first question
        return False


@contextmanager
def long_stream(url: str) -> Iterator[Iterator[str]]:
    """Lines of an answer that has begun, and takes longer than the grace period."""
    body = question(stream=True, n=8, **LONG)
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=KEY, timeout=TIMEOUT) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines
