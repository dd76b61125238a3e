"""The cost of a step: checks before timing, and the figures of every row."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from mmspec.eval import hybrid_cost
from mmspec.eval.hybrid_cost import StepBenchmark, measure_steps, shape_model
from mmspec.targets.runner import Runner
from mmspec.targets.transformers_target import TransformersTarget


@pytest.fixture(scope="module")
def model():
    return shape_model("tiny", torch.float32)


def test_figures_of_every_row(model):
    rows = measure_steps(model, 2, prefixes=[9, 20], threads=[1], nodes=[4, 9])
    assert [(row["prefix"], row["nodes"]) for row in rows] == [(9, 4), (9, 9), (20, 4), (20, 9)]
    assert [row["copies"] for row in rows] == [4, 13] * 2
    for row in rows:
        assert 0 < row["difference"] < 1e-4
        plain, theirs, tree = (row[f"{name}_seconds"] for name in ("plain", "transformers", "tree"))
        assert row["tree_over_plain"] == tree / plain
        assert row["tree_over_transformers"] == tree / theirs
        assert row["tree_over_faster"] == max(row["tree_over_plain"], row["tree_over_transformers"])


def test_a_step_includes_its_commit(model, monkeypatch):
    benchmark = StepBenchmark(model, 9, [9])
    monkeypatch.setattr(benchmark, "_commit_seconds", lambda rounds: (10_000.0, 20_000.0))
    seconds = benchmark.time(1)
    assert {name: round(spent, -4) for name, spent in seconds.items()} == {
        "transformers": 0,
        "plain": 10_000,
        "tree 9": 20_000,
        "unrolled 9": 20_000,
    }


def test_committed_paths_leave_the_first_branch(model, monkeypatch):
    benchmark, committed = StepBenchmark(model, 9, [4, 16]), []
    commit = Runner.commit_nodes
    monkeypatch.setattr(
        Runner, "commit_nodes", lambda self, path, rows: committed.append(rows) or commit(self, path, rows)
    )
    benchmark._commit_seconds(1)
    assert committed == [[[0]], [[0, 2, 6, 14]]]


@pytest.mark.parametrize("wrong", ["tree", "root"])
def test_wrong_logits_are_refused(model, monkeypatch, wrong):
    forward_tree = TransformersTarget.forward_tree

    def corrupted(self, tree):
        output = forward_tree(self, tree)
        logits, nodes = output.logits, tree.nodes
        if (type(self) is TransformersTarget and nodes > 1) if wrong == "tree" else nodes == 1:
            logits = logits + torch.randn(logits.shape) * logits.std() * 0.01
        return replace(output, logits=logits)

    benchmark = StepBenchmark(model, 9, [9])
    benchmark.check()
    monkeypatch.setattr(TransformersTarget, "forward_tree", corrupted)
    with pytest.raises(AssertionError, match="logits differ"):
        benchmark.check()


def test_the_command(tmp_path):
    out = tmp_path / "out.json"
    line = f"--shape tiny --prefixes 9,12 --nodes 4 --rounds 1 --threads 1 --dtype float32 --out {out}"
    result = CliRunner().invoke(hybrid_cost.main, line.split())
    assert result.exception is None, result.output
    found = json.loads(out.read_text())
    assert json.loads(result.output.splitlines()[-1]) == found
    assert [(row["prefix"], row["threads"], row["nodes"]) for row in found["rows"]] == [(9, 1, 4), (12, 1, 4)]
    assert found["parameters"] > 100_000
