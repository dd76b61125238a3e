"""Short answers and free ones: compared word by word with references."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import mean

from eval.suite.sample import Answered

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_ARTICLES = {"a", "an", "the"}


def plain(text: str) -> str:
    """Lower case, digits for number words up to ten, no articles, no punctuation but decimal points and signs.

    The normalisation of the VQA challenge, without its table of misspelt contractions: apostrophes go on both sides.
    """
    text = text.lower().replace("'", "").replace("\u2019", "")
    text = re.sub(r"(?<=\d),(?=\d)|[.](?!\d)", "", text)
    words = re.sub(r"[^\w\s.%$:/-]", " ", text).replace("-", " ").split()
    words = [str(_NUMBERS.index(word)) if word in _NUMBERS else word.strip(".:/") for word in words]
    return " ".join(word for word in words if word and word not in _ARTICLES)


def _mean_over_turns(name: str, score: Callable[[str, Sequence[str]], float]) -> Callable[..., dict[str, float]]:
    """A scorer that averages over all turns that have references."""

    def scorer(answered: Sequence[Answered]) -> dict[str, float]:
        each = [
            score(answer, accepted)
            for sample, answers in answered
            for answer, accepted in zip(answers, sample.references, strict=False)
            if accepted
        ]
        return {name: mean(each) if each else 0.0}

    return scorer


def _exact(answer: str, accepted: Sequence[str]) -> float:
    return float(plain(answer) in {plain(one) for one in accepted})


def _contained(answer: str, accepted: Sequence[str]) -> float:
    said = f" {plain(answer)} "
    return float(any(f" {plain(one)} " in said for one in accepted))


def _vqa(answer: str, accepted: Sequence[str]) -> float:
    """Mean over all choices of leaving one human out: a third for each of the others who agrees, at most 1."""
    said, humans = plain(answer), [plain(one) for one in accepted]
    if len(humans) == 1:
        return float(said == humans[0])
    agreeing = sum(said == human for human in humans)
    return mean(min(1.0, (agreeing - (said == human)) / 3) for human in humans)


def _number(text: str) -> float | None:
    text = text.strip().rstrip(".").replace(",", "").lstrip("$")
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def _relaxed(answer: str, accepted: Sequence[str]) -> float:
    """Numbers may be 5 % off; all else must match (ChartQA, arXiv 2203.10244, section 5.1)."""
    said = _number(answer)
    for one in accepted:
        wanted = _number(one)
        if said is not None and wanted is not None:
            if abs(said - wanted) <= 0.05 * abs(wanted):
                return 1.0
        elif answer.strip().rstrip(".").lower() == one.strip().lower():
            return 1.0
    return 0.0


def _anls(answer: str, accepted: Sequence[str]) -> float:
    """1 - normalised edit distance to the nearest reference, 0 from one half on (arXiv 1905.13648, section 5)."""
    said = " ".join(answer.lower().split())
    best = 0.0
    for one in accepted:
        wanted = " ".join(one.lower().split())
        best = max(best, 1 - _edits(said, wanted) / max(len(said), len(wanted), 1))
    return best if best >= 0.5 else 0.0


def _edits(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _overlap(answer: str, accepted: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, to the best reference (ROUGE-L)."""
    said = plain(answer).split()
    best = 0.0
    for one in accepted:
        wanted = plain(one).split()
        row = [0] * (len(wanted) + 1)
        for x in said:
            before = 0
            for j, y in enumerate(wanted, start=1):
                before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
        best = max(best, 2 * row[-1] / max(len(said) + len(wanted), 1))
    return best


def _last_number(answer: str, accepted: Sequence[str]) -> float:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return float(bool(found) and _number(found[-1]) in {_number(one) for one in accepted})


exact = _mean_over_turns("exact match", _exact)
contained = _mean_over_turns("reference in answer", _contained)
vqa_accuracy = _mean_over_turns("VQA accuracy", _vqa)
relaxed = _mean_over_turns("relaxed accuracy", _relaxed)
anls = _mean_over_turns("ANLS", _anls)
overlap = _mean_over_turns("ROUGE-L", _overlap)
last_number = _mean_over_turns("exact match", _last_number)
