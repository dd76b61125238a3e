"""Drafts from what was already said: continuations of the current suffix in the prompt, the output and past outputs.

Prompt lookup (arXiv 2304.04487 and its descendants) as a tree: all occurrences of the longest known suffixes are merged
into one trie, and a node's confidence is the share of the occurrences that run through it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from torch import Tensor

from mmspec.budget import Budget
from mmspec.drafter import build_tree
from mmspec.errors import UserError
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

_OCCURRENCES = 12  # the latest occurrences of a suffix that are looked at
_TRUST = (0.35, 0.6, 0.75, 0.85, 0.9)  # first guess of how often a continuation of a suffix of 1, 2, ... tokens holds


class Ngram:
    """Prompt-lookup drafter.

    Args:
        longest, shortest: lengths of the suffixes to look up, in tokens.
        memory: tokens of earlier requests to keep as a source of drafts; 0 forgets each request.

    Raises:
        UserError: ``shortest`` is below 1 or above ``longest``.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, memory: int = 0) -> None:
        if not 1 <= shortest <= longest:
            raise UserError(f"suffix lengths must satisfy 1 <= shortest <= longest: got {shortest} and {longest}")
        self.lengths = range(longest, shortest - 1, -1)
        self.memory = memory
        self._past: list[int] = []
        self._history: list[list[int]] = []
        self._texts: list[_Text] = []

    def attach(self, target: Target) -> None:
        """Any target will do."""

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        if self.memory and self._history:
            for row in self._history:
                self._past += row
            del self._past[: -self.memory]
        self._history = history
        self._texts = [_Text(self._past, row, self.lengths) for row in history]

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        tries = [text.continuations(budget.max_depth, budget.nodes) for text in self._texts]
        keep = budget.take([gains for _, _, gains in tries])
        return build_tree(token, [(tokens[:keep], parents[:keep]) for tokens, parents, _ in tries])

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """The history grows by itself; suffixes are indexed when the next tree is asked for."""


class _Text:
    """One row's tokens and where each of their n-grams ended."""

    def __init__(self, past: list[int], history: list[int], lengths: range) -> None:
        self.past, self.history, self.lengths = past, history, lengths
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.indexed = 0

    def continuations(self, depth: int, nodes: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents (0 is the root) and path probabilities of the likeliest nodes, most probable first."""
        text = self.past + self.history if self.past else self.history
        self._index(text)
        starts: list[tuple[int, float]] = []
        seen: set[int] = set()
        for n in self.lengths:
            found = [end for end in self.ends.get(tuple(text[-n:]), ()) if end < len(text) and end not in seen]
            seen.update(found)
            starts += [(end, _TRUST[min(n, len(_TRUST)) - 1]) for end in found[-_OCCURRENCES:]]
            if len(starts) >= _OCCURRENCES:
                break
        return _best_first(text, starts, depth, nodes) if starts else ([], [], [])

    def _index(self, text: list[int]) -> None:
        for end in range(self.indexed + 1, len(text) + 1):
            for n in self.lengths:
                if n <= end:
                    self.ends[tuple(text[end - n : end])].append(end)
        self.indexed = len(text)


def _best_first(
    text: list[int], starts: list[tuple[int, float]], depth: int, nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """Merge continuations that start at ``starts`` (position, trust) into a trie and list its likeliest nodes.

    A child's share is its occurrences' trust over (the trust of all occurrences at the parent + what is missing to
    certainty), so that one weak occurrence stays a weak guess and many that agree become a strong one.
    """
    tokens: list[int] = []
    parents: list[int] = []
    gains: list[float] = []
    heap: list[tuple[float, int, int, int, list[tuple[int, float]], int]] = []
    order = 0

    def expand(node: int, gain: float, occurrences: list[tuple[int, float]], level: int) -> None:
        nonlocal order
        groups: dict[int, list[tuple[int, float]]] = {}
        for position, trust in occurrences:
            if position < len(text):
                groups.setdefault(text[position], []).append((position + 1, trust))
        total = sum(trust for _, trust in occurrences)
        doubt = 1.0 - max(trust for _, trust in occurrences)
        for token, group in groups.items():
            share = sum(trust for _, trust in group) / (total + doubt)
            order += 1
            heapq.heappush(heap, (-gain * share, order, token, node, group, level))

    expand(0, 1.0, starts, 1)
    while heap and len(tokens) < nodes:
        negative, _, token, parent, group, level = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        gains.append(-negative)
        if level < depth:
            expand(len(tokens), -negative, group, level + 1)
    return tokens, parents, gains
