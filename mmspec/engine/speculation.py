"""A drafter on a target, with its budgets; exclusive use of drafters."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

import torch

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, as_drafter, members
from mmspec.core.guard import Guard
from mmspec.core.target import Target
from mmspec.engine.budget import STEADY_SIZES, Budgets
from mmspec.engine.warm_up import warm_up
from mmspec.errors import UserError
from mmspec.targets.transformers_target import TransformersTarget

_RELEASED = threading.Condition()
_OWNERS: dict[int, Speculation] = {}  # by id of a drafter that drafts for running sequences
_WANTED: dict[int, int] = {}  # by id of a drafter: engines that wait for it


class Speculation:
    """A drafter and its budgets on one target. Requests that decode together have the same.

    Args:
        drafter: proposes trees; None decodes plainly.

    Attributes:
        guard: the drafter, for decode steps.
        budgets: tree sizes of decode steps.

    Raises:
        UserError: the drafter was trained for another target.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target = target
        self.drafter: Drafter | None = as_drafter(drafter)
        self.guard = None if self.drafter is None else Guard(self.drafter)
        self.budgets = Budgets(target, drafts=drafter is not None)
        self._parts = [member.key for member in members(self.drafter)]
        self.acquire()
        self.release()

    def acquire(self) -> None:
        """Wait until no other target uses the drafter, then attach it.

        An engine that waits here runs no sequences and uses no other drafter, so that this ends.
        """
        mine = {id(part) for part in self._parts}
        with _RELEASED:
            for part in mine:
                _WANTED[part] = _WANTED.get(part, 0) + 1
            while any(part in _OWNERS for part in mine):
                _RELEASED.wait()
            for part in mine:
                _WANTED[part] -= 1
                if not _WANTED[part]:
                    del _WANTED[part]
                _OWNERS[part] = self
        if self.drafter is not None:
            try:
                self.drafter.attach(self.target)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let other targets use the drafter."""
        with _RELEASED:
            for part in self._parts:
                if _OWNERS.get(id(part)) is self:
                    del _OWNERS[id(part)]
            _RELEASED.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether another engine waits for the drafter."""
        with _RELEASED:
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
            nodes.update(*(STEADY_SIZES if size is None else (size,) for size in sizes))
        budgets = [Budget(size) for size in sorted(nodes - {0}, reverse=True)]
        self.acquire()
        try:
            warm_up(self.target, self.drafter, rows, tokens, budgets)
            self.budgets.calibrate(None in sizes)
        except (UserError, torch.OutOfMemoryError) as error:  # requests capture their steps
            warnings.warn(f"CUDA graphs could not be captured beforehand: {error}", RuntimeWarning, stacklevel=2)
        finally:
            self.release()
