"""One copy of a learning drafter per sequence, so that no request's tokens leak into another request's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmspec.core.drafter import Drafter, Guard, Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree, build_tree
from mmspec.core.verify import Verdict


def per_sequence(drafter: Drafter | None) -> Drafter | None:
    """Wrap a drafter that learns in ``PerSequence``, for requests of different clients."""
    return PerSequence(drafter) if drafter is not None and drafter.learns else drafter


class PerSequence(Wrapper):
    """Drafts each sequence with its own copy of ``drafter``; a failing copy does not affect other sequences.

    Args:
        drafter: drafter whose trees have ``log_probs``. Trees of several sequences are combined on the host.
    """

    learns = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._copies: list[Drafter] = []

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        assert self._target is not None
        for row, tokens in enumerate(history):
            mask = prompt.attention_mask
            alone = Prompt(prompt.input_ids[row : row + 1], None if mask is None else mask[row : row + 1])
            self._copies.append(Guard(self.drafter.fork(self._target)))
            self._copies[-1].begin(alone, _row(output, row), [tokens])

    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> tuple[()]:
        return ()  # copies capture their own graphs

    def select(self, rows: Sequence[int]) -> None:
        self._copies = [self._copies[row] for row in rows]

    def failure(self, row: int) -> str:
        return self._copies[row].failure(0)

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        trees = [copy.propose(root, plan) for copy, root in zip(self._copies, token.split(1), strict=True)]
        if len(trees) == 1:
            return trees[0]
        probs = [tree.path_probs[0] for tree in trees]
        drafted = [slice(1, 1 + len(row)) for row in probs]
        rows = [
            (tree.tokens[0, nodes].tolist(), tree.parents[0, nodes].tolist())
            for tree, nodes in zip(trees, drafted, strict=True)
        ]
        tree = build_tree(token, rows, probs)
        tree.levels = max(one.levels for one in trees)
        return tree

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        return self._copies[row].continuations(0, path)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for row, copy in enumerate(self._copies):
            copy.observe(tree.select([row]), Verdict(verdict.packed[row : row + 1]), _row(output, row))


def _row(output: TargetOutput, row: int) -> TargetOutput:
    own = slice(row, row + 1)
    visual, embeds = (None if value is None else value[own] for value in (output.visual, output.embeds))
    positions = None if output.positions is None else output.positions[..., own, :]
    features = {name: value[own] for name, value in output.features.items()}
    return TargetOutput(output.logits[own], features, visual, embeds, positions)
