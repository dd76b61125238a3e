"""Baseline for tree verification on recurrent models: the tree unrolled into chains.

Each root-to-leaf path becomes its own chain after the root, so a node on several paths is computed once per path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.target import TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.targets.transformers_target import TransformersTarget


class UnrolledTarget(TransformersTarget):
    """A text target that verifies trees by unrolling them.

    Args:
        target: shares its model, layers and, after a prefill, its cache. Verify passes do not change the cache.
    """

    def __init__(self, target: TransformersTarget) -> None:
        vars(self).update(vars(target))
        self._copy = torch.zeros(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def forward_tree(self, tree: TokenTree) -> TargetOutput:
        chains, self._copy = unroll(tree)
        output = super().forward_tree(chains)
        features = {name: _gather_nodes(x, self._copy) for name, x in output.features.items()}
        return TargetOutput(_gather_nodes(output.logits, self._copy), features)

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        path = verdict.path
        path = torch.where(path >= 0, self._copy.gather(1, path.clamp(min=0)), -1)
        copies = self._copy.tolist()
        self.runner.commit_nodes(path, [[copies[row][i] for i in kept] for row, (kept, _) in enumerate(verdict.host)])


def unroll(tree: TokenTree) -> tuple[TokenTree, Tensor]:
    """Unroll each root-to-leaf path into a chain after the root; shorter rows are padded with children of the root.

    Returns:
        The tree of chains, and the index of each node's first copy in it, (batch, nodes) int64.
    """
    rows = [_unroll_row(*row) for row in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)]
    widest = max(len(tokens) for tokens, _, _ in rows)
    tokens = [tokens + [0] * (widest - len(tokens)) for tokens, _, _ in rows]
    parents = [parents + [0] * (widest - len(parents)) for _, parents, _ in rows]
    device = tree.tokens.device
    ids, above, copies = (torch.tensor(x, device=device) for x in (tokens, parents, [copy for *_, copy in rows]))
    return TokenTree(ids, above, check=False), copies


def _unroll_row(tokens: list[int], parents: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a row's chains, and the index of each node's first copy."""
    ids, above, copy = tokens[:1], [-1], [0] + [-1] * (len(tokens) - 1)
    for leaf in sorted(set(range(1, len(tokens))) - set(parents)):
        path = []
        while leaf > 0:
            path.append(leaf)
            leaf = parents[leaf]
        for depth, node in enumerate(reversed(path)):
            above.append(len(ids) - 1 if depth else 0)
            if copy[node] < 0:
                copy[node] = len(ids)
            ids.append(tokens[node])
    return ids, above, copy


def _gather_nodes(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x`` (batch, copies, n) at ``index`` (batch, nodes)."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
