"""Scorers: functions from samples with answers to scores by name, the main score first."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from mmspec.errors import missing
from mmspec.eval.harness.prompts import Questions


@dataclass(frozen=True)
class Sample:
    """One conversation of a task, with its category in Spec-Bench's results and accepted answers by turn."""

    id: str
    conversation: Questions
    category: str = ""
    references: tuple[tuple[str, ...], ...] = ()
    metadata: Any = None


Answered = tuple[Sample, Sequence[str]]  # a sample and the answers to its turns
Scorer = Callable[[Sequence[Answered]], dict[str, float]]
"""Scores by name over all answers, from 0 to 1 or as the benchmark defines them; the first is the main score."""

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_ARTICLES = {"a", "an", "the"}


def normalise(text: str) -> str:
    """Normalise an answer as in the VQA challenge, without its table of misspelt contractions. Lower case, digits for
    number words up to ten, no articles, no apostrophes, no punctuation but decimal points and signs."""
    text = text.lower().replace("'", "").replace("\u2019", "")
    text = re.sub(r"(?<=\d),(?=\d)|[.](?!\d)", "", text)
    words = re.sub(r"[^\w\s.%$:/-]", " ", text).replace("-", " ").split()
    words = [str(_NUMBERS.index(word)) if word in _NUMBERS else word.strip(".:/") for word in words]
    return " ".join(word for word in words if word and word not in _ARTICLES)


def _mean_over_turns(name: str) -> Callable[[Callable[[str, Sequence[str]], float]], Scorer]:
    """Make a scorer, which averages over all turns with references, of a function of an answer and its references."""

    def scorer(score: Callable[[str, Sequence[str]], float], answered: Sequence[Answered]) -> dict[str, float]:
        turns = [turn for sample, answers in answered for turn in zip(answers, sample.references, strict=False)]
        each = [score(answer, accepted) for answer, accepted in turns if accepted]
        return {name: mean(each) if each else 0.0}

    return lambda score: partial(scorer, score)


def _exact(answer: str, accepted: Sequence[str]) -> float:
    return float(normalise(answer) in {normalise(reference) for reference in accepted})


def _contained(answer: str, accepted: Sequence[str]) -> float:
    text = f" {normalise(answer)} "
    return float(any(f" {normalise(reference)} " in text for reference in accepted))


@_mean_over_turns("VQA accuracy")
def vqa_accuracy(answer: str, accepted: Sequence[str]) -> float:
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


@_mean_over_turns("relaxed accuracy")
def relaxed(answer: str, accepted: Sequence[str]) -> float:
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


@_mean_over_turns("ANLS")
def anls(answer: str, accepted: Sequence[str]) -> float:
    """1 - normalised edit distance to the nearest reference, 0 below one half (arXiv 1905.13648, section 5)."""
    text, *wanted = (" ".join(one.lower().split()) for one in (answer, *accepted))
    best = max(1 - _edit_distance(text, one, 1) / max(len(text), len(one), 1) for one in wanted)
    return best if best >= 0.5 else 0.0


def _edit_distance(a: Sequence[str], b: Sequence[str], replacement: int) -> int:
    """Least cost of edits from a to b: 1 for an insertion or deletion, ``replacement`` for a replacement."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + replacement * (x != y))
    return row[-1]


@_mean_over_turns("ROUGE-L")
def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """ROUGE-L: F1 of the longest common subsequence of words, with the best reference."""
    text, *wanted = (normalise(one).split() for one in (answer, *accepted))
    # Without replacements, words outside of the subsequence are deleted or inserted.
    return max(1 - _edit_distance(text, one, 2) / (len(text) + len(one)) for one in wanted) if text else 0.0


@_mean_over_turns("exact match")
def last_number(answer: str, accepted: Sequence[str]) -> float:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return float(bool(numbers) and _parse_number(numbers[-1]) in {_parse_number(reference) for reference in accepted})


exact = _mean_over_turns("exact match")(_exact)
contained = _mean_over_turns("reference in answer")(_contained)


def mentioned(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of required items that answers mention, and share of answers that mention all required items. ``metadata``
    has the accepted wordings of each thing to mention; samples without any are not counted."""
    pairs = [(answers[0], sample.metadata) for sample, answers in answered if sample.metadata]
    found = [[_contained(answer, wordings) for wordings in parts] for answer, parts in pairs] or [[0.0]]
    return {"mentioned": mean(share for shares in found for share in shares), "all mentioned": mean(map(min, found))}


def edited(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of answers with the expected function in a fenced block, and share with any that parses. Functions are
    compared as syntax trees, without the words of docstrings and type hints. No answer is run."""
    blocks = [re.search(r"^```\w*\n(.*?)^```", answers[0], re.DOTALL | re.MULTILINE) for _, answers in answered]
    found = [_function(block[1]) if block else None for block in blocks]
    expected = [{_function(code) for code in sample.references[0]} for sample, _ in answered]
    return {
        "edited": mean(float(one in accepted) for one, accepted in zip(found, expected, strict=True)),
        "parses": mean(float(one is not None) for one in found),
    }


def _function(code: str) -> str | None:
    """The syntax tree of the first function, without the words of docstrings and types; None if there is none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # unknown escapes in strings
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if function is None:
        return None
    if ast.get_docstring(function) is not None:
        function.body[0] = ast.Pass()
    for node in ast.walk(function):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(...))
    return ast.dump(function)


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
    right = [
        float(chosen_letter(answers[0], sample.metadata) == sample.references[0][0])
        if sample.metadata
        else _exact(answers[0], sample.references[0])
        for sample, answers in answered
    ]
    return {"accuracy": mean(right)}


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
    right: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample, answers in answered:
        said, truth = says_yes(answers[0]), says_yes(sample.references[0][0])
        right[sample.category][str(sample.metadata)].append(float(said is not None and said == truth))
    categories = [list(images.values()) for images in right.values()]
    each = [[good for goods in images for good in goods] for images in categories]
    score = sum(mean(goods) + mean(map(min, images)) for goods, images in zip(each, categories, strict=True))
    return {"score": 100 * score, "accuracy": mean(good for goods in each for good in goods)}


def cider(answered: Sequence[Answered]) -> dict[str, float]:
    """CIDEr, computed by pycocoevalcap, of lower-case runs of letters and digits, instead of the original's tokeniser.
    Document frequencies come from the given references: a subset of a benchmark scores differently."""
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError:
        raise missing("CIDEr", "pycocoevalcap", "eval") from None

    def words(texts: Sequence[str]) -> list[str]:
        return [" ".join(re.findall(r"[a-z0-9]+", text.lower().replace("'", ""))) for text in texts]

    references = {k: words(sample.references[0]) for k, (sample, _) in enumerate(answered)}
    candidates = {k: words(answers[:1]) for k, (_, answers) in enumerate(answered)}
    score, _ = Cider().compute_score(references, candidates)
    return {"CIDEr": float(score)}
