"""Engine of a model sharded over several ranks (tensor parallelism): all ranks run the same schedule.

Before each step, rank 0 broadcasts new and cancelled requests, and all ranks compare their states. All ranks choose
the same tokens because queues, seeds and the logits that transformers gathers are equal.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from mmspec.core.target import Target
from mmspec.core.tree import TokenTree
from mmspec.engine.core import Draft, EngineCore
from mmspec.engine.engine import Engine
from mmspec.engine.policy import DraftPolicy, Speculation
from mmspec.engine.request import Request
from mmspec.engine.sequence import Sequence
from mmspec.engine.threads import TorchThreads
from mmspec.errors import UserError, first_line

_RECENT = 64  # tokens of each sequence that ranks compare; a step emits fewer
_INTERVAL = 1.0  # seconds between heartbeats
_PATIENCE = 10.0  # seconds to wait for the last heartbeat; busy machines take more than an interval
_SECONDS = 60.0  # heartbeat timeout, after which a rank counts as lost; MMSPEC_RANK_SECONDS
_FOR_EVER = timedelta(days=365)  # timeout of orders: ranks wait for orders between requests


class RankError(RuntimeError):
    """A rank is lost, or the ranks' states differ: the sharded model cannot continue."""


class Ranks:
    """Gloo process groups over all ranks, for orders and heartbeats, separate from the model's groups."""

    def __init__(self) -> None:
        seconds = float(os.environ.get("MMSPEC_RANK_SECONDS", _SECONDS))
        self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._orders = distributed.new_group(backend="gloo", timeout=_FOR_EVER)
        self._signs = distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._turn = 0
        self._ended = threading.Event()
        self._watching: threading.Thread | None = None

    def agree(self, state: int, orders: Orders | None = None) -> Orders:
        """Compare the states of all ranks, and return the orders of rank 0.

        Args:
            state: a number that must be equal on all ranks.
            orders: read on rank 0 only.

        Raises:
            RankError: states differ, or a rank is lost.
        """
        own, given = torch.tensor([self._turn, state, orders is not None], dtype=torch.long), [orders]
        of_all = [torch.empty_like(own) for _ in range(self._size)]
        try:
            distributed.all_gather(of_all, own, group=self._orders)
            found = [one.tolist() for one in of_all]
            for rank, (turn, theirs, _) in enumerate(found):
                if [turn, theirs] != found[0][:2]:
                    raise RankError(
                        f"the ranks must run the same schedule: expected turn {found[0][0]} in state {found[0][1]:x} "
                        f"of rank 0, received turn {turn} in state {theirs:x} of rank {rank}"
                    )
            self._turn += 1
            if found[0][2]:
                distributed.broadcast_object_list(given, src=0, group=self._orders)
        except RankError:
            raise
        except RuntimeError as error:
            raise _lost(error) from error
        return given[0] or Orders()

    def watch(self, lost: Callable[[RankError], object]) -> None:
        """Start a thread that exchanges heartbeats, and calls ``lost`` once if a rank sends none."""
        self._watching = threading.Thread(target=self._watch, args=(lost,), name="mmspec ranks", daemon=True)
        self._watching.start()

    def end(self) -> None:
        """Announce the last heartbeat and join the heartbeat thread, which would crash at interpreter shutdown."""
        self._ended.set()
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join(_PATIENCE)

    def _watch(self, lost: Callable[[RankError], object]) -> None:
        ended = False
        while not ended:
            self._ended.wait(_INTERVAL)
            sign = torch.tensor([int(self._ended.is_set())], dtype=torch.long)
            try:
                distributed.all_reduce(sign, distributed.ReduceOp.MAX, group=self._signs)
            except RuntimeError as error:
                if not self._ended.is_set():
                    lost(_lost(error))
                return
            ended = bool(sign.item())


def _lost(error: RuntimeError) -> RankError:
    return RankError(f"a rank of the sharded model is lost: {str(error).strip().splitlines()[0]}")


@dataclass(frozen=True)
class Orders:
    """Orders of rank 0 for one step.

    Attributes:
        cancelled: numbers of cancelled requests, counted in order of arrival.
        end: whether the other ranks stop instead of running a step.
    """

    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    end: bool = False


