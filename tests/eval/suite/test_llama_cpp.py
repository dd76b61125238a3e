"""llama.cpp among the methods of ``mmspec eval``, with a program that answers as its server does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec.errors import UserError
from mmspec.eval.suite.methods import parse_methods
from mmspec.eval.suite.run import run_suite
from mmspec.eval.suite.settings import SuiteSettings
from tests.eval.llama_server import STEP, install
from tests.model_folders import save_gguf

SPECULATION = "llama.cpp:ngram-simple --spec-ngram-simple-size-n 4"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run's folder and its summary."""
    out = tmp_path_factory.mktemp("llama")
    settings = SuiteSettings(
        str(save_gguf(out / "model.gguf")), ("texts",), f"llama.cpp,{SPECULATION}", limit=2, rounds=2, warm_up=1,
        max_new_tokens=6, temperatures=(0.0, 1.0), batch_sizes=(1, 2), dtype="float32", threads=1,
        llama_server=str(install(out)),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMSPEC_CACHE", str(out / "cache"))
        return out, run_suite(settings, out / "run")


def test_whole_requests_are_measured_and_not_compared(run: tuple[Path, dict[str, Any]]) -> None:
    rows = {row["method"]: row for row in run[1]["rows"] if (row["temperature"], row["batch"]) == (0, 1)}
    assert list(rows) == ["generate", "none", "llama.cpp", SPECULATION]
    found = rows["llama.cpp"]
    assert (found["tokens"], found["compared"], found["differences"]) == (12, 0, [])
    assert 0 < found["tokens_per_second"] < 1 / STEP
    assert found["end_to_end_llama"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["none"]["end_to_end_llama"]["median"] > 0
    assert rows["none"]["equal"] == rows["none"]["compared"] == 2


def test_both_servers_get_the_prompts_of_the_other_methods(run: tuple[Path, dict[str, Any]]) -> None:
    out, _ = run
    lines = [json.loads(line) for line in (out / "llama-server.jsonl").read_text().splitlines()]
    assert [line.get("--spec-type") for line in lines[:2]] == [None, "ngram-simple"]
    assert all(line["--threads"] == "1" for line in lines[:2])
    requests = [line for line in lines[2:] if line["n_predict"] == 6]
    assert len(requests) == 2 * 2 * 2  # conversations, rounds, methods
    settings = json.loads((out / "run" / "settings.json").read_text())
    pipe = mmspec.load(settings["model"], drafter=None, dtype="float32")
    samples = SuiteSettings(**settings).samples("texts")
    prompts = [pipe.encode([sample.conversation.request([])]).input_ids[0].tolist() for sample in samples]
    assert [request["prompt"] for request in requests] == [prompts[0]] * 4 + [prompts[1]] * 4


def test_samples_and_batches_are_left_out(run: tuple[Path, dict[str, Any]]) -> None:
    out, summary = run
    refused = {(one["method"], one["temperature"], one["batch"]) for one in summary["refused"]}
    conditions = [(0.0, 2), (1.0, 1), (1.0, 2)]
    assert {key for key in refused if key[0] != "lookup"} == {
        (name, *condition) for name in ("llama.cpp", SPECULATION) for condition in conditions
    }
    report = (out / "run" / "report.md").read_text()
    assert "- `llama.cpp`, batch 2: other engines decode greedily, one request at a time" in report
    first, second = (part.splitlines() for part in report.split("\n## ")[1:3])
    assert "vs llama.cpp" in first[2]
    assert "vs llama.cpp" not in second[2]  # without it the column is empty, and left out
    assert len({line.count("|") for line in first[2:7]}) == 1


def test_the_method_needs_a_server(run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(run[0] / "cache"))
    target = mmspec.load(str(run[0] / "model.gguf"), drafter=None, dtype="float32").target
    with pytest.raises(UserError, match=r"^the method 'llama.cpp:ngram-mod' needs --llama-server PATH"):
        parse_methods("x=llama.cpp:ngram-mod", target)
