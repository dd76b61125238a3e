"""Accuracy of the hybrid model: an oracle scores 1 everywhere, an empty answer 0."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from click.testing import CliRunner

from mmspec.eval import tiny_hybrid
from mmspec.ssm.texts import KINDS, example

TRUTH = {
    one.prompt: one.answer
    for kind in KINDS
    for one in (example(tiny_hybrid.FIRST_INDEX + index, "heldout", kind) for index in range(40))
}


def oracle(prompts: Sequence[str]) -> list[str]:
    return [TRUTH[prompt] for prompt in prompts]


def test_an_oracle_scores_one_and_empty_answers_zero() -> None:
    perfect = tiny_hybrid.text_accuracy(oracle, 40, 10)
    assert set(perfect.values()) == {1.0}
    assert {*KINDS, "program runs", "problem of 2 steps", "problem of 5 steps"} <= set(perfect)
    silent = tiny_hybrid.text_accuracy(lambda prompts: [""] * len(prompts), 40, 10)
    assert set(silent.values()) == {0.0}


def test_one_wrong_answer_counts_once() -> None:
    def wrong_once(prompts: Sequence[str]) -> list[str]:
        texts = oracle(prompts)
        return ["Answer: 1000", *texts[1:]]

    report = tiny_hybrid.text_accuracy(wrong_once, 40, 10)
    assert report["problem"] == pytest.approx(39 / 40)
    assert report["story"] == pytest.approx(0.9)
    assert report["program runs"] == pytest.approx(0.9)


def test_the_command_prints_a_table_and_one_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_hybrid, "greedy_decoder", lambda model, batch: oracle)
    result = CliRunner().invoke(tiny_hybrid.main, ["--problems", "4", "--others", "3"])
    assert result.exit_code == 0, result.output
    assert "100.0 %" in result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert figures["right"]["problem"] == 1.0
    assert (figures["problems"], figures["others"]) == (4, 3)
