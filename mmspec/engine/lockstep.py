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
from typing import Any

import torch

from mmspec.core.budget import Budget
from mmspec.core.tree import TokenTree
from mmspec.engine.core import EngineCore
from mmspec.engine.ranks import RankError, Ranks
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
        return pickle.loads(content) if content else _Orders()


class LockstepCore(EngineCore):
    """Sequences of a sharded target, and the steps that all ranks run at the same time.

    Attributes:
        leads: whether this is rank 0, which has the clients.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ranks = Ranks()
        self.leads = self._ranks.rank == 0
        self._speculation: Speculation | None = None  # of the pipeline that all ranks run
        self._arrived: deque[tuple[PromptBatch, bytes]] = deque()  # not yet passed on
        self._dropped: deque[RequestState] = deque()
        self._numbers: dict[RequestState, int] = {}
        self._count = 0
        self._state = 0

    def begin(self, speculation: Speculation) -> None:
        """Let the other ranks decode with their pipelines' drafters; ``speculation`` is that of rank 0's."""
        if self._speculation is None:
            self._ranks.watch(self._fail)
        self._speculation = speculation

    def pack(self, call: Call) -> tuple[Call, bytes]:
        """A request with a seed, and its form for other ranks.

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

    def add(self, batch: PromptBatch, call: bytes) -> None:
        """Queue a request for the next orders; on other ranks than 0, for the next step."""
        if not self.leads:
            super().add(batch, call)
            return
        if self.broken is not None:
            raise RankError(str(self.broken)) from self.broken
        if not call or self._speculation is not batch.mode.speculation:
            raise UserError(
                "a sharded model answers requests of one pipeline, after follow() was called on it on all ranks: got "
                "one of another pipeline or before"
            )
        self._arrived.append((batch, call))

    def cancel(self, sequences: Iterable[RequestState]) -> None:
        """Cancel sequences with the next orders."""
        self._dropped.extend(sequences)

    @property
    def sequences(self) -> list[RequestState]:
        """All that decode or wait, also those that were not passed on."""
        return [*super().sequences, *(sequence for batch, _ in self._arrived for sequence in batch.sequences)]

    @property
    def has_work(self) -> bool:
        return bool(self._arrived) or super().has_work

    def step(self) -> None:
        """Run a step at the same time on all ranks; on rank 0, pass on requests before.

        Raises:
            RankError: a rank is lost, or in another state.
        """
        if self.leads:
            self._lead()
        super().step()
        if not super().has_work:  # give up the drafter, at the same time on all ranks
            self.clear()

    def _lead(self) -> None:
        """Pass on which requests have come and which were cancelled."""
        if self.broken is not None:
            raise self.broken
        state = self._next_state()
        with self._lock:
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for batch, _ in arrived:
                (sequence,) = batch.sequences
                self._numbers[sequence] = self._count
                self._count += 1
                self.scheduler.add(batch)
        gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
        gone = [sequence for sequence in gone if sequence in self._numbers and not sequence.done]
        orders = _Orders([call for _, call in arrived], [self._numbers[sequence] for sequence in gone])
        self._ranks.agree(state, orders.pack())
        super().cancel(gone)
        self._numbers = {sequence: number for sequence, number in self._numbers.items() if not sequence.done}

    def follow(self, start: Callable[[Call], RequestState]) -> None:
        """Run rank 0's steps until it ends.

        Args:
            start: queues a request.

        Raises:
            RankError: rank 0 is lost, or in another state.
        """
        self._ranks.watch(_give_up)
        sequences: dict[int, RequestState] = {}
        try:
            while not (orders := _Orders.unpack(self._ranks.agree(self._next_state()))).end:
                for call in orders.calls:
                    sequences[self._count] = start(pickle.loads(call))
                    self._count += 1
                super().cancel(sequences[number] for number in orders.cancelled)
                self.step()
                sequences = {number: sequence for number, sequence in sequences.items() if not sequence.done}
        finally:
            self._ranks.end()

    def _draft(self, budget: Budget) -> tuple[TokenTree, bool]:
        drafted = super()._draft(budget)
        if failures := {row.stats.drafter_error for row in self.running} - {""}:  # of this rank, maybe not of others
            raise RankError(f"all ranks must draft the same: {min(failures)}")
        return drafted

    def abort(self, error: Exception) -> None:
        """End all requests with an error, and answer no others."""
        super().abort(self._fail(error))

    def _fail(self, error: Exception) -> Exception:
        if not isinstance(error, RankError):
            error = RankError(f"a step of a sharded model failed, as where a rank is lost: {first_line(error)}")
        self.broken = self.broken or error
        with self._lock:
            sequences = self.sequences
            self._arrived.clear()
        for sequence in sequences:
            if not sequence.done:
                sequence.error = self.broken
                sequence.on_change()
        return self.broken

    def close(self) -> None:
        """Let the other ranks end. Without an effect on these."""
        if self.leads and self._speculation is not None:
            if self.broken is None:
                with suppress(RankError):  # those that are lost need not be told
                    self._ranks.agree(self._next_state(), _Orders(end=True).pack())
            self._ranks.end()
            self._speculation = None

    def _next_state(self) -> int:
        """A number for the tokens and the queue up to here."""
        rows = tuple((len(row.history), *row.history[-_RECENT:]) for row in self.running)
        self._state = hash((self._state, len(self.scheduler), rows)) & ((1 << 62) - 1)
        return self._state


def _give_up(error: Exception) -> None:
    """End a process that waits for a rank in the middle of a pass."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
