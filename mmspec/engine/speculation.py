"""A drafter on a target, with the budgets that choose tree sizes; exclusive use of drafters."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mmspec.core.budget import Budget, CostTable
from mmspec.core.drafter import Drafter, as_drafter, members
from mmspec.core.guard import Guard
from mmspec.core.target import Target
from mmspec.engine.budget import AdaptiveBudget
from mmspec.engine.calibrate import cost_table, forget_cost, stored_cost
from mmspec.engine.drift import MeasuredBudget
from mmspec.engine.steady_budget import SIZES as STEADY
from mmspec.engine.steady_budget import SteadyBudget
from mmspec.engine.warm_up import warm_up
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.targets.transformers_target import TransformersTarget, sharded

_FREED = threading.Condition()
_OWNERS: dict[int, Speculation] = {}  # by id of a drafter that drafts for running sequences
_WANTED: dict[int, int] = {}  # by id of a drafter: engines that wait for it
_CALIBRATION = threading.Lock()


class Speculation:
    """A drafter and its budgets on one target. Requests that decode together have the same.

    Args:
        drafter: proposes trees; None decodes plainly.

    Attributes:
        guard: the drafter, for decode steps.
        budget: the adaptive budget; None before the first step that needs it.

    Raises:
        UserError: the drafter was trained for another target.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target = target
        self.drafter: Drafter | None = as_drafter(drafter)
        self.guard = None if self.drafter is None else Guard(self.drafter)
        self.budget: MeasuredBudget | None = None
        self._fixed: dict[int, Budget] = {}
        self._parts = [member.key for member in members(self.drafter)]
        self._searched = False  # for the target's stored cost
        self._refused = False  # the target cannot be calibrated
        self._outdated = False  # passes have proved the calibration wrong
        if drafter is not None:
            with self:
                pass

    def __enter__(self) -> None:
        """Wait until no other target uses the drafter, then attach it.

        An engine that waits here runs no sequences and uses no other drafter, so that this ends.
        """
        mine = {id(part) for part in self._parts}
        with _FREED:
            for part in mine:
                _WANTED[part] = _WANTED.get(part, 0) + 1
            while any(part in _OWNERS for part in mine):
                _FREED.wait()
            for part in mine:
                _WANTED[part] -= 1
                if not _WANTED[part]:
                    del _WANTED[part]
                _OWNERS[part] = self
        if self.drafter is not None:
            try:
                self.drafter.attach(self.target)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: Any) -> None:
        with _FREED:
            for part in self._parts:
                if _OWNERS.get(id(part)) is self:
                    del _OWNERS[id(part)]
            _FREED.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether another engine waits for the drafter."""
        with _FREED:
            return any(id(part) in _WANTED for part in self._parts)

    def shares(self, other: Speculation) -> bool:
        """Whether both have a drafter in common."""
        return any(part is candidate for part in self._parts for candidate in other._parts)

    def warm_up(self, rows: int, tokens: int | None = None, sizes: Sequence[int | None] = (None,)) -> None:
        """Reserve buffers, capture decode steps and calibrate, with a target that has no sequences; see
        ``Pipeline.warm_up``."""
        assert isinstance(self.target, TransformersTarget), "others are not captured"
        nodes: set[int] = set()
        if self.drafter is not None:
            nodes.update(*(STEADY if size is None else (size,) for size in sizes))
        budgets = [Budget(size) for size in sorted(nodes - {0}, reverse=True)]
        with self:
            try:
                warm_up(self.target, self.drafter, rows, tokens, budgets)
                self.calibrate(None in sizes, idle=True)
            except (UserError, torch.OutOfMemoryError) as error:  # requests capture their steps
                warnings.warn(f"CUDA graphs could not be captured beforehand: {error}", RuntimeWarning, stacklevel=2)

    def calibrate(self, adaptive: bool = True, *, refresh: bool = False, idle: bool = False) -> CostTable | None:
        """Load the target's measured verify times, or measure them if ``adaptive`` budgets will need them, also after
        passes have proved them wrong.

        Args:
            adaptive: measure if nothing is stored, or if ``refresh``.
            idle: the target has no sequences: its own captured passes are measured.
        """
        if sharded(self.target):  # ranks that follow their clocks would draft trees of different sizes
            return None
        with _CALIBRATION:
            if self.target.cost is None and not self._searched:
                self.target.cost, self._searched = stored_cost(self.target), True
            needed = self.drafter is not None and not self._refused and (self.target.cost is None or self._outdated)
            if refresh or (adaptive and needed):
                try:
                    self.target.cost = cost_table(self.target if idle else self.target.fork(), refresh=refresh)
                except UserError:  # a model with a short window takes no tree of every size
                    self._refused = True
                if self._outdated:
                    self.budget, self._outdated = None, False
            return self.target.cost

    def budget_of(self, batch: int, num_draft_tokens: int | None) -> Budget:
        """The budget of a step: ``num_draft_tokens`` draft tokens, or adaptive.

        Args:
            num_draft_tokens: None chooses adaptively.
        """
        if self.drafter is None:
            return self._fixed.setdefault(0, Budget(0))
        if num_draft_tokens is not None:
            return self._fixed.setdefault(num_draft_tokens, Budget(num_draft_tokens))
        if self.budget is None:
            cost = self.calibrate()
            if cost is None:
                return self._fixed.setdefault(-1, Budget())
            steady = kernels.static_shapes(self.target.device)
            self.budget = (SteadyBudget if steady else AdaptiveBudget)(cost, batch=batch)
        if self.budget.drift and self.budget.drift.overestimated:
            forget_cost(self.target)
            self.budget.drift, self._outdated = None, True  # measured again before the next request
        self.budget.resize(batch)
        return self.budget
