"""Fields that check themselves: each rule refuses what its words exclude, in one line, and takes what they allow.
Exceptions of libraries as errors of the user."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from mmspec import SamplingParams, UserError
from mmspec.checks import Checked, shown
from mmspec.errors import explained, first_line

ROOT = Path(__file__).parents[2]
for path in sorted(ROOT.glob("mmspec/**/*.py")) + sorted(ROOT.glob("mmspec/*/**/*.py")):
    if re.search(r"^class \w+\(\w*(?:Checked|Options|Config)\):", path.read_text(), re.MULTILINE):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))

NUMBER = re.compile(r"(?:a )?(whole number|number)? ?(?:in ([\[(])(\S+), (\S+)([\])])|(>=?) (\S+))")
NO_NUMBERS = ["5", b"5", nan, inf, -inf, True, [1], {}, object()]
WORDS: dict[str, tuple[list[Any], list[Any]]] = {
    "True or False": ([True, False], [1, "True", None, []]),
    "text": (["", "a"], [5, b"a", "\ud800", ["a"]]),
    "text that is not empty": ([], ["", 5, b"a", "\ud800", ["a"]]),
    "an object": ([{}], [5, [], "a"]),
    "a path": ([Path("a")], ["a", 5]),
    "a list of one text or more": ([["a"]], [[], "a", [5]]),
    "a list of whole numbers, as 2,16,29 on the command line": ([[], [1]], [1, "1", [1.5], [True]]),
    "text or a list of texts": (
        ["a", "", ["a", "b"], ("a",), ["END", ""]],
        [5, b"END", ["END", 5], "\ud800", {"a": 1}.keys() ^ {5}],
    ),
    "a list of logits processors": ([[]], [5, [5], len]),
    "a list of callables": ([[len]], ["ab", [5]]),
}
"""Values that a rule's words allow, and others that they exclude; those of numbers and lists are derived."""


def values(words: str) -> tuple[list[Any], list[Any]]:
    if words.startswith("None or "):
        right, wrong = values(words.removeprefix("None or "))
        return [None, *right], [value for value in wrong if value is not None]
    if (each := re.sub("^(a list|values separated by commas), each ", "", words)) != words:
        right, wrong = values(each)
        return [[], right, tuple(right)], [5, *([value] for value in wrong)]
    if re.fullmatch(r"('[^']*'( or )?)+", words):
        right = re.findall("'([^']*)'", words)
        return right, [f"{right[0]}x", 5, []]
    found = NUMBER.fullmatch(words)
    if words in WORDS or found is None:
        return WORDS.get(words, ([], []))
    kind: Any = int if found[1] == "whole number" else float
    right, wrong = [], [*NO_NUMBERS, *([2.5] if kind is int else [])]
    for number, closed, side in ((found[3], found[2], -1), (found[4], found[5], 1), (found[7], found[6], -1)):
        if number is not None:
            end = kind(number)
            (right if closed in ("[", "]", ">=") else wrong).append(end)
            wrong.append(end + side * (1 if kind is int else max(abs(end), 1) / 1000))
    return right, wrong


def classes(kind: type[Checked] = Checked) -> Iterator[type[Checked]]:
    for one in kind.__subclasses__():
        yield one
        yield from classes(one)


def test_fields_take_what_their_rules_allow_and_refuse_the_rest() -> None:
    unread = set()
    for kind in classes():
        for name in (one.name for one in fields(kind)):  # type: ignore[arg-type]
            rule = kind.rule(name)
            right, wrong = values(rule.expected)
            for value in right:
                rule.check(name, value)
            for value in wrong:
                if value is None and rule.holds(None):  # a field that need not be set
                    continue
                with pytest.raises(UserError) as caught:
                    rule.check(name, value)
                message = str(caught.value)
                assert message.startswith(f"{name} must be {rule.expected}: got "), (kind, value)
                assert "\n" not in message
                assert len(message) < 240
                message.encode()  # can be printed
            if not wrong:
                unread.add(rule.expected)
    assert len(unread) <= 6, unread


def test_a_field_of_a_class_is_checked() -> None:
    with pytest.raises(UserError, match=r"^top_k must be a whole number >= 0: got -1$"):
        SamplingParams(top_k=-1)
    assert shown("x" * 1000) == "str " + repr("x" * 1000)[:80] + "..."


def test_first_line() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("a" * 900)) == "a" * 400 + " ..."


def test_named_exceptions_become_one_line() -> None:
    with pytest.raises(UserError, match=r"^cannot read x: no$") as raised, explained("cannot read x", OSError):
        raise OSError("no\nfile")
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("error", [UserError("said"), KeyError("other")])
def test_other_exceptions_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained("cannot read x", OSError, ValueError):
        raise error
    assert raised.value is error
