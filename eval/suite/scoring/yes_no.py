"""Scores of yes-or-no benchmarks: POPE (arXiv 2305.10355) and MME (arXiv 2306.13394)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from mmspec.eval.suite.sample import Answered
from mmspec.eval.suite.scoring.words import normalise


def says_yes(answer: str) -> bool | None:
    """Whether an answer is yes; None if it contains neither yes nor no, or both."""
    words = set(normalise(answer).split())
    yes, no = "yes" in words, bool({"no", "not"} & words)
    return None if yes == no else yes


def pope(answered: Sequence[Answered]) -> dict[str, float]:
    """F1, accuracy, precision and recall of "yes", and its share; an unclear answer counts as no."""
    pairs = [(says_yes(answers[0]) is True, says_yes(s.references[0][0]) is True) for s, answers in answered]
    hits = sum(yes and true for yes, true in pairs)
    yes, true = sum(yes for yes, _ in pairs), sum(true for _, true in pairs)
    precision, recall = hits / max(yes, 1), hits / max(true, 1)
    return {
        "F1": 2 * precision * recall / max(precision + recall, 1e-9),
        "accuracy": mean(float(a == b) for a, b in pairs),
        "precision": precision,
        "recall": recall,
        "yes": yes / len(pairs),
    }


def mme(answered: Sequence[Answered]) -> dict[str, float]:
    """MME's score: 100 * (accuracy + share of images with all questions correct), summed over the categories."""
    right: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for sample, answers in answered:
        good = says_yes(answers[0]) is not None and says_yes(answers[0]) == says_yes(sample.references[0][0])
        right[sample.category][str(sample.metadata)].append(good)
    score, flat = 0.0, []
    for images in right.values():
        each = [good for goods in images.values() for good in goods]
        score += 100 * (mean(map(float, each)) + mean(float(all(goods)) for goods in images.values()))
        flat += each
    return {"score": score, "accuracy": mean(map(float, flat))}
