"""Which examples each step trains on. It follows from the seed and from what was drawn before, and goes on anywhere."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

TEXT, MIXED = "text", "mixed"
Example = tuple[str, int]
"""A kind of data, `TEXT` or `MIXED`, and an index in it."""

POOL = 8
"""Batches drawn together and cut from their examples sorted by length, which saves padding."""


class Order:
    """Draws batches of examples; each kind is gone through whole, in a new random order each time."""

    def __init__(self, lengths: Mapping[str, Sequence[int]], batch: int, seed: int) -> None:
        """
        Args:
            lengths: of each kind's examples, in any unit.
            batch: examples per batch.
            seed: of the order.
        """
        self.lengths = {kind: found for kind, found in lengths.items() if len(found)}
        self.batch, self.seed = batch, seed
        self._drawn = dict.fromkeys(self.lengths, 0)
        self._pools = 0
        self._waiting: list[list[Example]] = []
        self._shuffled: dict[str, tuple[int, list[int]]] = {}

    def next(self, share: float) -> list[Example]:
        """The next batch; each of its examples is `MIXED` with probability `share` where there are both kinds."""
        if not self._waiting:
            self._fill(share)
        return self._waiting.pop()

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands."""
        return {"drawn": dict(self._drawn), "pools": self._pools, "waiting": [list(batch) for batch in self._waiting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()` of an order of the same examples, batch and seed."""
        self._drawn, self._pools = dict(state["drawn"]), state["pools"]
        self._waiting = [[(kind, index) for kind, index in batch] for batch in state["waiting"]]

    def _fill(self, share: float) -> None:
        rng = random.Random(f"{self.seed} pool {self._pools}")
        self._pools += 1
        pool = [self._draw(self._kind(rng, share)) for _ in range(POOL * self.batch)]
        pool.sort(key=lambda example: self.lengths[example[0]][example[1]])
        self._waiting = [pool[start : start + self.batch] for start in range(0, len(pool), self.batch)]
        rng.shuffle(self._waiting)

    def _kind(self, rng: random.Random, share: float) -> str:
        drawn = MIXED if rng.random() < share else TEXT
        return drawn if drawn in self.lengths else next(iter(self.lengths))

    def _draw(self, kind: str) -> Example:
        count = len(self.lengths[kind])
        epoch, place = divmod(self._drawn[kind], count)
        self._drawn[kind] += 1
        if self._shuffled.get(kind, (-1, []))[0] != epoch:
            order = list(range(count))
            random.Random(f"{self.seed} {kind} {epoch}").shuffle(order)
            self._shuffled[kind] = epoch, order
        return kind, self._shuffled[kind][1][place]
