"""A drafter that knows the answer and hides it, so that trees of every shape and acceptance are verified.

Real drafters mostly propose the same kind of tree. This one mixes the true continuation, cut and sometimes spoiled at
random places, with decoys in random topological order, differently in each row of a batch.
"""

from __future__ import annotations

import random

from torch import Tensor

from mmspec.budget import Budget
from mmspec.drafter import build_tree
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict


class Oracle:
    """Drafts from known continuations.

    Args:
        references: the new tokens of each row, in the order of the prompts.
        vocab: decoys are drawn from ``range(vocab)``.
        seed: of the trees' shapes.
        nodes: drafted nodes per row and step at most.
        spoil: how often a wrong token is put into the true path.
    """

    def __init__(
        self, references: list[list[int]], *, vocab: int, seed: int = 0, nodes: int = 12, spoil: float = 0.3
    ) -> None:
        self.references = references
        self.vocab = vocab
        self.nodes = nodes
        self.spoil = spoil
        self._random = random.Random(seed)
        self._history: list[list[int]] = []
        self._starts: list[int] = []

    def attach(self, target: Target) -> None:
        """Any target whose continuations these are."""

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        self._history = history
        self._starts = [len(row) for row in prompt.histories()]

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        rows = []
        for history, start, reference in zip(self._history, self._starts, self.references, strict=True):
            truth = reference[len(history) - start :][: self._random.randint(0, budget.max_depth)]
            if truth and self._random.random() < self.spoil:
                truth[self._random.randrange(len(truth))] = self._random.randrange(self.vocab)
            size = min(budget.nodes, self.nodes)
            rows.append(self._shuffle(self._with_decoys(truth[:size], budget.max_depth, size)))
        return build_tree(token, rows)

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """The histories say all there is to know."""

    def _with_decoys(self, truth: list[int], depth: int, size: int) -> list[tuple[int, int]]:
        """(token, parent) of the true chain and of random nodes hung on it; the root is node 0."""
        nodes = [(token, place) for place, token in enumerate(truth)]
        level = [0, *range(1, len(truth) + 1)]
        for _ in range(self._random.randint(0, size - len(truth))):
            parent, token = self._random.randrange(len(level)), self._random.randrange(self.vocab)
            if level[parent] < depth and (token, parent) not in nodes:
                nodes.append((token, parent))
                level.append(level[parent] + 1)
        return nodes

    def _shuffle(self, nodes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """The same tree in a random order in which parents come before children."""
        place = {0: 0}
        tokens, parents = [], []
        waiting = set(range(1, len(nodes) + 1))
        while waiting:
            ready = sorted(i for i in waiting if nodes[i - 1][1] in place)
            picked = self._random.choice(ready)
            waiting.remove(picked)
            place[picked] = len(place)
            tokens.append(nodes[picked - 1][0])
            parents.append(place[nodes[picked - 1][1]])
        return tokens, parents
