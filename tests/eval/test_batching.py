"""Goodput by batch size: how many sequences decode together, and its figures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import mmspec
from mmspec.engine.stats import Stats
from mmspec.eval import batching
from mmspec.eval.harness.timing import TimedBatch
from mmspec.targets.transformers_target import TransformersTarget
from tests.model_folders import save_text_model

SMALL = ["--requests", "4", "--batch", "1,3", "--nodes", "2", "--drafters", "ngram", "--rounds", "1"]
METHODS = ["mmspec, no drafter", "ngram, 2 nodes", "ngram, adaptive"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_text_model(tmp_path_factory.mktemp("text")))


def test_a_small_run_decodes_as_many_sequences_as_each_method_is_named_for(folder, monkeypatch):
    widest = {}
    forward = TransformersTarget.verify

    def counted(target, tree, *rest):
        widest[target] = max(widest.get(target, 0), len(tree.tokens))
        return forward(target, tree, *rest)

    monkeypatch.setattr(TransformersTarget, "verify", counted)
    done = CliRunner().invoke(batching.main, ["--model", folder, *SMALL, "--max-new-tokens", "12"])
    assert done.exit_code == 0, done.output
    assert sorted(widest.values()) == [1, 1, 3]  # the expected answers; a fork for each batch size
    rows = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert [(row["batch"], row["method"]) for row in rows] == [(size, name) for size in (1, 3) for name in METHODS]
    for plain, fixed, adaptive in (rows[:3], rows[3:]):
        assert (plain["over_plain"], plain["mean_acceptance_length"], plain["draft_tokens_per_step"]) == (1, 1, 0)
        assert fixed["over_plain"] == pytest.approx(fixed["tokens_per_second"] / plain["tokens_per_second"])
        assert 0 < fixed["draft_tokens_per_step"] <= 2
        assert [row["equal"] for row in (plain, fixed, adaptive)] == [4] * 3


def test_methods_learn_apart(folder):
    pipe = mmspec.load(folder, None)
    methods = batching._methods(pipe, "recycle", [1, 3], "2")
    learning = [method.drafter for method in methods.values() if method.drafter is not None]
    assert len({id(drafter) for drafter in learning}) == len(learning) == 4
    assert len({id(method.target) for method in methods.values()} | {id(pipe.target)}) == 3


def test_figures_are_medians_of_the_rounds_and_means_over_all_steps():
    one, two = Stats(), Stats()
    one.record_step(4, 2, 2, 3)
    one.record_step(4, 2, 0, 1)
    two.record_step(1, 1, 0, 1)
    answers = [[5, 6, 7, 8, 9], [5, 6]]
    rounds = [TimedBatch(answers, [one, two], {"total": seconds}) for seconds in (2.0, 7.0, 3.5)]
    rounds[0] = TimedBatch([[5], [5, 6]], [one, two], {"total": 2.0})
    figures = batching._figures(rounds, answers)
    assert figures["tokens_per_second"] == pytest.approx(7 / 3.5)
    assert figures["mean_acceptance_length"] == pytest.approx(5 / 3)
    assert figures["draft_tokens_per_step"] == pytest.approx(9 / 3)
    assert (figures["equal"], figures["answers"]) == (1, 2)  # of the worst round
