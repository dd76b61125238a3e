"""Tracing: a drafter that records the trees of another one and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.drafters.drafter import Drafter, features
from mmspec.speculation.budget import Budget
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict
from mmspec.targets.target import Feature, Prompt, Step, Target


@dataclass(frozen=True)
class JudgedTree:
    """The tree of one sequence in one step, and its verdict.

    Attributes:
        tokens, parents: of each node, the root first; its parent is -1.
        path: nodes of the accepted path, the root first. The step emits the tokens of all but the root, then the bonus.
        bonus: the target's token that follows the path.
        probs: of each node, the probability that the target gives its token after its parent (raw: before processors
            and temperature); the root's is 1.
        bonus_prob: the same of the bonus token.
        guesses: the drafter's own probability for the same; None where it has none.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    bonus: int
    probs: list[float]
    bonus_prob: float
    guesses: list[float] | None = None


class Traced:
    """A drafter that records its trees and their verdicts; a step without drafts is a tree of one node.

    Recording takes little time, which is counted as the step's.

    Args:
        drafter: drafts.

    Attributes:
        rows: by sequence, in the order of joining, the trees of its steps. A sequence that joins while no other decodes
            begins a new list.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rows: list[list[JudgedTree]] = []
        self._decoding: list[list[JudgedTree]] = []  # those of the current rows

    @property
    def features(self) -> tuple[Feature, ...]:
        """The hidden states that the drafter reads."""
        return features(self.drafter)

    def attach(self, target: Target) -> None:
        self.drafter.attach(target)

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        new: list[list[JudgedTree]] = [[] for _ in history]
        self.rows = [*self.rows, *new] if self._decoding else new
        self._decoding = [*self._decoding, *new]
        self.drafter.begin(prompt, step, history)

    def select(self, rows: Sequence[int]) -> None:
        self._decoding = [self._decoding[row] for row in rows]
        self.drafter.select(rows)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        return self.drafter.propose(token, budget)

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        for row, (path, emitted) in enumerate(verdict.host):
            gains = tree.path_probs[row] if tree.log_probs is not None else []
            self._decoding[row].append(_judged(tree, row, path, emitted[-1], step.logits[row], gains))
        self.drafter.observe(tree, verdict, step)


def _judged(tree: TokenTree, row: int, path: list[int], bonus: int, logits: Tensor, gains: list[float]) -> JudgedTree:
    """``logits``: (nodes, vocab) of the row; ``gains``: path probabilities of nodes 1, 2, ..."""
    nodes = tree.drafted[row] + 1  # what is padded stands at the end
    tokens, parents = tree.tokens[row, :nodes], tree.parents[row, :nodes]
    norm = logits.float().logsumexp(-1)
    above = parents[1:]
    probs = (logits[above, tokens[1:]].float() - norm[above]).exp().tolist()
    last = path[-1]
    bonus_prob = float((logits[last, bonus].float() - norm[last]).exp())
    up = parents.tolist()
    along = [1.0, *gains[: nodes - 1]]
    shown = len(along) == nodes > 1
    guesses = [1.0] + [along[i] / along[up[i]] for i in range(1, nodes)] if shown else None
    return JudgedTree(tokens.tolist(), up, path, bonus, [1.0, *probs], bonus_prob, guesses)
