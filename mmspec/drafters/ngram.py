"""N-gram drafter: prompt lookup (arXiv 2304.04487) in the prompt, the output and earlier requests, with trees.

The drafter merges the continuations of the latest earlier occurrences of the last tokens into a tree. Each continuation
is weighted by the acceptance rate learned for its match length, so a long copy becomes a deep chain and a chance match
few nodes or none. After a copy departs from its source, as in edited code, places nearby get a higher weight.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.growth import Children, LookUpDrafter
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError

MEMORY = 4096
_SUFFIXES = 1, 2, 4  # suffix lengths for lookup, limited to shortest..longest
_OCCURRENCES = 8  # latest occurrences of the longest suffixes
_LENGTHS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32  # match length classes; the last is the maximum
_FIRST_TRUST = 0.05, 0.12, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94  # initial rate per class
_FIRST_RESUMED = 0.4, 0.6, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.85, 0.85, 0.9, 0.92, 0.94
_PRIOR = 8.0  # weight of the initial acceptance rate, in tokens
_DECAY = 0.95  # decay of earlier tokens' weight, per token
_COPY = 3  # minimum match length of a copy
_REACH = 16  # maximum source tokens that a copy may skip
_LOST = 12  # tokens after departure until a copy is abandoned


OWN, RESUMED, PAST = range(3)


class Match(NamedTuple):
    """A match: a place in a text whose tokens may be copied.

    Attributes:
        text: tokens of the sequence or of earlier requests.
        place: index of the next token.
        length: number of equal tokens before ``place``, at most the last of ``_LENGTHS``.
        kind: ``OWN`` (same sequence), ``RESUMED`` (copy continued after a difference) or ``PAST`` (earlier requests).
    """

    text: list[int]
    place: int
    length: int
    kind: int


class Trust:
    """Acceptance rate by match length and kind, weighted towards recent tokens."""

    def __init__(self) -> None:
        first = _FIRST_TRUST, _FIRST_RESUMED, _FIRST_TRUST
        self._counts = [[[_PRIOR * share, _PRIOR] for share in shares] for shares in first]

    def of(self, match: Match) -> float:
        right, seen = self._class(match)
        return right / seen

    def add(self, match: Match, right: bool) -> None:
        counts = self._class(match)
        counts[:] = counts[0] * _DECAY + right, counts[1] * _DECAY + 1.0

    def _class(self, match: Match) -> list[float]:
        return self._counts[match.kind][bisect_right(_LENGTHS, match.length) - 1]


class Ngram(LookUpDrafter):
    """Prompt-lookup drafter.

    Args:
        longest, shortest: suffix lengths for lookup, in tokens; matches may be longer.
        memory: minimum number of tokens of finished requests to keep as a source of drafts; 0 disables it.
        width: maximum children per node; 1 drafts chains, None trees of any width.

    Raises:
        UserError: ``shortest`` is below 1 or above ``longest``.
    """

    reliability = 1.0

    def __init__(self, longest: int = 4, shortest: int = 1, memory: int = MEMORY, width: int | None = None) -> None:
        if not 1 <= shortest <= longest:
            raise UserError(f"suffix lengths must satisfy 1 <= shortest <= longest: got {shortest} and {longest}")
        super().__init__()
        inner = {length for length in _SUFFIXES if shortest < length < longest}
        self._lengths = sorted({shortest, longest} | inner, reverse=True)
        self.memory, self.width = memory, width
        self._past, self._trust = _Index([], self._lengths), Trust()
        self._vocab: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ngram:
        # Copies start without rows, whose histories belong to this drafter and are extended by the engine.
        copied = copy.copy(self)
        vars(copied).update(copy.deepcopy({**vars(self), "rows": []}, memo))
        return copied

    def attach(self, target: Target) -> None:
        if target is not self._target:
            self._target = target
            self.select([])

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        if self._vocab != output.logits.shape[-1]:  # the vocabulary has changed
            self._past, self._vocab = _Index([], self._lengths), output.logits.shape[-1]
        self.rows += [_Text(row, self._lengths) for row in history]

    def select(self, rows: Sequence[int]) -> None:
        if self.memory:
            text = self._past.text
            for row in sorted(set(range(len(self.rows))).difference(rows)):
                text += self.rows[row].own.text
            if len(text) > 2 * self.memory:
                self._past = _Index(text[-self.memory :], self._lengths)
            self._past.extend(len(self._past.text))
        super().select(rows)

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[list[Match], Children]:
        """Matches after a row's tokens and ``path``, and the function that expands them."""
        text = self.rows[row]
        text.learn(self._past, self._trust)
        tokens = [*text.own.text, *path] if path else text.own.text
        return text.matches(tokens, len(tokens), self._past), partial(_children, self._trust)


