"""Other engines as baselines, on the same GGUF file: servers (``ENGINES``), and OpenVINO GenAI in this process."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from mmspec import plugins
from mmspec.errors import UserError, explained
from mmspec.http_client import TIMEOUT, open_client
from mmspec.targets.gguf_file import file_in

LLAMA, IK_LLAMA, MISTRAL, OPENVINO = "llama.cpp", "ik_llama.cpp", "mistral.rs", "openvino"
LOOKUP = "lookup"  # the speculation of OpenVINO
CONTEXT = 16384  # tokens of a prompt and its answer
_HOST = "127.0.0.1"
_COMPLAINT = re.compile(r"^(?!.* exiting ).*(error|fail|couldn't)", re.IGNORECASE)


@dataclass(frozen=True)
class Completion:
    """A greedy answer, up to the end-of-sequence token, with the engine's own measurements.

    Attributes:
        count: generated tokens, the end-of-sequence token included.
        seconds, prompt_seconds: decode time after the first token, and prefill time.
        text, tokens: the answer; token ids only from engines that return them.
    """

    count: int
    seconds: float
    prompt_seconds: float
    text: str = ""
    tokens: Sequence[int] | None = None

    def token_ids(self, tokenizer: Any, end: int) -> list[int]:
        """The answer's tokens; from text, these are the tokenizer's, cut or filled with ``end`` to ``count`` tokens."""
        if self.tokens is not None:
            return list(self.tokens)
        tokens: list[int] = tokenizer(self.text, add_special_tokens=False)["input_ids"][: self.count]
        return tokens + [end] * (self.count - len(tokens))


@dataclass(frozen=True)
class Engine:
    """How to start the server of an engine, and to ask it.

    Attributes:
        options: its command-line options, with ``{host}``, ``{port}``, ``{model}``, ``{threads}`` and ``{context}``.
        route, body: of a greedy completion without cached prompts; ``prompt`` (token ids) is added.
        limit: the body's field of the largest number of new tokens.
        read: reads a reply.
        speculation: the option whose value is a method's speculation; empty if the engine has none of its own.
        command: the program, and options before ``options``; empty if the user gives them.
    """

    options: str
    route: str
    body: Mapping[str, Any]
    limit: str
    read: Callable[[Mapping[str, Any]], Completion]
    speculation: str = ""
    command: str = ""


def _read_llama(reply: Mapping[str, Any]) -> Completion:
    count, later, first = (reply["timings"][name] for name in ("predicted_n", "predicted_ms", "prompt_ms"))
    return Completion(count, later / 1000, first / 1000, reply["content"], reply.get("tokens"))


def _read_mistral(reply: Mapping[str, Any]) -> Completion:
    names = ("completion_tokens", "total_completion_time_sec", "total_prompt_time_sec")
    count, later, first = (reply["usage"][name] for name in names)
    return Completion(count, later, first, reply["choices"][0]["text"])


_LLAMA = Engine(
    "--host {host} --port {port} --model {model} --ctx-size {context} --parallel 1 --threads {threads} "
    "--threads-batch {threads} --cache-ram 0",
    "/completion",
    {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True},
    "n_predict",
    _read_llama,
    speculation="--spec-type",
)
_MISTRAL = Engine(
    "{model} {port} {threads}",
    "/v1/completions",
    {"temperature": 0},
    "max_tokens",
    _read_mistral,
    command=shlex.join([sys.executable, str(Path(__file__).with_name("mistral_server.py"))]),
)
_IK_LLAMA = replace(_LLAMA, options=f"{_LLAMA.options} --jinja --log-disable")  # without its log file
ENGINES: Mapping[str, Engine] = {LLAMA: _LLAMA, IK_LLAMA: _IK_LLAMA, MISTRAL: _MISTRAL}


def gguf_file(engine: str, model: str) -> str:
    """Resolve a model name to its GGUF file. Raises ``UserError``: the model has another format."""
    file = file_in(plugins.model_path(model))
    if file is None:
        raise UserError(f"{engine} decodes GGUF files: expected a model of that format, received {model!r}")
    return str(file)


class Server:
    """The process of an engine's server, which ends with ``close``, or when this object is collected.

    ``speculation`` is the value of the engine's option and further options, quoted as in a shell; empty for plain
    decoding.
    """

    def __init__(self, name: str, command: str, model: str, threads: int, speculation: str = "") -> None:
        self._name, self._engine = name, ENGINES[name]
        file, option = gguf_file(name, model), self._engine.speculation
        if speculation and not option:
            raise UserError(f"{name} has no speculation without a draft model: expected {name}, got {speculation!r}")
        with socket.socket() as unused:
            unused.bind((_HOST, 0))
            port = unused.getsockname()[1]
        values = {"host": _HOST, "port": port, "model": file, "threads": threads, "context": CONTEXT}
        with explained(f"cannot read the options of {name}:{speculation}", ValueError):
            words = [*shlex.split(command), *(part.format_map(values) for part in self._engine.options.split())]
            words += [option, *shlex.split(speculation)] if speculation else []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the process)
        weakref.finalize(self, self._log.close)
        with explained(f"cannot run {command}", OSError):
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        self.url = f"http://{_HOST}:{port}"
        self._client = open_client(self.url)
        self.close = weakref.finalize(self, _end, self._process, self._client)
        self.pid = self._process.pid
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):  # not listening yet
                if self._client.get("/health").is_success:
                    return
            time.sleep(0.05)
        raise self._failure("did not load the model")

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Decode a prompt of token ids. Raises ``UserError``: the server refuses the request, or has ended."""
        request = {"prompt": list(prompt), self._engine.limit: max_new_tokens, **self._engine.body}
        try:
            response = self._client.post(self._engine.route, json=request)
        except httpx.HTTPError as error:
            raise self._failure("did not answer") from error
        reply = response.json()
        if response.is_error:
            raise UserError(f"{self._name} refused a request of {len(prompt)} tokens: {reply['error']['message']}")
        return self._engine.read(reply)

    def _failure(self, what: str) -> UserError:
        """The error for a server that does not answer, with the last error in its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # for the status of a process that is ending
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = list(filter(None, map(str.strip, self._log.read().decode(errors="replace").split("\n"))))
        complaints = [line for line in lines if _COMPLAINT.search(line)] or lines or ["no message"]
        return UserError(f"{self._name} {what} and ended with status {self._process.returncode}: {complaints[-1]}")


def _end(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    client.close()
    process.kill()
    process.wait()


class OpenVino:
    """A pipeline of OpenVINO GenAI on the CPU, with its own default precision; decodes plainly, or by prompt lookup
    with 5 candidates after 3 tokens, as in OpenVINO's documentation."""

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

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Decode a prompt of token ids; every request includes a prefill."""
        config = self._pipeline.get_generation_config()
        for name, value in {"max_new_tokens": max_new_tokens, "do_sample": False, **self._lookup}.items():
            setattr(config, name, value)
        result = self._pipeline.generate(self._tensor(np.array([prompt], dtype=np.int64)), config)
        (tokens,), times = result.tokens, result.perf_metrics
        first = times.get_ttft().mean / 1000
        spent = times.get_generate_duration().mean / 1000 - first
        return Completion(len(tokens), spent, first, tokens=list(tokens))


Peer = Server | OpenVino


def servers(model: str, threads: int, peers: Sequence[str]) -> dict[str, Callable[[str], Server]]:
    """Servers of other engines by name, which a speculation starts; ``peers`` are NAME=COMMAND."""
    commands = {name: engine.command for name, engine in ENGINES.items() if engine.command}
    for peer in peers:
        name, _, command = peer.partition("=")
        if name not in ENGINES or not command:
            raise UserError(f"--peer must be NAME=COMMAND, with a NAME of {', '.join(ENGINES)}: got {peer!r}")
        commands[name] = command
    return {name: partial(Server, name, command, model, threads) for name, command in commands.items()}


def engines(model: str, threads: int, peers: Sequence[str]) -> dict[str, Callable[[str], Peer]]:
    """Other engines by name, which a speculation starts; ``peers`` as for ``servers``."""
    return {OPENVINO: partial(OpenVino, model, threads), **servers(model, threads, peers)}
