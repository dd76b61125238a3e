"""Drafter protocol. A drafter owns its caches; the engine reports the verdict on each tree."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from mmspec.core.budget import Budget
from mmspec.core.target import Feature, Prompt, Step, Target
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict


class Drafter(Protocol):
    """Interface between engine and drafter. Output never depends on what is proposed.

    Rows are the decoding sequences, in the target's order. A drafter that does not learn from earlier outputs sets
    ``learns`` to False; one that uses the target's hidden states lists them in ``features``, e.g. ``("last",)`` or
    ``(2, 16, 29)``; see ``Feature``. One that looks up tokens may have a method ``continuations``; see there.
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


def continuations(drafter: Drafter | None, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
    """Next tokens that a look-up drafter expects after the drafts ``path``, which another part of a tree has proposed.

    Returns:
        Distinct tokens and their probabilities; none by drafters without a method ``continuations(row, path)``.
    """
    look_up = getattr(drafter, "continuations", None)
    return () if look_up is None else look_up(row, path)


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