class _Index:
    """Index of n-gram end positions in a growing text."""

    def __init__(self, text: list[int], lengths: Sequence[int]) -> None:
        self.text, self.lengths = text, lengths
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._indexed = 0

    def extend(self, upto: int) -> None:
        """Index all n-grams that end at position ``upto`` or earlier."""
        for end in range(self._indexed + 1, upto + 1):
            for length in self.lengths:
                if length <= end:
                    self._ends[tuple(self.text[end - length : end])].append(end)
        self._indexed = max(self._indexed, upto)

    def latest(self, tokens: list[int], count: int, length: int) -> Iterator[int]:
        """Places after the latest occurrences of the last ``length`` of ``count`` tokens, latest first."""
        if length > count:
            return iter(())
        return reversed(self._ends.get(tuple(tokens[count - length : count]), ())[-_OCCURRENCES:])


class _Text:
    """A row's tokens and the copy in progress."""

    def __init__(self, history: list[int], lengths: Sequence[int]) -> None:
        self.own = _Index(history, lengths)
        self._learned = len(history)
        self._copied: Match | None = None  # next token of the copy in its source, or place of departure
        self._departed = 0  # tokens since the departure

    def matches(self, tokens: list[int], count: int, past: _Index) -> list[Match]:
        """Matches after the first ``count`` of ``tokens``, which extend the row's tokens; best first."""
        self.own.extend(min(count, len(self.own.text)) - 1)
        found = list(self._resumed(tokens, count))
        seen = {(id(match.text), match.place) for match in found}
        for length, (kind, index) in product(self.own.lengths, ((OWN, self.own), (PAST, past))):
            for place in index.latest(tokens, count, length):
                if len(found) >= _OCCURRENCES:
                    return found
                if place < len(index.text) and (id(index.text), place) not in seen:
                    seen.add((id(index.text), place))
                    found.append(Match(index.text, place, _equal(index.text, place, tokens, count), kind))
        return found

    def _resumed(self, tokens: list[int], count: int) -> Iterator[Match]:
        """Candidates to continue the copy: the next token of its source, or places near the departure."""
        if self._copied is None:
            return
        text, first = self._copied.text, self._copied.place
        end = min(count, len(text)) if text is self.own.text else len(text)
        for place in range(first, min(first + (_REACH + 2 if self._departed else 1), end)):
            if length := _equal(text, place, tokens, count):
                goes_on = not self._departed and length >= _COPY
                yield Match(text, place, length, self._copied.kind if goes_on else RESUMED)
                return
        if self._departed == 1 and first + 1 < end:  # a token may have been replaced
            yield Match(text, first + 1, 0, RESUMED)

    def learn(self, past: _Index, trust: Trust) -> None:
        """Update acceptance rates with the tokens since the last call."""
        tokens = self.own.text
        for place in range(self._learned, len(tokens)):
            matches, token, known = self.matches(tokens, place, past), tokens[place], set[int]()
            for match in sorted(matches, key=trust.of, reverse=True):
                if match.kind not in known:
                    known.add(match.kind)
                    trust.add(match, match.text[match.place] == token)
            self._follow([match for match in matches if match.text[match.place] == token], trust)
        self._learned = len(tokens)

    def _follow(self, right: list[Match], trust: Trust) -> None:
        """Continue the copy that predicted the token, or count a token since the departure."""
        tokens = self.own.text
        copies = [match for match in right if match.kind == RESUMED or match.length >= _COPY]
        if copies:
            best = max(copies, key=trust.of)
            kind = OWN if best.text is tokens else PAST
            self._copied, self._departed = best._replace(place=best.place + 1, kind=kind), 0
        elif self._copied is not None:
            self._departed += 1
            if self._departed > _LOST:
                self._copied, self._departed = None, 0


def _equal(text: list[int], place: int, tokens: list[int], count: int) -> int:
    """Length of the common suffix of ``text[:place]`` and ``tokens[:count]``, capped."""
    length, most = 0, min(_LENGTHS[-1], place, count)
    while length < most and text[place - 1 - length] == tokens[count - 1 - length]:
        length += 1
    return length


def _children(trust: Trust, matches: list[Match]) -> Iterator[tuple[int, float, list[Match]]]:
    """Next tokens; the odds of their matches are summed."""
    following: dict[int, list[Match]] = {}
    odds: dict[int, float] = {}
    for match in matches:
        if match.place < len(match.text):
            token, share = match.text[match.place], min(trust.of(match), 0.995)
            odds[token] = odds.get(token, 0.0) + share / (1.0 - share)
            following.setdefault(token, []).append(
                Match(match.text, match.place + 1, min(match.length + 1, _LENGTHS[-1]), match.kind)
            )
    total = 1.0 + sum(odds.values())
    for token, below in following.items():
        yield token, odds[token] / total, below


SPEC = DrafterSpec(
    "ngram",
    "n-gram",
    "looks up earlier continuations of the last tokens: prompt lookup, as in arXiv 2304.04487",
    Ngram,
    chains=False,
)


class Suffix(Ngram):
    """``Ngram`` under the name of SuffixDecoding (arXiv 2411.04975), which finds the same matches of any length."""


SUFFIX = replace(
    SPEC,
    name="suffix",
    label="suffix",
    summary="ngram, by the name of SuffixDecoding (arXiv 2411.04975)",
    implementation=Suffix,
)
