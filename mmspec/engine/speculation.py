"""Drafter and drafting policies of a target, and exclusive use of drafters."""

from __future__ import annotations

import threading

from mmspec.core.drafter import Drafter, Guard, as_drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Target
from mmspec.engine.policy import AdaptivePolicy, DraftPolicy
from mmspec.ops import cpu_library, kernels
from mmspec.targets.packing import weights_kind
from mmspec.targets.transformers_target import TransformersTarget, sharded

_RELEASED = threading.Condition()
_OWNERS: dict[int, Speculation] = {}  # owner by drafter id, while it drafts for running sequences
_WANTED: dict[int, int] = {}  # number of waiting engines by drafter id


class Speculation:
    """A drafter and its policies on one target, shared by all requests of a batch.

    Args:
        drafter: the drafter; None decodes plainly.
        adaptive: policy with the learned state of an earlier speculation; None starts anew.

    Attributes:
        guard: wraps the drafter in decode steps, so that its errors do not end sequences.
        adaptive: policy of requests without a fixed number of draft tokens. A sharded target has a fixed policy, as
            clocks differ between ranks.

    Raises:
        UserError: the drafter was trained for another target.
    """

    def __init__(self, target: Target, drafter: Drafter | None, adaptive: DraftPolicy | None = None) -> None:
        self.target = target
        self.drafter = None if drafter is None else as_drafter(drafter)
        self.guard = None if self.drafter is None else Guard(self.drafter)
        self._static_shapes = kernels.static_shapes(target.device)
        fixed = drafter is None or sharded(target)
        if adaptive is None:
            static = self._static_shapes
            adaptive = (
                DraftPolicy(static_shapes=static) if fixed else AdaptivePolicy(static, None, _free_tokens(target))
            )
        self.adaptive = adaptive
        self._fixed: dict[int, DraftPolicy] = {}  # by draft tokens per step
        self._parts = self.drafter.members if self.drafter else []
        self.acquire()
        self.release()

    def policy(self, num_draft_tokens: int | None) -> DraftPolicy:
        """The policy of a fixed number of draft tokens per step, or the adaptive policy if None."""
        if num_draft_tokens is None:
            return self.adaptive
        fixed = DraftPolicy(StepPlan(num_draft_tokens), self._static_shapes)
        return self._fixed.setdefault(num_draft_tokens, fixed)

    def acquire(self) -> None:
        """Wait until no other target uses the drafter, then attach it.

        No deadlock: an engine that waits here runs no sequences and holds no other drafter.
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
        """Whether the two have a drafter in common."""
        return any(part is candidate for part in self._parts for candidate in other._parts)


def _free_tokens(target: Target) -> float:
    """Prior of ``StepTimeModel``: tokens whose products take as long as reading the weights, by the kernels' rates."""
    if target.device.type != "cpu":
        return 128.0
    if not isinstance(target, TransformersTarget) or weights_kind(target.model) is None:
        return 16.0  # Python and torch's kernels take a time that hardly depends on the tokens
    return {"AVX-512 VNNI": 5.0, "AVX-VNNI": 2.4}.get(cpu_library.functions().instructions().decode(), 2.0)
