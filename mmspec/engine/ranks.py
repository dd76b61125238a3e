"""Messages between the ranks of a sharded model: orders of rank 0, a check that all ranks agree, signs of life."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

_INTERVAL = 1.0  # seconds between signs of life
_PATIENCE = 10.0  # seconds to wait for the last sign; busy machines take more than an interval
_SECONDS = 60.0  # without one, after which a rank is lost; MMSPEC_RANK_SECONDS
_FOR_EVER = timedelta(days=365)  # ranks wait for orders while there are no requests


class RankError(RuntimeError):
    """A rank is lost, or the ranks are not in the same state: a model that is sharded over them answers no more."""


class Ranks:
    """All processes of the job, in groups of their own beside those of the model."""

    def __init__(self) -> None:
        seconds = float(os.environ.get("MMSPEC_RANK_SECONDS", _SECONDS))
        self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._orders = distributed.new_group(backend="gloo", timeout=_FOR_EVER)
        self._signs = distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._turn = 0
        self._ended = threading.Event()
        self._watching: threading.Thread | None = None

    def agree(self, state: int, orders: bytes = b"") -> bytes:
        """Compare the states of all ranks, and return the orders of rank 0.

        Args:
            state: a number that is equal on all ranks.
            orders: of rank 0.

        Raises:
            RankError: states differ, or a rank is lost.
        """
        own = torch.tensor([self._turn, state, len(orders)])
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
            if not found[0][2]:
                return b""
            content = torch.frombuffer(bytearray(orders or found[0][2]), dtype=torch.uint8)
            distributed.broadcast(content, src=0, group=self._orders)
        except RankError:
            raise
        except RuntimeError as error:
            raise _lost(error) from error
        return content.numpy().tobytes()

    def watch(self, lost: Callable[[RankError], object]) -> None:
        """Exchange signs of life from now on, in a thread.

        Args:
            lost: called once where a rank gives none.
        """
        self._watching = threading.Thread(target=self._watch, args=(lost,), name="mmspec ranks", daemon=True)
        self._watching.start()

    def end(self) -> None:
        """Tell the other ranks that no sign of life will follow, and wait until they know: the interpreter's end would
        crash a thread that communicates."""
        self._ended.set()
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join(_PATIENCE)

    def _watch(self, lost: Callable[[RankError], object]) -> None:
        ended = False
        while not ended:
            self._ended.wait(_INTERVAL)
            sign = torch.tensor([int(self._ended.is_set())])
            try:
                distributed.all_reduce(sign, distributed.ReduceOp.MAX, group=self._signs)
            except RuntimeError as error:
                if not self._ended.is_set():
                    lost(_lost(error))
                return
            ended = bool(sign.item())


def _lost(error: RuntimeError) -> RankError:
    return RankError(f"a rank of the sharded model is lost: {str(error).strip().splitlines()[0]}")
