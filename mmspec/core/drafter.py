"""Drafter interface. A drafter owns its caches; the engine reports the verdict for each tree."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.errors import SlowWarning, UserError, first_line
from mmspec.ops import kernels

T = TypeVar("T")
_log = logging.getLogger("mmspec.drafting")
_REPORTED: set[tuple[str, type[Exception]]] = set()  # drafters and error types logged by this process

_CHECKED, _WATCHED = 16, 64
"""The acceptance length is checked every ``_CHECKED`` draft steps, up to ``_WATCHED`` draft steps. Only draft steps
count: without a payoff, they are a few per cent of all steps."""

_LEAST = 1.05  # mean acceptance length below which the drafter probably belongs to another target or is misread


class Drafter(ABC):
    """Base class of drafters. Drafts never change the output.

    Rows are the decoding sequences, in the target's order. A subclass must define ``begin``, ``select``, ``propose``
    and ``observe``; all other members have defaults.
    """

    network: Any = None  # the drafter's network; None without one
    watched = 0, 0.0  # first draft steps, and tokens per row emitted in them, see ``watch``
    _target: Target | None = None

    def attach(self, target: Target) -> None:
        """Prepare for a target; a repeated call with the same target has no effect. Raises ``UserError``: the drafter
        was trained for another target."""
        self._target = target

    @abstractmethod
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        """Append rows for new sequences.

        Args:
            output: the target's prefill.
            history: token list of each sequence: the prompt and the first emitted token. The engine appends to these
                lists; drafters only read them.
        """

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others. Called between ``observe`` and ``propose``."""

    @abstractmethod
    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        """Draft a tree per row.

        Args:
            token: (batch,) int64, last emitted tokens, the roots.
            plan: limits depth and width; the policy then prunes the tree by ``TokenTree.log_probs``.
        """

    @abstractmethod
    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Update the drafter after verification.

        Args:
            tree: the pruned tree.
            verdict: the accepted paths.
            output: output of the verify pass; the next pass may overwrite its tensors.
        """

    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> Sequence[Any]:
        """Append idle rows to capture CUDA graphs; arguments as for ``begin``.

        Returns:
            The capturable parts, each a ``CapturedDrafter``; by default none.
        """
        return ()

    @property
    def drafts_ahead(self) -> bool:
        """Whether ``observe`` and ``propose`` may precede the host's copy of the verdict."""
        return False

    @property
    def learns(self) -> bool:
        """Whether drafts depend on earlier requests. If so, a server copies the drafter for every client."""
        return True

    @property
    def features(self) -> Sequence[Feature]:
        """Hidden states that the target's outputs must contain, e.g. ``("last",)`` or ``(2, 16, 29)``."""
        return ()

    @property
    def tree_size(self) -> int | None:
        """Maximum number of drafted nodes; None follows the plan."""
        return None

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Next tokens after drafts from another source, such as tokens forced by a grammar.

        Args:
            path: drafts after the row's tokens.

        Returns:
            Distinct tokens and their probabilities; empty by default. Only lookup drafters implement it.
        """
        return ()

    def failure(self, row: int) -> str:
        """Names of the failed part of this drafter and of its error for a sequence; empty without an error."""
        return ""

    @property
    def checks(self) -> str:
        """Hint for users if almost no draft is accepted; empty if that can be normal, as for lookup drafters."""
        return ""

    @property
    def class_names(self) -> str:
        """Names of the classes of its members, joined by +."""
        return "+".join(type(member).__name__ for member in self.members)

    def watch(self, tree: TokenTree, verdict: Verdict) -> None:
        """Count an observed step, and warn once if almost no draft is accepted. Idle rows have empty paths."""
        steps, emitted = self.watched
        if steps >= _WATCHED or tree.nodes == 1:
            return
        paths = [path for (path, _), drafted in zip(verdict.host, tree.drafted, strict=True) if drafted]
        if not any(paths):
            return
        self.watched = steps, emitted = steps + 1, emitted + sum(map(len, paths)) / len(paths)
        if steps % _CHECKED == 0 and emitted < _LEAST * steps and self.checks:
            self.watched = _WATCHED, 0.0
            # Without the measured value: Python prints each text once, across copies of a drafter.
            little = f"the drafter {self.class_names} is of little use: below {_LEAST} tokens per step"
            warnings.warn(f"{little}. Check {self.checks}", SlowWarning, stacklevel=2)

    def draft_chains(self, length: int) -> None:
        """Switch to chains, one child per node, of at most ``length`` tokens if the drafter has a tree size. Raises
        ``UserError``: the drafter does not support chains (the default)."""
        raise UserError(f"chains need a drafter that can draft them: {type(self).__name__} cannot")

    @property
    def members(self) -> list[Drafter]:
        """The drafters that this drafter combines; by default only itself."""
        return [self]

    @property
    def shared(self) -> list[Any]:
        """Objects shared by all copies: the target and networks."""
        networks = [value for value in vars(self).values() if isinstance(value, nn.Module)]
        return [self._target, *(module for network in networks for module in network.modules())]

    def fork(self, target: Target) -> Self:
        """A copy with its learned state, without rows; weights and ``target`` are shared."""
        shared = [target, *(value for member in self.members for value in member.shared)]
        copied = copy.deepcopy(self, {id(value): value for value in shared})
        copied.select([])
        return copied

    def lend(self, target: Target) -> Self:
        """A drafter for one request: a copy if it learns, else itself with its CUDA graphs."""
        return self.fork(target) if self.learns else self


class Wrapper(Drafter):
    """Base class of drafters that delegate all calls to a wrapped drafter."""

    drafter: Drafter

    def attach(self, target: Target) -> None:
        self.drafter.attach(target)
        self._target = target

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.drafter.begin(prompt, output, history)

    def select(self, rows: Sequence[int]) -> None:
        self.drafter.select(rows)

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        return self.drafter.propose(token, plan)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self.drafter.observe(tree, verdict, output)

    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> Sequence[Any]:
        return self.drafter.begin_idle(prompt, output, history)

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        return self.drafter.continuations(row, path)

    def failure(self, row: int) -> str:
        return self.drafter.failure(row)

    @property
    def checks(self) -> str:
        return self.drafter.checks

    def draft_chains(self, length: int) -> None:
        self.drafter.draft_chains(length)

    @property
    def features(self) -> Sequence[Feature]:
        return self.drafter.features

    @property
    def tree_size(self) -> int | None:
        return self.drafter.tree_size

    @property
    def members(self) -> list[Drafter]:
        return self.drafter.members


class Guard(Wrapper):
    """Falls back to plain decoding after an error of a drafter, instead of failing its requests.

    A drafter that raises or proposes a malformed tree loses its rows and is disabled until all running sequences have
    ended, including sequences that join in the meantime. Then it is tried again. If it cannot drop its rows, it stays
    disabled. Each drafter's errors are logged once per type and process, with a traceback if MMSPEC_DEBUG is set. CUDA
    device errors are raised, as they are not recoverable. MMSPEC_STRICT=1 raises all errors.

    A drafter with almost no accepted drafts is reported once, because matching shapes do not rule out a wrong target.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._failure = ""
        self._broken = False  # the drafter cannot drop its rows

    @property
    def rests(self) -> bool:
        return bool(self._failure)

    def failure(self, row: int) -> str:
        return self._failure or self.drafter.failure(row)

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self._guarded(self.drafter.begin, prompt, output, history)

    def select(self, rows: Sequence[int]) -> None:
        self._guarded(self.drafter.select, rows)
        if not rows and not self._broken:
            self._failure = ""

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        return self._guarded(self._proposed, token, plan) or TokenTree.root(token)

    def _proposed(self, token: Tensor, plan: StepPlan) -> TokenTree:
        """The drafter's trees, which must be valid and have the roots ``token``, (batch,)."""
        tree: Any = self.drafter.propose(token, plan)
        if not isinstance(tree, TokenTree):
            raise TypeError(f"expected a TokenTree, received {type(tree).__name__}")
        if tree.batch != len(token) or tree.tokens.dtype != torch.long or tree.tokens.device != token.device:
            received = f"{tree.batch} of {tree.tokens.dtype} on {tree.tokens.device}"
            raise ValueError(f"expected {len(token)} trees of int64 tokens on {token.device}, received {received}")
        tree.check_shapes()
        if tree.nodes > 1 and not kernels.static_shapes(token.device):  # needs a host sync; a lone root is replaced
            tree.check_values()
        return tree

    @property
    def drafts_ahead(self) -> bool:
        return self.drafter.drafts_ahead and not self.rests

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self._guarded(self.drafter.observe, tree, verdict, output)

    def watch(self, tree: TokenTree, verdict: Verdict) -> None:
        if not self.rests:
            self.drafter.watch(tree, verdict)

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        checked = lambda: [(int(token), float(p)) for token, p in self.drafter.continuations(row, path)]  # noqa: E731
        return self._guarded(checked) or ()

    def _guarded(self, method: Callable[..., T], *arguments: Any) -> T | None:
        """Call a method; None while the drafter is disabled, or if it fails."""
        if self.rests:
            return None
        try:
            return method(*arguments)
        except Exception as error:
            is_device = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
            if is_device or os.environ.get("MMSPEC_STRICT") == "1":
                raise
            self._rest(error)
            return None

    def _rest(self, error: Exception) -> None:
        name = self.class_names
        self._failure = f"{name}: {type(error).__name__}: {first_line(error)}"
        if (name, type(error)) not in _REPORTED:
            _REPORTED.add((name, type(error)))
            traceback = error if os.environ.get("MMSPEC_DEBUG") else None
            message = "drafting stopped for the running requests, which go on without: %s"
            _log.warning(message, self._failure, exc_info=traceback)
        try:
            self.drafter.select([])
        except Exception:
            self._broken = True


def as_drafter(drafter: Any) -> Drafter:
    """Return a drafter; raise ``UserError`` for other objects."""
    if isinstance(drafter, Drafter):
        return drafter
    raise UserError(
        f"drafter must be a name, a folder, None or derive from mmspec.Drafter: got {type(drafter).__name__}"
    )
