"""Samples the examples of each training step from a seed; resumable at any step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmspec.errors import UserError

TEXT, MIXED = "text", "mixed"
ExampleIndex = tuple[str, int]
"""Kind of an example, `TEXT` (stage 1) or `MIXED` (stage 2), and its index among the examples of that kind."""

POOL = 8
"""Batches sampled together: a pool is sorted by length before it is split into batches, which saves padding."""


class CurriculumSampler:
    """Samples batches of examples; each kind is traversed whole, reshuffled at every epoch.

    Args:
        lengths: length of each example by kind, in any unit.
        seed: of the shuffling.
        mixed_share: maps the run's progress (0 to 1) to the probability that an example is `MIXED`. Only used where
            there are examples of both kinds.

    Attributes:
        info: stage and share of the current pool's last request, for the training log.

    Raises:
        UserError: there are no examples.
    """

    def __init__(
        self,
        lengths: Mapping[str, Sequence[int]],
        batch: int,
        seed: int,
        mixed_share: Callable[[float], float] = lambda progress: progress,
    ) -> None:
        self.lengths = {kind: found for kind, found in lengths.items() if len(found)}
        if not self.lengths:
            raise UserError("training needs at least one conversation that is not held out: received none")
        self.batch, self.seed = batch, seed
        self.info: dict[str, Any] = {}
        self._mixed_share = mixed_share
        self._drawn = dict.fromkeys(self.lengths, 0)
        self._pools = 0
        self._waiting: list[list[ExampleIndex]] = []
        self._shuffled: dict[str, tuple[int, list[int]]] = {}

    def next(self, progress: float) -> list[ExampleIndex]:
        """Returns the next batch of examples, given the run's progress from 0 to 1."""
        share = self._mixed_share(progress) if len(self.lengths) == 2 else float(MIXED in self.lengths)
        self.info = {"stage": 1 if share == 0.0 else 2, "share": round(share, 4)}
        if not self._waiting:
            self._fill(share)
        return self._waiting.pop()

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to continue the sequence of batches."""
        return {"drawn": dict(self._drawn), "pools": self._pools, "waiting": [list(batch) for batch in self._waiting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state_dict()` of a sampler of the same examples, batch size and seed."""
        self._drawn, self._pools = dict(state["drawn"]), state["pools"]
        self._waiting = [[(kind, index) for kind, index in batch] for batch in state["waiting"]]

    def _fill(self, share: float) -> None:
        rng = random.Random(f"{self.seed} pool {self._pools}")
        self._pools += 1
        pool = [self._draw(MIXED if rng.random() < share else TEXT) for _ in range(POOL * self.batch)]
        pool.sort(key=lambda example: self.lengths[example[0]][example[1]])
        self._waiting = [pool[start : start + self.batch] for start in range(0, len(pool), self.batch)]
        rng.shuffle(self._waiting)

    def _draw(self, kind: str) -> ExampleIndex:
        count = len(self.lengths[kind])
        epoch, place = divmod(self._drawn[kind], count)
        self._drawn[kind] += 1
        if self._shuffled.get(kind, (-1, []))[0] != epoch:
            order = list(range(count))
            random.Random(f"{self.seed} {kind} {epoch}").shuffle(order)
            self._shuffled[kind] = epoch, order
        return kind, self._shuffled[kind][1][place]


def linear_ramp(start: float, end: float = 1.0) -> Callable[[float], float]:
    """Returns a function of progress that is 0 until `start`, then rises linearly, and is 1 from `end` on."""
    return lambda progress: 0.0 if progress <= start else min(1.0, (progress - start) / (end - start))
