"""Generated texts are determined by their index, correct and varied; scoring distinguishes wrong answers."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from mmspec.ssm.texts import KINDS, SPLITS, TextExample, correct, example
from mmspec.ssm.texts.__main__ import main
from mmspec.ssm.texts.checking import outputs, runs_right
from mmspec.ssm.texts.problems import final, problem, steps_of, worked
from mmspec.ssm.texts.words import plural

EACH = {kind: [example(index, "heldout", kind) for index in range(150)] for kind in KINDS}


def test_an_example_is_determined_by_split_and_index() -> None:
    assert example(7) == example(7, "train")
    assert example(7) != example(8)
    assert example(7, "heldout") != example(7)
    prompts = {split: {example(index, split).prompt for index in range(1500)} for split in SPLITS}
    assert not prompts["train"] & prompts["heldout"]
    assert len(prompts["train"]) > 1450
    assert {example(index).kind for index in range(100)} == set(KINDS)


@pytest.mark.parametrize(("split", "kind"), [("test", None), ("train", "poem")])
def test_unknown_splits_and_kinds_are_refused(split: str, kind: str | None) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        example(0, split, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_answer_is_correct_and_others_are_not(kind: str) -> None:
    examples = EACH[kind]
    assert all(correct(one, one.answer) for one in examples)
    others = [correct(one, other.answer) for one, other in pairwise(examples)]
    assert sum(others) < 0.2 * len(others)
    assert not any(correct(one, "") for one in examples)


def test_every_calculation_in_a_worked_solution_holds() -> None:
    checked = 0
    for one in EACH["problem"] + EACH["sums"]:
        for chain in re.findall(r"\d+(?: [-+x/] \d+)*(?: = \d+(?: [-+] \d+)*)+", one.answer):
            values = {eval(side.replace("x", "*")) for side in chain.split(" = ")}
            assert len(values) == 1, chain
            checked += 1
    assert checked > 600


def test_a_problem_has_the_numbers_that_its_solution_uses() -> None:
    for one in EACH["problem"]:
        told = {int(number) for number in re.findall(r"\d+", one.prompt)}
        first = int(re.findall(r"\d+", one.prompt)[0])
        lines = [line for line in one.answer.splitlines() if "=" in line]
        assert first in told
        assert str(first) in lines[0]
        assert f"= {final(one.answer)}" in lines[-1]


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_problems_have_the_requested_number_of_steps(steps: int) -> None:
    for seed in range(50):
        assert steps_of(problem(random.Random(seed), steps)[1]) == steps


def test_products_are_split_into_tens_and_ones() -> None:
    assert worked(6, "x", 24) == "6 x 24 = 120 + 24 = 144"
    assert worked(24, "x", 6) == "24 x 6 = 120 + 24 = 144"
    assert worked(6, "x", 20) == "6 x 20 = 120"
    assert worked(84, "/", 4) == "84 / 4 = 21"


@pytest.mark.parametrize("kind", ["problem", "story", "room", "program"])
def test_texts_vary_so_that_drafting_is_not_trivial(kind: str) -> None:
    lines = [re.sub(r"\d+", "0", line) for one in EACH[kind] for line in re.split(r"\n|(?<=\.) ", one.answer)]
    assert len(set(lines)) > 0.3 * len(lines)


def test_a_changed_note_is_detected() -> None:
    one = next(one for one in EACH["room"] if "red" in one.answer)
    assert not correct(one, one.answer.replace("red", "blue"))


def test_a_program_is_scored_by_its_outputs() -> None:
    prompt = "Write a function top(items) that returns the largest of the items."
    one = TextExample("program", prompt, "def top(items):\n    return max((x for x in items), default=0)")
    same = "def top(items):\n    best = items[0] if items else 0\n    for x in items:\n        if x > best:\n"
    assert runs_right(one, same + "            best = x\n    return best")
    assert not runs_right(one, "def top(items):\n    return min((x for x in items), default=0)")
    assert not runs_right(one, "def top(items):\n    return max(x for x in items)")


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return open('/etc/passwd')",
        "def f(x):\n    for y in x:\n        x.append(y)\n    return x",
        "import os\ndef f(x):\n    return 1",
        "def f(x):\n    while 1:\n        x = x\n    return x",
        "def f(x):\n    return x.__class__",
        "def f(x):\n    return len([0] * 99999999)",
        "def f(x",
    ],
)
def test_unsafe_programs_are_not_run(source: str) -> None:
    assert outputs(source) is None
    assert outputs("def f(x):\n    return len(x)") == [5, 1, 0, 7, 4]


def test_plurals() -> None:
    assert [plural(noun) for noun in ("box", "bunch", "shelf", "tin")] == ["boxes", "bunches", "shelves", "tins"]


def test_the_command_writes_conversations(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "texts.jsonl"
    result = CliRunner().invoke(main, ["--count", "5", "--split", "heldout", "--first", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({record["id"] for record in records}) == 5
    human, model = records[0]["conversations"]
    assert (human["from"], human["value"]) == ("human", example(3, "heldout").prompt)
    assert (model["from"], model["value"]) == ("gpt", example(3, "heldout").answer)
    assert list(out.parent.iterdir()) == [out]