class LockstepCore(EngineCore):
    """Engine core of a sharded target: all ranks run each step at the same time.

    Attributes:
        leads: whether this is rank 0, which serves the clients.
        broken: the error that prevents further steps; None without an error.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ranks = Ranks()
        self.leads = self._ranks.rank == 0
        self.broken: Exception | None = None
        self._speculation: Speculation | None = None  # the one pipeline that all ranks run
        self._arrived: deque[Sequence] = deque()  # not yet broadcast
        self._dropped: deque[Sequence] = deque()
        self._numbers: dict[Sequence, int] = {}
        self._count = 0
        self._state = 0

    def begin(self, speculation: Speculation) -> None:
        """Start serving requests with rank 0's ``speculation``; other ranks use their own pipelines' drafters."""
        if self._speculation is None:
            self._ranks.watch(self._fail)
        self._speculation = speculation

    def add(self, sequence: Sequence) -> None:
        """Queue a request: on rank 0 for the next orders, on other ranks for the next step."""
        if not self.leads:
            super().add(sequence)
            return
        if self.broken is not None:
            raise RankError(str(self.broken)) from self.broken
        if sequence.request.source is None or self._speculation is not sequence.key.speculation:
            raise UserError(
                "a sharded model answers requests of one pipeline, after follow() was called on it on all ranks: got "
                "one of another pipeline or before"
            )
        self._arrived.append(sequence)

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Cancel sequences with the next orders."""
        self._dropped.extend(sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of this rank, broadcast or not."""
        return [*super().sequences, *self._arrived]

    @property
    def has_work(self) -> bool:
        return bool(self._arrived) or super().has_work

    def step(self) -> int:
        """Run one step on all ranks, after rank 0's orders. Raises ``RankError``: a rank is lost or differs."""
        if self.leads:
            self._lead()
        tokens = super().step()
        if not super().has_work:  # release the drafter at the same step on all ranks
            self.clear()
        return tokens

    def _lead(self) -> None:
        """Broadcast new and cancelled requests."""
        if self.broken is not None:
            raise self.broken
        state = self._next_state()
        with self._lock:
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for sequence in arrived:
                self._numbers[sequence] = self._count
                self._count += 1
                self.scheduler.waiting.append(sequence)
        gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
        gone = [sequence for sequence in gone if sequence in self._numbers and not sequence.done]
        requests = [sequence.request.source for sequence in arrived if sequence.request.source]
        cancelled = [self._numbers[sequence] for sequence in gone]
        self._ranks.agree(state, Orders(requests, cancelled) if requests or cancelled else None)
        super().cancel(gone)
        self._numbers = {sequence: number for sequence, number in self._numbers.items() if not sequence.done}

    def follow(self, start: Callable[[Request], Sequence]) -> None:
        """Run rank 0's steps until it ends; ``start`` queues a request. Raises ``RankError``: rank 0 is lost or
        differs."""
        self._ranks.watch(_give_up)
        sequences: dict[int, Sequence] = {}
        try:
            while not (orders := self._ranks.agree(self._next_state())).end:
                for request in orders.requests:
                    sequences[self._count] = start(request)
                    self._count += 1
                super().cancel(sequences[number] for number in orders.cancelled)
                self.step()
                sequences = {number: sequence for number, sequence in sequences.items() if not sequence.done}
        finally:
            self._ranks.end()

    def fit(self, policy: DraftPolicy, draft: Draft) -> TokenTree:
        tree = super().fit(policy, draft)
        if failures := {row.stats.drafter_error for row in self.running} - {""}:  # maybe on this rank only
            raise RankError(f"all ranks must draft the same: {min(failures)}")
        return tree

    def abort(self, error: Exception) -> None:
        """End all requests with an error and reject later requests."""
        super().abort(self._fail(error))

    def _fail(self, error: Exception) -> Exception:
        if not isinstance(error, RankError):
            error = RankError(f"a step of a sharded model failed, as where a rank is lost: {first_line(error)}")
        self.broken = self.broken or error
        with self._lock:
            sequences = self.sequences
            self._arrived.clear()
        for sequence in sequences:
            sequence.fail(self.broken)
            sequence.emit()
        return self.broken

    def close(self) -> None:
        """Tell the other ranks to stop. No effect on ranks other than 0."""
        if self.leads and self._speculation is not None:
            if self.broken is None:
                with suppress(RankError):  # lost ranks cannot be told
                    self._ranks.agree(self._next_state(), Orders(end=True))
            self._ranks.end()
            self._speculation = None

    def _next_state(self) -> int:
        """Update and return the hash of all tokens and queue lengths so far."""
        rows = tuple((len(row.history), *row.history[-_RECENT:]) for row in self.running)
        self._state = hash((self._state, len(self.scheduler.waiting), rows)) & ((1 << 62) - 1)
        return self._state


class DistributedEngine(Engine):
    """Engine of a sharded target: rank 0 serves clients, the other ranks follow its steps.

    The order and the results of steps must not depend on one rank's clock.
    """

    core_class = LockstepCore
    core: LockstepCore

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.threads = TorchThreads(adapts=False)

    def admit(self, request: Request) -> Request:
        """Return the request with a seed, so that all ranks draw the same numbers. Raises ``UserError``: the request
        depends on one rank's clock or cannot be pickled."""
        if not self.core.leads:
            return request
        if (limit := request.options.max_time) is not None:
            raise UserError(f"max_time follows the clock of one rank: got {limit} with a sharded model")
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=int(torch.randint(1 << 62, (1,)))))
        try:
            pickle.dumps(request)
        except Exception as error:
            raise UserError(
                "requests to a sharded model must be ones that other processes can unpickle: received "
                f"{first_line(error)}"
            ) from error
        return request

    def follow(self, speculation: Speculation, start: Callable[[Request], Sequence]) -> bool:
        """Run the steps of rank 0 on the other ranks, see ``Pipeline.follow``; ``start`` queues a request."""
        atexit.register(self._end_process)  # other ranks wait for rank 0 to close, even if its engine is unused
        if self.core.leads:
            self.core.begin(speculation)
        else:
            with self._on_device():
                self.core.follow(start)
        return not self.core.leads

    def close(self) -> None:
        super().close()
        if not self._waits_for_lost_rank:
            self.core.close()

    def drain(self) -> None:
        if not self._waits_for_lost_rank:
            super().drain()

    def _wake(self) -> None:
        if self.core.leads:  # other ranks run steps in ``follow``
            super()._wake()

    @property
    def _waits_for_lost_rank(self) -> bool:
        """Whether the worker may block for ever on a lost rank."""
        return self.core.broken is not None and self._worker is not None

    def _end_process(self) -> None:
        self.close()
        if self._waits_for_lost_rank:  # a normal exit would block, too
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        if distributed.is_initialized():  # its threads would crash at interpreter shutdown
            distributed.destroy_process_group()


def _give_up(error: Exception) -> None:
    """End this process, which may be blocked in a collective of a forward pass."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
