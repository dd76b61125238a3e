"""llama.cpp as a baseline: its HTTP server decodes the same GGUF file in a process of its own."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any

from mmspec.errors import UserError, explained
from mmspec.eval.harness.peers import Completion, gguf_file

CONTEXT = 8192
"""Tokens of a prompt and its answer."""

_HOST = "127.0.0.1"
_COMPLAINT = re.compile(r"^(?!.* exiting ).*(error|fail|couldn't)", re.IGNORECASE)
_TIMEOUT = 600.0  # seconds, for loading the model and for each request


class LlamaServer:
    """A llama-server process with one slot. It caches no prompt: every request pays for its prefill.

    Args:
        program: its path.
        model: a GGUF file, or a name that stands for one.
        threads: of prefill and decoding.
        speculation: its ``--spec-type``, and further options after blanks; empty for plain decoding.

    Raises:
        UserError: the model is not a GGUF file, or the server does not start.
    """

    def __init__(self, program: str, model: str, threads: int, speculation: str = "") -> None:
        file = gguf_file("llama.cpp", model)
        with socket.socket() as unused:
            unused.bind((_HOST, 0))
            self._port = unused.getsockname()[1]
        options: dict[str, Any] = {"host": _HOST, "port": self._port, "model": file, "ctx-size": CONTEXT}
        options |= {"parallel": 1, "threads": threads, "threads-batch": threads, "cache-ram": 0}
        command = [program, *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
        command += ["--spec-type", *speculation.split()] if speculation else []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        weakref.finalize(self, self._log.close)
        with explained(f"cannot run {program}", OSError):
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        weakref.finalize(self, _end, self._process)
        self._wait_until_loaded()

    def complete(self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool = False) -> Completion:
        """Decode a prompt of token ids.

        Raises:
            UserError: the server refuses the request, or has ended.
        """
        request: dict[str, Any] = {"prompt": list(prompt), "n_predict": max_new_tokens, "ignore_eos": ignore_eos}
        request |= {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True}
        try:
            status, reply = self._ask("/completion", request)
        except (OSError, HTTPException) as error:
            raise self._failure("did not answer") from error
        if status != 200:
            raise UserError(f"llama-server refused a request of {len(prompt)} tokens: {reply['error']['message']}")
        return Completion(reply["tokens"], reply["timings"]["predicted_ms"] / 1000)

    def _wait_until_loaded(self) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError, HTTPException):  # before it listens
                if self._ask("/health")[0] == 200:
                    return
            time.sleep(0.05)
        raise self._failure("did not load the model")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON value of a reply; a body is posted."""
        connection = HTTPConnection(_HOST, self._port, timeout=_TIMEOUT)
        try:
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def _failure(self, what: str) -> UserError:
        """The error for a server that does not answer, with the last complaint in its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # for the status of a process that is ending
        _end(self._process)
        self._log.seek(0)
        lines = list(filter(None, map(str.strip, self._log.read().decode(errors="replace").split("\n"))))
        complaints = [line for line in lines if _COMPLAINT.search(line)] or lines or ["no message"]
        return UserError(f"llama-server {what} and ended with status {self._process.returncode}: {complaints[-1]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
