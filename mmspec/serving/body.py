"""Bodies of requests."""

from __future__ import annotations

import asyncio

from fastapi import Request

from mmspec.serving.errors import APIError

SECONDS = 60.0
"""Time in which a body must arrive."""


async def read(request: Request, most: int) -> bytes:
    """A request's body.

    Args:
        most: bytes.

    Raises:
        APIError: it is too large, or takes too long.
    """
    error = APIError(413, f"a request's body must have at most {most} bytes: got more")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most:
        raise error
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise error
    except TimeoutError:
        raise APIError(408, f"a request's body must arrive within {SECONDS:g} s") from None
    return bytes(body)
