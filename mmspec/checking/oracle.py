"""A randomised drafter given the correct output, to test verification on trees of every shape and acceptance.

Real drafters mostly propose similar trees. This one mixes the true continuation, truncated and sometimes corrupted at
random positions, with decoy nodes in random topological order, differently in each row of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree, build_tree
from mmspec.core.verify import Verdict


class Oracle(Drafter):
    """Drafts random trees around the known output.

    Args:
        references: new tokens of each sequence, in the order of joining; starts over when the batch is empty.
        vocab: decoys are drawn from ``range(vocab)``.
        nodes: maximum draft tokens per row and step.
        spoil: probability that one token of the true path is replaced.
    """

    def __init__(
        self, references: list[list[int]], *, vocab: int, seed: int = 0, nodes: int = 12, spoil: float = 0.3
    ) -> None:
        self.references, self.vocab, self.nodes, self.spoil = references, vocab, nodes, spoil
        self._random = random.Random(seed)
        self._rows: list[tuple[list[int], int, list[int]]] = []  # history, prompt length, reference
        self._begun = 0

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self._begun = self._begun if self._rows else 0
        references = self.references[self._begun : self._begun + len(history)]
        self._begun += len(history)
        self._rows += zip(history, [len(row) - 1 for row in history], references, strict=True)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        rows = []
        for history, start, reference in self._rows:
            truth = reference[len(history) - start :][: self._random.randint(0, plan.depth)]
            if truth and self._random.random() < self.spoil:
                truth[self._random.randrange(len(truth))] = self._random.randrange(self.vocab)
            size = min(plan.nodes, self.nodes)
            rows.append(self._shuffle(self._with_decoys(truth[:size], plan.depth, size)))
        return build_tree(token, rows)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """The histories passed to ``begin`` are updated by the engine."""

    def _with_decoys(self, truth: list[int], depth: int, size: int) -> list[tuple[int, int]]:
        """(token, parent) of the true chain and of random decoys attached to it; the root is node 0."""
        nodes = [(token, place) for place, token in enumerate(truth)]
        level = [0, *range(1, len(truth) + 1)]
        for _ in range(self._random.randint(0, size - len(truth))):
            parent, token = self._random.randrange(len(level)), self._random.randrange(self.vocab)
            if level[parent] < depth and (token, parent) not in nodes:
                nodes.append((token, parent))
                level.append(level[parent] + 1)
        return nodes

    def _shuffle(self, nodes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Tokens and parents of the same tree in a random topological order."""
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
