"""Drafter protocol. A drafter owns its caches; the engine reports the verdict on each tree."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmspec.ops.transfer import on_device
from mmspec.speculation.budget import Budget
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict
from mmspec.targets.target import Feature, Prompt, Step, Target


class Drafter(Protocol):
    """Interface between engine and drafter. Output never depends on what is proposed.

    Rows are the decoding sequences, in the target's order. A drafter that does not learn from earlier outputs sets
    ``learns`` to False; one that uses the target's hidden states lists them in ``features``, e.g. ``("last",)`` or
    ``(2, 16, 29)``; see ``Feature``.
    """

    def attach(self, target: Target) -> None:
        """Prepare for a target; a repeated call with the same target has no effect.

        Raises:
            UserError: the drafter was trained for another target.
        """

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        """Append rows for new sequences.

        Args:
            prompt: their prompts.
            step: the target's prefill.
            history: token list of each sequence, prompt and emitted tokens (so far the first). The engine appends to
                these lists; drafters only read them.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others. Called between ``observe`` and ``propose``."""

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        """Draft a tree per row.

        Args:
            token: (batch,) int64, last emitted tokens, the roots.
            budget: limits depth and width; the engine then prunes the tree by ``TokenTree.log_probs``.
        """

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Update the drafter after verification.

        Args:
            tree: the pruned tree.
            verdict: the accepted paths.
            step: output of the verify pass; the next pass may overwrite its tensors.
        """


def features(drafter: Drafter | None) -> tuple[Feature, ...]:
    """Hidden states of the target that a drafter uses."""
    return tuple(getattr(drafter, "features", ()))


def build_tree(
    token: Tensor,
    rows: Sequence[tuple[list[int], list[int]]],
    path_probs: list[list[float]] | None = None,
) -> TokenTree:
    """Build a batched tree from ragged rows on the host.

    Args:
        token: (batch,) int64, the roots.
        rows: per row ``(tokens, parents)`` of the drafted nodes; parents are node indices, the root is 0.
        path_probs: per row the path probability of each drafted node, in descending order.
    """
    widest = max(len(tokens) for tokens, _ in rows)
    if widest == 0:
        return TokenTree.root(token)
    ids, parents, valid, deepest = [], [], [], 0
    for tokens, above in rows:
        spare = widest - len(tokens)
        depth = [0]
        for parent in above:
            depth.append(depth[parent] + 1)
        deepest = max(deepest, *depth)
        ids.append(tokens + [0] * spare)
        parents.append([-1, *above, *[0] * spare])
        valid.append([True] * (1 + len(tokens)) + [False] * spare)
    device = token.device
    drafted = on_device(ids, device)
    ragged = any(len(tokens) < widest for tokens, _ in rows)
    tree = TokenTree(
        torch.cat([token[:, None], drafted], dim=1),
        on_device(parents, device),
        on_device(valid, device) if ragged else None,
        check=False,
    )
    tree.max_depth = deepest
    tree.drafted = [len(tokens) for tokens, _ in rows]
    if path_probs is not None:
        padded = [[1.0, *row, *[0.0] * (widest - len(row))] for row in path_probs]
        tree.log_probs, tree.path_probs = on_device(padded, device).log(), path_probs
    return tree


def fork(drafter: Drafter | None, target: Target) -> Any:
    """Copy a drafter with its learned state and without rows; weights and target are shared."""
    shared: list[Any] = [target]
    for member in members(drafter):
        shared.append(getattr(member, "_target", target))
        for value in vars(member).values():
            shared += value.modules() if isinstance(value, nn.Module) else []
    copied = copy.deepcopy(drafter, {id(value): value for value in shared})
    if copied is not None:
        copied.select([])
    return copied


def members(drafter: Drafter | None) -> list[Drafter]:
    """The drafters of a union, nested ones included, or the drafter itself."""
    if drafter is None:
        return []
    parts = getattr(drafter, "drafters", None)
    return [drafter] if parts is None else [one for part in parts for one in members(part)]


def learns(drafter: Drafter | None) -> bool:
    """Whether a drafter learns from earlier outputs."""
    return drafter is not None and getattr(drafter, "learns", True)


def lend(drafter: Drafter | None, target: Target) -> Any:
    """A drafter for one request that leaves no learned state: a copy if it learns, else itself with its CUDA graphs."""
    return fork(drafter, target) if learns(drafter) else drafter
