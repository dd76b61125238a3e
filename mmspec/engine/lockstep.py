"""Engines of all ranks on one schedule, for a model that is sharded over them.

Before each step rank 0 passes on which requests have come and which were cancelled, and all ranks compare their
states. From equal queues and seeds, and logits that transformers has gathered, all ranks choose the same tokens.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Condition

import torch

from mmspec.core.target import Target
from mmspec.engine.core import EngineCore
from mmspec.engine.ranks import RankError, Ranks, sharded
from mmspec.engine.request import Call
from mmspec.engine.request_state import RequestState
from mmspec.engine.scheduler import PromptBatch
from mmspec.engine.speculation import Speculation
from mmspec.errors import UserError, first_line

_RECENT = 64  # tokens of each sequence that ranks compare; a step emits fewer


@dataclass(frozen=True)
class _Orders:
    """Orders for one step.

    Attributes:
        calls: requests that have come, pickled.
        cancelled: numbers of requests, in the order of coming.
        end: there is no step, and no further orders.
    """

    calls: list[bytes] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    end: bool = False

    def pack(self) -> bytes:
        return pickle.dumps(self) if self.calls or self.cancelled or self.end else b""

    @staticmethod
    def unpack(content: bytes) -> _Orders:
        orders: _Orders = pickle.loads(content) if content else _Orders()
        return orders


class Lockstep:
    """The schedule of an engine whose target is sharded.

    Args:
        core: of the engine.
        lock: held while its scheduler changes.

    Attributes:
        leads: whether this is rank 0, which has the clients.
        broken: why no further requests are answered; None while they are.
    """

    def __init__(self, core: EngineCore, lock: Condition) -> None:
        self.core, self._lock, self.ranks = core, lock, Ranks()
        self.leads = self.ranks.rank == 0
        self.broken: RankError | None = None
        self._speculation: Speculation | None = None  # of the pipeline that all ranks run
        self._arrived: deque[tuple[PromptBatch, bytes]] = deque()
        self._dropped: deque[RequestState] = deque()
        self._numbers: dict[RequestState, int] = {}
        self._count = 0
        self._state = 0

    @staticmethod
    def of(target: Target, core: EngineCore, lock: Condition) -> Lockstep | None:
        """The schedule for a target; None unless it is sharded."""
        return Lockstep(core, lock) if sharded(target) else None

    # ------------------------------------------------------------------ clients of rank 0

    def begin(self, speculation: Speculation) -> None:
        """Let the other ranks decode with their pipelines' drafters; ``speculation`` is that of rank 0's."""
        if self._speculation is None:
            self.ranks.watch(self.fail)
        self._speculation = speculation

    def packed(self, call: Call) -> tuple[Call, bytes]:
        """A request with a seed, and its form for the other ranks.

        Raises:
            UserError: a part of the request is not the same on all ranks.
        """
        if not self.leads:
            return call, b""
        if call.extras.max_time is not None:
            raise UserError(f"max_time follows the clock of one rank: got {call.extras.max_time} with a sharded model")
        if call.params.seed is None:
            call = replace(call, params=replace(call.params, seed=int(torch.randint(1 << 62, (1,)))))
        try:
            return call, pickle.dumps(call)
        except Exception as error:
            raise UserError(
                "requests to a sharded model must be ones that other processes can unpickle: received "
                f"{first_line(error)}"
            ) from error

    def add(self, batch: PromptBatch, call: bytes | None) -> None:
        """Queue a request for the next orders; on other ranks than 0, for the next step."""
        if not self.leads:
            self.core.scheduler.add(batch)
            return
        if self.broken is not None:
            raise RankError(str(self.broken)) from self.broken
        if call is None or self._speculation is not batch.mode.speculation:
            raise UserError(
                "a sharded model answers requests of one pipeline, after follow() was called on it on all ranks: got "
                "one of another pipeline or before"
            )
        self._arrived.append((batch, call))

    def remove(self, sequences: Iterable[RequestState]) -> None:
        """Cancel sequences with the next orders."""
        self._dropped.extend(sequences)

    @property
    def waits(self) -> bool:
        """Whether requests have come that were not passed on."""
        return bool(self._arrived)

    # ------------------------------------------------------------------ steps

    def lead(self) -> None:
        """Pass on which requests have come and which were cancelled, before a step of rank 0.

        Raises:
            RankError: a rank is lost, or in another state.
        """
        if self.broken is not None:
            raise self.broken
        state = self._next_state()
        with self._lock:
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for batch, _ in arrived:
                (sequence,) = batch.sequences
                self._numbers[sequence] = self._count
                self._count += 1
                self.core.scheduler.add(batch)
        gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
        gone = [sequence for sequence in gone if sequence in self._numbers and not sequence.done]
        orders = _Orders([call for _, call in arrived], [self._numbers[sequence] for sequence in gone])
        self.ranks.agree(state, orders.pack())
        for sequence in gone:
            sequence.cancelled = True
        self._numbers = {sequence: number for sequence, number in self._numbers.items() if not sequence.done}

    def follow(self, start: Callable[[Call], RequestState]) -> None:
        """Run rank 0's steps until it ends.

        Args:
            start: queues a request.

        Raises:
            RankError: rank 0 is lost, or in another state.
        """
        self.ranks.watch(_give_up)
        sequences: dict[int, RequestState] = {}
        while not (orders := _Orders.unpack(self.ranks.agree(self._next_state()))).end:
            for call in orders.calls:
                sequences[self._count] = start(pickle.loads(call))
                self._count += 1
            for number in orders.cancelled:
                sequences[number].cancelled = True
            self.core.step()
            self.rest()
            sequences = {number: sequence for number, sequence in sequences.items() if not sequence.done}
        self.ranks.end()

    def rest(self) -> None:
        """Give up the drafter after a step that has left no work: at the same time on all ranks."""
        if not self.core.has_work:
            self.core.clear()

    def fail(self, error: Exception) -> RankError:
        """End all requests with an error, which is returned, and answer no others."""
        if not isinstance(error, RankError):
            error = RankError(f"a step of a sharded model failed, as where a rank is lost: {first_line(error)}")
        self.broken = self.broken or error
        with self._lock:
            waiting = [batch for batch, _ in self._arrived]
            self._arrived.clear()
            queued = [sequence for batch in [*waiting, *self.core.queued] for sequence in batch.sequences]
        for sequence in [*self.core.running, *queued]:
            if not sequence.done:
                sequence.error = self.broken
                sequence.on_change()
        return self.broken

    def end(self) -> None:
        """Let the other ranks end. Without an effect on these."""
        if self.leads and self.broken is None and self._speculation is not None:
            with suppress(RankError):  # those that are lost need not be told
                self.ranks.agree(self._next_state(), _Orders(end=True).pack())
            self.ranks.end()
            self._speculation = None

    def _next_state(self) -> int:
        """A number for the tokens and the queue up to here."""
        rows = tuple((len(row.history), *row.history[-_RECENT:]) for row in self.core.running)
        self._state = hash((self._state, len(self.core.scheduler), rows)) & ((1 << 62) - 1)
        return self._state


def _give_up(error: Exception) -> None:
    """End a process that waits for a rank in the middle of a pass."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
