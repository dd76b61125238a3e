"""Multiple choice: which letter, or which option's words, an answer names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import mean

from eval.suite.sample import Answered
from eval.suite.scoring.words import plain


def chosen(answer: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer means; None where it names none, or several."""
    letters = [chr(ord("A") + k) for k in range(len(options))]
    # A letter alone, in brackets, before a full stop or colon, or behind "answer is".
    for pattern in (
        r"^\W*([A-Z])\W*$",
        r"^\W*([A-Z])[.):]",
        r"\(([A-Z])\)",
        r"(?:answer|option)(?: is)?:? \(?([A-Z])\b",
    ):
        found = [letter for letter in re.findall(pattern, answer.strip()) if letter in letters]
        if len(set(found)) == 1:
            return found[0]
    said = f" {plain(answer)} "
    named = [letter for letter, option in zip(letters, options, strict=True) if f" {plain(str(option))} " in said]
    return named[0] if len(named) == 1 else None


def choice(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of right answers; questions without options must be answered in the reference's words."""
    right = []
    for sample, answers in answered:
        (accepted,) = sample.references
        if sample.about:
            right.append(chosen(answers[0], sample.about) == accepted[0])
        else:
            right.append(plain(answers[0]) in {plain(one) for one in accepted})
    return {"accuracy": mean(map(float, right))}
