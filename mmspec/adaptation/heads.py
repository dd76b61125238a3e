"""Adaptation of trained drafters: a copy of the weights learns while the engine is idle, and replaces them later."""

from __future__ import annotations

import copy
import random
from collections import deque
from math import sqrt
from statistics import fmean, variance
from typing import Any, Protocol

from torch import nn

from mmspec import plugins
from mmspec.adaptation.recording import RecordedAnswer, RecordedDrafter
from mmspec.adaptation.store import Store
from mmspec.core.target import Target
from mmspec.drafters.registry import registered_name
from mmspec.drafters.trained import TrainedDrafter
from mmspec.errors import UserError

REQUESTS = 16
"""Requests that are compared, before and after."""


class AcceptanceWatch:
    """Acceptance lengths of requests, before and since the last replacement."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._since: list[float] = []

    def add(self, acceptance_length: float) -> None:
        self._since.append(acceptance_length)

    @property
    def complete(self) -> bool:
        """Whether enough requests have ended since the last replacement."""
        return len(self._since) >= REQUESTS

    @property
    def fallen(self) -> bool:
        """Whether acceptance is lower than before by more than its standard error."""
        if not self._before:
            return False
        error = sqrt(variance(self._before) / len(self._before) + variance(self._since) / len(self._since))
        return fmean(self._since) + error < fmean(self._before)

    def replaced(self, kept: bool) -> None:
        """Begin anew after a replacement; ``kept`` says whether that of the last comparison stays the reference."""
        if kept or not self._before:
            self._before = self._since[-REQUESTS:]
        self._since = []


_EARLIER = 7  # answers that are learned again with each new one
_BUFFER = 1 << 27  # bytes of hidden states that are kept to learn from


class Learner(Protocol):
    """Trains a copy of a drafter's network; made by the entry points of ``mmspec.adapt``, by the drafter's name."""

    def learn(self, answer: RecordedAnswer) -> None:
        """Add an answer to a batch; the last one of a batch takes a training step."""

    def weights(self) -> nn.Module:
        """A copy of the network."""

    def restart(self, network: nn.Module) -> None:
        """Continue from these weights."""


class HeadAdaptation:
    """Adaptation of one trained drafter.

    What it learns replaces the drafter's weights after every ``REQUESTS`` requests, while the engine is idle. If
    acceptance falls in as many requests, the former weights return.

    Args:
        drafter: not attached yet; its network is not packed.
        store: keeps the weights; None keeps none.

    Attributes:
        drafter: drafts in place of the given one.
        answers, replacements, rollbacks: numbers of answers that were learned, and how often the others have happened.
    """

    def __init__(self, drafter: TrainedDrafter, target: Target, store: Store | None) -> None:
        make: Any = plugins.find("adapt", drafter.name)
        self._learner: Learner = make(drafter, target)
        self.drafter = RecordedDrafter(drafter)
        self._target, self._store = target, store
        self._current = self._former = self._learner.weights()
        self._proven = True  # whether requests have shown that the current ones are no worse
        self._watch = AcceptanceWatch()
        self._buffer: deque[RecordedAnswer] = deque()
        self._queue: deque[RecordedAnswer] = deque()  # to learn
        self._random = random.Random(0)
        self.answers = self.replacements = self.rollbacks = 0

    @property
    def pending(self) -> bool:
        """Whether there is something to do."""
        return bool(self.drafter.ended or self._queue)

    def turn(self) -> None:
        """Take in ended sequences, or learn one answer, and replace the weights when it is time."""
        if self.drafter.ended:
            self._take_in()
        elif self._queue:
            self._learner.learn(self._queue.popleft())
            self.answers += 1
        if self._watch.complete and not self._queue:
            self._judge()

    def _take_in(self) -> None:
        ended, self.drafter.ended = self.drafter.ended, []
        for one in ended:
            if one.steps:
                self._watch.add(one.tokens / one.steps)
            if one.answer is not None:
                earlier = self._random.sample(self._buffer, min(_EARLIER, len(self._buffer)))
                self._queue += [one.answer, *earlier]
                self._buffer.append(one.answer)
        while len(self._buffer) > 1 and sum(answer.size for answer in self._buffer) > _BUFFER:
            self._buffer.popleft()

    def _judge(self) -> None:
        """Replace the weights by what was learned since, or by the former ones if acceptance has fallen."""
        fallen = self._watch.fallen
        self._watch.replaced(kept=not fallen)
        if fallen:
            self._current, self._proven = self._former, True
            self._learner.restart(self._former)
            self.rollbacks += 1
        else:
            if not self._proven and self._store is not None:
                self._store.write(lambda folder: self._drafter(self._current).save(folder, self._target))
            self._former, self._current, self._proven = self._current, self._learner.weights(), False
            self.replacements += 1
        fresh = self._drafter(self._current)
        fresh.attach(self._target)  # not while a request waits
        self.drafter.fresh = fresh

    def _drafter(self, network: nn.Module) -> TrainedDrafter:
        return self.drafter.drafter.renewed(copy.deepcopy(network))  # attaching packs it


def check_new(drafter: TrainedDrafter) -> None:
    """Raise ``UserError`` for a drafter that a pipeline uses: its weights are packed, and cannot be trained."""
    if drafter._target is not None:
        raise UserError(f"adapt needs a drafter that no pipeline has used: got {registered_name(drafter)}")
