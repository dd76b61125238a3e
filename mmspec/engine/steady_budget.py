"""Tree budgets for static shapes, chosen before drafting."""

from __future__ import annotations

from collections.abc import Sequence

from mmspec.core.budget import CostTable
from mmspec.engine.drift import Drift, MeasuredBudget

SIZES = (7, 15, 31, 63)
"""Numbers of drafted nodes to choose from."""

_TRY_AGAIN = 64  # steps between probes of another size; tokens that earn a draft, however much was lost
_GUESS = 0.6  # initial acceptance rate of the most probable node
_DECAY_RANK = 0.98  # decay of acceptance per rank, per step
_DRAFT = 0.2  # initial draft cost, in plain steps


class SteadyBudget(MeasuredBudget):
    """Tree size chosen before drafting, without a host sync on the tree's probabilities.

    Expected tokens come from the acceptance rate of each rank (n-th most probable node), costs from measured step times
    by batch size, initialised from the calibration. Other sizes are probed periodically.

    Args:
        cost: verify time of the target.
        sizes: candidate numbers of drafted nodes, ascending; plain decoding is always a candidate.
        depth: as for ``Budget``.
    """

    def __init__(self, cost: CostTable, sizes: Sequence[int] = SIZES, depth: int = 12, batch: int = 1) -> None:
        super().__init__(sizes[-1], depth)
        self._table, self._sizes, self.drift = cost, (0, *sizes), Drift()
        self._spent: dict[int, dict[int, float]] = {}  # by batch size and tree size: seconds of a step
        self.resize(batch)
        # Initial guess, corrected by the first steps.
        self._accepted = [_GUESS / rank**0.5 for rank in range(1, sizes[-1] + 1)]
        self._tried = [0] * sizes[-1]
        self._steps = 0

    def resize(self, batch: int) -> None:
        if batch not in self._spent:
            drafting = _DRAFT * self._table(batch)
            self._spent[batch] = {n: self._table(batch * (n + 1)) + drafting * bool(n) for n in self._sizes}
        self._seconds, self._batch = self._spent[batch], batch

    def drafts(self) -> bool:
        self._steps += 1
        best = max(self._seconds, key=self._rate)
        if self._steps % _TRY_AGAIN == 0:  # measure the next larger and the next smaller size, alternately
            tried = sorted(self._seconds)
            side = 1 if self._steps % (2 * _TRY_AGAIN) else -1
            best = tried[min(max(tried.index(best) + side, 0), len(tried) - 1)]
        self.nodes = best
        return super().drafts()

    def observe(
        self,
        nodes: int,
        paths: list[list[int]],
        draft_seconds: float,
        verify_seconds: float,
        commit_seconds: float = 0.0,
    ) -> None:
        if self.drift:
            self.drift.add(verify_seconds, self._table(self._batch * nodes))
        alive = [set(path) for path in paths if path]
        for rank in range(1, min(nodes, len(self._accepted) + 1)):
            share = sum(rank in path for path in alive) / max(len(alive), 1)
            self._tried[rank - 1] += 1
            weight = max(1 - _DECAY_RANK, 1 / (1 + self._tried[rank - 1]))
            self._accepted[rank - 1] += weight * (share - self._accepted[rank - 1])
        if nodes - 1 in self._seconds:
            spent, usual = draft_seconds + verify_seconds, self._seconds[nodes - 1]
            # Clip outliers, such as the first step of a size.
            self._seconds[nodes - 1] += 0.1 * (min(spent, 2 * usual) - usual)

    def _rate(self, size: int) -> float:
        """Expected tokens per second and row."""
        return (1 + sum(self._accepted[:size])) / self._seconds[size]
