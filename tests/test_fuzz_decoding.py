"""The fuzz command of decoding: reproducible cases, a wrong engine is noticed; a bounded run of it."""

import json
import re

import pytest
from click.testing import CliRunner

from mmspec.core.verify import accept_path
from mmspec.engine import core
from tests import fuzz_decoding


def ran(*options):
    result = CliRunner().invoke(fuzz_decoding.main, options)
    return result, json.loads(result.stdout.splitlines()[-1])


def test_cases_depend_on_seed_and_number():
    cases = [fuzz_decoding.drawn(3, number) for number in range(60)]
    assert cases == [fuzz_decoding.drawn(3, number) for number in range(60)]
    assert len({repr(case) for case in cases}) == 60
    assert {type(case) for case in cases} == {fuzz_decoding.Hooked, fuzz_decoding.Together}
    assert fuzz_decoding.drawn(4, 0) != cases[0]


def test_a_case_without_a_difference():
    result, counts = ran("--only", "0")
    assert (result.exit_code, counts) == (0, {"seed": 0, "cases": 1, "differences": 0})


def test_an_engine_that_accepts_every_draft_is_noticed(monkeypatch):
    def accept_all(tree, choices):
        choices = choices.clone()
        for row, children in enumerate(tree.children):
            for node, tokens in enumerate(children):
                choices[row, node] = next(iter(tokens), choices[row, node])
        return accept_path(tree, choices)

    monkeypatch.setattr(core, "accept_path", accept_all)
    result, counts = ran("--count", "6")
    assert result.exit_code == 1
    assert counts["differences"] > 0
    number = re.search(r"^difference: --seed 0 --only (\d+)$", result.stdout, re.MULTILINE)[1]
    alone, counts = ran("--only", number)
    assert alone.exit_code == 1
    assert counts == {"seed": 0, "cases": 1, "differences": 1}
    monkeypatch.undo()
    assert ran("--only", number)[0].exit_code == 0


@pytest.mark.slow
def test_random_combinations_give_the_same_tokens():
    result, counts = ran("--minutes", "1")
    assert result.exit_code == 0, result.stdout
    assert counts["cases"] > 5
