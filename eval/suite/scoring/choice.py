"""Multiple-choice accuracy: which option an answer chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import mean

from mmspec.eval.suite.sample import Answered
from mmspec.eval.suite.scoring.words import normalise


def chosen_letter(answer: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer names; None if it names none or several."""
    letters = [chr(ord("A") + k) for k in range(len(options))]
    # A letter alone, in brackets, before a full stop or colon, or after "answer is".
    for pattern in (
        r"^\W*([A-Z])\W*$",
        r"^\W*([A-Z])[.):]",
        r"\(([A-Z])\)",
        r"(?:answer|option)(?: is)?:? \(?([A-Z])\b",
    ):
        matches = [letter for letter in re.findall(pattern, answer.strip()) if letter in letters]
        if len(set(matches)) == 1:
            return matches[0]
    text = f" {normalise(answer)} "
    named = [letter for letter, option in zip(letters, options, strict=True) if f" {normalise(str(option))} " in text]
    return named[0] if len(named) == 1 else None


def choice_accuracy(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of correct answers; questions without options need an exact match with a reference."""
    right = []
    for sample, answers in answered:
        (accepted,) = sample.references
        if sample.metadata:
            right.append(chosen_letter(answers[0], sample.metadata) == accepted[0])
        else:
            right.append(normalise(answers[0]) in {normalise(reference) for reference in accepted})
    return {"accuracy": mean(map(float, right))}
