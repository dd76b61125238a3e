"""What proposes the trees. A drafter owns its caches; the engine tells it what became of its last tree."""

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
    """What the engine needs of a drafter. It may propose anything: the output stays the target's own.

    Its rows are the sequences that decode, in the order of joining, as the target's are. One that drafts the same
    whatever it saw before sets ``learns`` to False; one that reads the target's hidden states names them in
    ``features``, e.g. ``("last",)`` or ``(2, 16, 29)``; see ``Feature``.
    """

    def attach(self, target: Target) -> None:
        """Prepare for a target; raises ``UserError`` when this drafter was made for another one. To attach to the
        same target again changes nothing."""

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        """Sequences have joined: their rows come after those that there are.

        Args:
            prompt: theirs.
            step: the target's prefill.
            history: the tokens of each, the prompt's and the emitted ones (now: the first). The engine appends to these
                lists as the sequences grow: read them, do not write to them.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others have left. Called between ``observe`` and ``propose``."""

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        """A tree per row that continues ``token``, (batch,) int64, the last emitted ones. ``budget`` says how deep and
        wide growing pays; the engine prunes the tree to its likeliest nodes by ``TokenTree.log_probs``."""

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """The target has verified the pruned ``tree``: ``step`` is its pass, ``verdict`` the accepted paths.

        The next pass may overwrite the tensors of ``step``."""


def features(drafter: Drafter | None) -> tuple[Feature, ...]:
    """The hidden states of the target that a drafter reads."""
    return tuple(getattr(drafter, "features", ()))


def build_tree(
    token: Tensor,
    rows: Sequence[tuple[list[int], list[int]]],
    path_probs: list[list[float]] | None = None,
) -> TokenTree:
    """A batch from ragged rows on the host.

    Args:
        token: (batch,) int64, the roots.
        rows: per row ``(tokens, parents)`` of the drafted nodes, parents being node indices with the root as 0.
        path_probs: per row the probability of each drafted node's path, in descending order.
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
    """A copy without rows that learns on its own. It shares weights and the target, which nothing changes."""
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
    """The drafters whose trees a drafter merges; most are their own only member."""
    if drafter is None:
        return []
    parts = getattr(drafter, "drafters", None)
    return [drafter] if parts is None else [one for part in parts for one in members(part)]


def learns(drafter: Drafter | None) -> bool:
    """Whether it may draft from what it saw in earlier answers."""
    return drafter is not None and getattr(drafter, "learns", True)


def lend(drafter: Drafter | None, target: Target) -> Any:
    """What drafts one answer and leaves no trace of it: the drafter itself, which keeps what was captured of it, or a
    copy of one that learns."""
    return fork(drafter, target) if learns(drafter) else drafter
