"""The time in which a request must end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from mmspec.serving.errors import APIError

T = TypeVar("T")


class Deadline:
    """The end of a request's time, which begins now.

    Args:
        seconds: from now; 0 is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds if seconds else None

    async def wait(self, work: Awaitable[T]) -> T:
        """Await ``work``, and cancel it at the end of the time.

        Raises:
            APIError: status 504, the time has passed. Clients should not send the same request again by themselves.
        """
        try:
            async with asyncio.timeout_at(self._end) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
        message = f"a request must end within {self._seconds:g} s (--request-timeout): this one had not"
        raise APIError(504, message, code="timeout", headers={"x-should-retry": "false"})
