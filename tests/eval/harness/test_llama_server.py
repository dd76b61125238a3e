"""llama.cpp as a baseline, with a program that answers as its server does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.errors import UserError
from mmspec.eval.harness.peers import CONTEXT, LlamaServer
from mmspec.eval.real import plain_step
from tests.eval.llama_server import CRASH, STEP, install


@pytest.fixture
def program(tmp_path: Path) -> str:
    return str(install(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.gguf").touch()
    return str(tmp_path / "model.gguf")


def log(program: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(program).with_suffix(".jsonl").read_text().splitlines()]


def test_requests_are_greedy_and_use_no_cache(program: str, model: str) -> None:
    server = LlamaServer(program, model, 3, "ngram-simple --spec-ngram-simple-size-n 4")
    answer = server.complete([5, 6, 7], 4)
    assert answer.tokens == [8, 9, 10, 11]
    assert answer.seconds == pytest.approx(3 * STEP)
    assert answer.token_seconds == pytest.approx(STEP)
    options, request = log(program)
    assert (options["--threads"], options["--threads-batch"], options["--parallel"]) == ("3", "3", "1")
    assert (options["--model"], options["--host"]) == (model, "127.0.0.1")
    assert (options["--spec-type"], options["--spec-ngram-simple-size-n"]) == ("ngram-simple", "4")
    assert request == {
        "path": "/completion", "prompt": [5, 6, 7], "n_predict": 4, "samplers": ["top_k"], "top_k": 1,
        "cache_prompt": False, "return_tokens": True, "ignore_eos": False,
    }  # fmt: skip


def test_plain_decoding_after_a_prefix(program: str, model: str) -> None:
    step = plain_step(LlamaServer(program, model, 1), prefix=42)
    assert step() == pytest.approx(STEP)
    options, request = log(program)
    assert "--spec-type" not in options
    assert (len(request["prompt"]), request["ignore_eos"]) == (42, True)


def test_the_process_ends_with_its_object(program: str, model: str) -> None:
    server = LlamaServer(program, model, 1)
    process = server._process
    assert process.poll() is None
    del server
    assert process.poll() is not None


def test_a_crash_is_one_line_with_the_end_of_the_log(program: str, model: str) -> None:
    server = LlamaServer(program, model, 1)
    message = r"^llama-server did not answer and ended with status 6: GGML_ASSERT\(false\) failed$"
    for _ in range(2):  # the second one finds no process
        with pytest.raises(UserError, match=message):
            server.complete([5], CRASH)


def test_a_refused_request_leaves_the_server_running(program: str, model: str) -> None:
    server = LlamaServer(program, model, 1)
    message = f"^llama-server refused a request of {CONTEXT + 1} tokens: request exceeds the available context size$"
    with pytest.raises(UserError, match=message):
        server.complete([5] * (CONTEXT + 1), 4)
    assert server.complete([5], 2).tokens == [6, 7]


def test_servers_that_do_not_start(program: str, model: str, tmp_path: Path) -> None:
    message = (
        r"^llama-server did not load the model and ended with status 1: error: unknown speculative type: nonsense$"
    )
    with pytest.raises(UserError, match=message):
        LlamaServer(program, model, 1, "nonsense")
    with pytest.raises(UserError, match=r"^cannot run /nowhere: .*No such file"):
        LlamaServer("/nowhere", model, 1)
    with pytest.raises(UserError, match=r"^cannot run .*: .*Permission denied|Exec format"):
        LlamaServer(model, model, 1)
    with pytest.raises(UserError, match=r"^llama\.cpp decodes GGUF files: expected a model of that format, received"):
        LlamaServer(program, str(tmp_path / "folder"), 1)
