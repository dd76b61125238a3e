"""Other engines as baselines: they decode the same GGUF file, llama.cpp in a server, OpenVINO GenAI in this process."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np

from mmspec import plugins
from mmspec.errors import UserError, explained
from mmspec.http_client import TIMEOUT, open_client
from mmspec.targets.gguf_file import file_in

LLAMA, OPENVINO = "llama.cpp", "openvino"
CONTEXT = 8192
"""Tokens of a prompt and its answer."""

_HOST = "127.0.0.1"
_COMPLAINT = re.compile(r"^(?!.* exiting ).*(error|fail|couldn't)", re.IGNORECASE)


@dataclass(frozen=True)
class Completion:
    """A greedy answer.

    Attributes:
        tokens: generated token ids, end-of-sequence token included.
        seconds: decode time after the first token, measured by the engine.
        prompt_seconds: prefill time, measured by the engine.
    """

    tokens: list[int]
    seconds: float
    prompt_seconds: float

    @property
    def token_seconds(self) -> float:
        """Decode time per token after the first."""
        return self.seconds / (len(self.tokens) - 1)


def gguf_file(engine: str, model: str) -> str:
    """Resolve a model name to its GGUF file. Raises ``UserError``: the model has another format."""
    file = file_in(plugins.model_path(model))
    if file is None:
        raise UserError(f"{engine} decodes GGUF files: expected a model of that format, received {model!r}")
    return str(file)


class LlamaServer:
    """A llama-server process with one slot and without prompt cache: every request includes a prefill.

    Args:
        model: a GGUF file, or the name of a GGUF model.
        speculation: value of ``--spec-type``, and further options after blanks, quoted as in a shell; empty for plain
            decoding.

    Raises:
        UserError: the model is not a GGUF file, a quote is open, or the server does not start.
    """

    def __init__(self, program: str, model: str, threads: int, speculation: str = "") -> None:
        file = gguf_file("llama.cpp", model)
        with socket.socket() as unused:
            unused.bind((_HOST, 0))
            port = unused.getsockname()[1]
        options: dict[str, Any] = {"host": _HOST, "port": port, "model": file, "ctx-size": CONTEXT}
        options |= {"parallel": 1, "threads": threads, "threads-batch": threads, "cache-ram": 0}
        command = [program, *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
        with explained(f"cannot read the options of llama.cpp:{speculation}", ValueError):
            command += ["--spec-type", *shlex.split(speculation)] if speculation else []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the process)
        weakref.finalize(self, self._log.close)
        with explained(f"cannot run {program}", OSError):
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        self._client = open_client(f"http://{_HOST}:{port}")
        self.close = weakref.finalize(self, _end, self._process, self._client)
        self.pid = self._process.pid
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):  # not listening yet
                if self._client.get("/health").is_success:
                    return
            time.sleep(0.05)
        raise self._failure("did not load the model")

    def complete(self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool = False) -> Completion:
        """Decode a prompt of token ids. Raises ``UserError``: the server refuses the request, or has ended."""
        request: dict[str, Any] = {"prompt": list(prompt), "n_predict": max_new_tokens, "ignore_eos": ignore_eos}
        request |= {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True}
        try:
            response = self._client.post("/completion", json=request)
        except httpx.HTTPError as error:
            raise self._failure("did not answer") from error
        reply = response.json()
        if response.is_error:
            raise UserError(f"llama-server refused a request of {len(prompt)} tokens: {reply['error']['message']}")
        times = reply["timings"]
        return Completion(reply["tokens"], times["predicted_ms"] / 1000, times["prompt_ms"] / 1000)

    def _failure(self, what: str) -> UserError:
        """The error for a server that does not answer, with the last error in its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # for the status of a process that is ending
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = list(filter(None, map(str.strip, self._log.read().decode(errors="replace").split("\n"))))
        complaints = [line for line in lines if _COMPLAINT.search(line)] or lines or ["no message"]
        return UserError(f"llama-server {what} and ended with status {self._process.returncode}: {complaints[-1]}")


def _end(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    client.close()
    process.kill()
    process.wait()


LOOKUP = "lookup"


class OpenVino:
    """A pipeline of OpenVINO GenAI on the CPU, with its own default precision.

    Args:
        model: a GGUF file, or the name of a GGUF model.
        speculation: ``"lookup"`` for prompt lookup, with 5 candidates after 3 tokens, as in OpenVINO's documentation;
            empty for plain decoding.

    Raises:
        UserError: OpenVINO is not installed or cannot read the weights, the model is not a GGUF file, or
            ``speculation`` has another value.
    """

    def __init__(self, model: str, threads: int, speculation: str = "") -> None:
        file = gguf_file("OpenVINO", model)
        if speculation not in ("", LOOKUP):
            raise UserError(f"openvino's speculation must be {LOOKUP}: got {speculation!r}")
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise UserError("the method openvino needs OpenVINO GenAI: run pip install 'mmspec[peers]'") from error
        self._tensor = openvino.Tensor
        self._lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3} if speculation else {}
        options: dict[str, Any] = {"prompt_lookup": True} if speculation else {}
        with explained(f"OpenVINO cannot load {file}", RuntimeError):
            self._pipeline = openvino_genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=threads, **options)

    def complete(self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool = False) -> Completion:
        """Decode a prompt of token ids; every request includes a prefill."""
        config = self._pipeline.get_generation_config()
        wanted = {"max_new_tokens": max_new_tokens, "do_sample": False, "ignore_eos": ignore_eos, **self._lookup}
        for name, value in wanted.items():
            setattr(config, name, value)
        result = self._pipeline.generate(self._tensor(np.array([prompt], dtype=np.int64)), config)
        (tokens,), times = result.tokens, result.perf_metrics
        first = times.get_ttft().mean / 1000
        return Completion(list(tokens), times.get_generate_duration().mean / 1000 - first, first)


Peer = LlamaServer | OpenVino


def engines(model: str, threads: int, llama_server: str | None) -> dict[str, Callable[[str], Peer]]:
    """Other engines by name, which a speculation starts; llama.cpp by the path of its server."""
    started: dict[str, Callable[[str], Peer]] = {OPENVINO: partial(OpenVino, model, threads)}
    return started | ({LLAMA: partial(LlamaServer, llama_server, model, threads)} if llama_server else {})
