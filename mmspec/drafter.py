"""What proposes the trees. A drafter owns its caches; the engine tells it what became of its last tree."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmspec.budget import Budget
from mmspec.target import Prompt, Step, Target
from mmspec.transfer import on_device
from mmspec.tree import TokenTree
from mmspec.verify import Verdict


class Drafter(Protocol):
    """What the engine needs of a drafter. It may propose anything: the output stays the target's own.

    One that drafts the same whatever it saw before sets ``learns`` to False.
    """

    def attach(self, target: Target) -> None:
        """Meet the target; raises ``UserError`` when this drafter was made for another one. To meet the
        same target again changes nothing."""

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        """A new prompt was absorbed. ``history`` lists each row's tokens, the prompt's and the emitted ones (now: the
        first), and is kept up to date by the engine: read it, do not write to it."""

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        """A tree per row that continues ``token``, (batch,) int64, the last emitted ones. Nodes stand in descending
        order of the path probabilities that were shown to ``budget.take``."""

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """The target has judged ``tree``: ``step`` is its pass, ``verdict`` what was kept. The next pass may overwrite
        the tensors of ``step``."""


def build_tree(token: Tensor, rows: list[tuple[list[int], list[int]]]) -> TokenTree:
    """A batch from ragged rows on the host.

    Args:
        token: (batch,) int64, the roots.
        rows: per row ``(tokens, parents)`` of the drafted nodes, parents being node indices with the root as 0.
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
    return tree


def fork(drafter: Drafter | None, target: Target) -> Any:
    """A copy that learns on its own. Weights and the target are shared with the original: nothing learns them."""
    shared: list[Any] = [target]
    for value in vars(drafter).values() if drafter is not None else ():
        shared += value.modules() if isinstance(value, nn.Module) else []
    return copy.deepcopy(drafter, {id(value): value for value in shared})


def learns(drafter: Drafter | None) -> bool:
    """Whether it may draft from what it saw in earlier answers."""
    return drafter is not None and getattr(drafter, "learns", True)


def lend(drafter: Drafter | None, target: Target) -> Any:
    """What drafts one answer and leaves no trace of it: the drafter itself, which keeps what was captured of it, or a
    copy of one that learns."""
    return fork(drafter, target) if learns(drafter) else drafter
