"""Admission of requests: a number of slots, and a queue with a limit."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from mmspec.serving.errors import APIError


class Admission(Protocol):
    """What lets requests in: a server's own ``Slots``, or those that it shares."""

    @property
    def running(self) -> int:
        """Slots in use."""

    @property
    def waiting(self) -> int:
        """Slots that are waited for."""

    async def acquire(self, count: int) -> None:
        """Wait for slots; see ``Slots.acquire``."""

    def release(self, count: int = 1) -> None:
        """Give slots back."""


class Slots:
    """Slots for decoding, given in the order of arrival. Used from one event loop only.

    Args:
        size: slots.
        longest: slots that may be waited for; further requests are refused.

    Attributes:
        running: slots in use.
    """

    def __init__(self, size: int, longest: int) -> None:
        self.size, self.longest = size, longest
        self.running = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Slots that are waited for."""
        return sum(count for count, _ in self._queue)

    async def acquire(self, count: int) -> None:
        """Wait for ``count`` slots.

        Raises:
            APIError: status 429, the queue is full.
        """
        if not self._queue and self.running + count <= self.size:
            self.running += count
            return
        if self.waiting + count > self.longest:
            message = f"the server is busy: at most {self.longest} choices may wait, and {self.waiting} do; try again"
            raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        granted = asyncio.get_running_loop().create_future()
        entry = (count, granted)
        self._queue.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
                self._grant()  # those after it may fit
            elif not granted.cancelled():  # granted in the same turn of the loop
                self.release(count)
            raise

    def release(self, count: int = 1) -> None:
        """Give slots back."""
        self.running -= count
        self._grant()

    def _grant(self) -> None:
        while self._queue:
            count, granted = self._queue[0]
            if granted.cancelled():
                self._queue.popleft()
            elif self.running + count <= self.size:
                self._queue.popleft()
                self.running += count
                granted.set_result(None)
            else:
                return
