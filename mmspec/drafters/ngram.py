"""N-gram drafter: prompt lookup (arXiv 2304.04487) in the prompt, the output and earlier requests, as a tree.

All occurrences of the longest known suffixes are merged into one trie; a node's confidence is the share of occurrences
that pass through it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.lookup import Children, LookUpDrafter
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError

_OCCURRENCES = 12  # latest occurrences used per suffix
_TRUST = (0.12, 0.3, 0.5, 0.65, 0.75)  # prior acceptance rate after a matching suffix of 1, 2, ... tokens


class Ngram(LookUpDrafter):
    """Prompt-lookup drafter.

    Args:
        longest, shortest: lengths of the suffixes to look up, in tokens.
        memory: tokens of finished requests to keep as a source of drafts; 0 keeps none.
        width: maximum children per node; 1 drafts chains, None trees of any width.

    Raises:
        UserError: ``shortest`` is below 1 or above ``longest``.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, memory: int = 0, width: int | None = None) -> None:
        if not 1 <= shortest <= longest:
            raise UserError(f"suffix lengths must satisfy 1 <= shortest <= longest: got {shortest} and {longest}")
        super().__init__()
        self.lengths = range(longest, shortest - 1, -1)
        self.memory, self.width = memory, width
        self._past: list[int] = []

    @property
    def learns(self) -> bool:
        """Whether it drafts from earlier requests."""
        return self.memory > 0

    def attach(self, target: Target) -> None:
        if target is not self._target:
            self._target = target
            self.select([])

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.rows += [_Text(self._past, row, self.lengths) for row in history]

    def select(self, rows: Sequence[int]) -> None:
        if self.memory:
            left = [text.history for row, text in enumerate(self.rows) if row not in rows]
            self._past = [token for text in (self._past, *left) for token in text][-self.memory :]
        super().select(rows)

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Occurrences, Children]:
        """Occurrences of the longest known suffixes, and their children."""
        return self.rows[row].start(path)


Occurrences = list[tuple[int, float]]  # (position of the next token, trust in it)


class _Text:
    """Suffix index of one row's tokens."""

    def __init__(self, past: list[int], history: list[int], lengths: range) -> None:
        self.past, self.history, self.lengths = past, history, lengths
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.indexed = 0

    def start(self, path: Sequence[int]) -> tuple[Occurrences, Children]:
        """See ``Ngram.start``."""
        text, longest = self.past + self.history if self.past else self.history, self.lengths[0]
        self._index(text)
        return self._occurrences(text, [*text[-longest:], *path][-longest:]), partial(_children, text)

    def _occurrences(self, text: list[int], tail: list[int]) -> Occurrences:
        """Occurrences of the longest known suffixes of ``tail``."""
        starts: list[tuple[int, float]] = []
        seen: set[int] = set()
        for n in self.lengths:
            ends = [end for end in self.ends.get(tuple(tail[-n:]), ()) if end < len(text) and end not in seen]
            seen.update(ends)
            starts += [(end, _TRUST[min(n, len(_TRUST)) - 1]) for end in ends[-_OCCURRENCES:]]
            if len(starts) >= _OCCURRENCES:
                break
        return starts

    def _index(self, text: list[int]) -> None:
        for end in range(self.indexed + 1, len(text) + 1):
            for n in self.lengths:
                if n <= end:
                    self.ends[tuple(text[end - n : end])].append(end)
        self.indexed = len(text)


def _children(text: list[int], occurrences: Occurrences) -> Iterator[tuple[int, float, Occurrences]]:
    """Next tokens at the occurrences, with merged duplicates.

    A token's probability is its occurrences' trust / (total trust + 1 - maximum trust): low for a single weak
    occurrence, high for many that agree.
    """
    groups: dict[int, Occurrences] = {}
    for position, trust in occurrences:
        if position < len(text):
            groups.setdefault(text[position], []).append((position + 1, trust))
    total = sum(trust for _, trust in occurrences)
    doubt = 1.0 - max((trust for _, trust in occurrences), default=0.0)
    for token, group in groups.items():
        yield token, sum(trust for _, trust in group) / (total + doubt), group


SPEC = DrafterSpec(
    "ngram",
    "n-gram",
    "looks up what followed the last tokens earlier in the sequence: prompt lookup, as in arXiv 2304.04487",
    Ngram,
    chains=False,
)
