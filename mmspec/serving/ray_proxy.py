"""Middleware of Ray Serve's HTTP proxy: errors of OpenAI's shape for requests whose replica is lost."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mmspec.serving.drain import Watched
from mmspec.serving.errors import APIError


class LostReplica:
    """Completes responses that the proxy leaves incomplete: it returns without a word when a replica dies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Watched(send)
        await self.app(scope, receive, response)
        if scope["type"] == "http":
            error = APIError(503, "the replica that ran the request was lost: try again", headers={"Retry-After": "1"})
            await response.complete(error, scope, receive)


def middleware() -> list[Middleware]:
    """What Ray imports: see ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``."""
    return [Middleware(LostReplica)]
