"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it when the client disconnects.

    Args:
        receive: of the request, whose body has been read.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of server-sent events that closes its generator as soon as the client disconnects.

    starlette's own leaves an open generator to the garbage collector.

    Args:
        first: the first event, which the generator has already yielded.
        events: further ones.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        async def all_events() -> AsyncIterator[bytes]:
            yield first
            async for event in events:
                yield event

        self._events = events
        super().__init__(all_events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        except (ClientGoneError, OSError):
            pass
        finally:
            await self._events.aclose()
