"""Word-based scorers of short and free answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import mean

from mmspec.eval.suite.sample import Answered

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_ARTICLES = {"a", "an", "the"}


def normalise(text: str) -> str:
    """Normalise an answer as in the VQA challenge, without its table of misspelt contractions.

    Lower case, digits for number words up to ten, no articles, no apostrophes, no punctuation but decimal points and
    signs.
    """
    text = text.lower().replace("'", "").replace("\u2019", "")
    text = re.sub(r"(?<=\d),(?=\d)|[.](?!\d)", "", text)
    words = re.sub(r"[^\w\s.%$:/-]", " ", text).replace("-", " ").split()
    words = [str(_NUMBERS.index(word)) if word in _NUMBERS else word.strip(".:/") for word in words]
    return " ".join(word for word in words if word and word not in _ARTICLES)


def _mean_over_turns(name: str, score: Callable[[str, Sequence[str]], float]) -> Callable[..., dict[str, float]]:
    """A scorer that averages over all turns with references."""

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
    return float(normalise(answer) in {normalise(reference) for reference in accepted})


def _contained(answer: str, accepted: Sequence[str]) -> float:
    text = f" {normalise(answer)} "
    return float(any(f" {normalise(reference)} " in text for reference in accepted))


def _vqa(answer: str, accepted: Sequence[str]) -> float:
    """VQA accuracy: min(agreeing annotators / 3, 1), averaged over all subsets that leave one annotator out."""
    text, humans = normalise(answer), [normalise(reference) for reference in accepted]
    if len(humans) == 1:
        return float(text == humans[0])
    agreeing = sum(text == human for human in humans)
    return mean(min(1.0, (agreeing - (text == human)) / 3) for human in humans)


def _parse_number(text: str) -> float | None:
    text = text.strip().rstrip(".").replace(",", "").lstrip("$")
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def _relaxed(answer: str, accepted: Sequence[str]) -> float:
    """Exact match, with 5 % tolerance for numbers (ChartQA, arXiv 2203.10244, section 5.1)."""
    text = _parse_number(answer)
    for reference in accepted:
        wanted = _parse_number(reference)
        if text is not None and wanted is not None:
            if abs(text - wanted) <= 0.05 * abs(wanted):
                return 1.0
        elif answer.strip().rstrip(".").lower() == reference.strip().lower():
            return 1.0
    return 0.0


def _anls(answer: str, accepted: Sequence[str]) -> float:
    """1 - normalised edit distance to the nearest reference, 0 below one half (arXiv 1905.13648, section 5)."""
    text = " ".join(answer.lower().split())
    best = 0.0
    for reference in accepted:
        wanted = " ".join(reference.lower().split())
        best = max(best, 1 - _edit_distance(text, wanted) / max(len(text), len(wanted), 1))
    return best if best >= 0.5 else 0.0


def _edit_distance(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """ROUGE-L: F1 of the longest common subsequence of words, with the best reference."""
    text = normalise(answer).split()
    best = 0.0
    for reference in accepted:
        wanted = normalise(reference).split()
        row = [0] * (len(wanted) + 1)
        for x in text:
            before = 0
            for j, y in enumerate(wanted, start=1):
                before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
        best = max(best, 2 * row[-1] / max(len(text) + len(wanted), 1))
    return best


def _last_number(answer: str, accepted: Sequence[str]) -> float:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return float(bool(numbers) and _parse_number(numbers[-1]) in {_parse_number(reference) for reference in accepted})


exact = _mean_over_turns("exact match", _exact)
contained = _mean_over_turns("reference in answer", _contained)
vqa_accuracy = _mean_over_turns("VQA accuracy", _vqa)
relaxed = _mean_over_turns("relaxed accuracy", _relaxed)
anls = _mean_over_turns("ANLS", _anls)
rouge_l = _mean_over_turns("ROUGE-L", _rouge_l)
last_number = _mean_over_turns("exact match", _last_number)
