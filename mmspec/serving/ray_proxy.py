"""Middleware of Ray Serve's HTTP proxy: errors of OpenAI's shape for requests whose replica is lost."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.serving.errors import APIError, as_events


class LostReplica:
    """Completes responses that the proxy leaves incomplete: it returns without a word when a replica dies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = ended = stream = False

        async def watch(message: Message) -> None:
            nonlocal started, ended, stream
            if message["type"] == "http.response.start":
                started = True
                stream = any(
                    name.lower() == b"content-type" and b"event-stream" in value for name, value in message["headers"]
                )
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        await self.app(scope, receive, watch)
        if scope["type"] != "http" or ended:
            return
        error = APIError(503, "the replica that ran the request was lost: try again", headers={"Retry-After": "1"})
        if not started:
            await error.response()(scope, receive, send)
        elif stream:
            await send({"type": "http.response.body", "body": as_events(error)})


def middleware() -> list[Middleware]:
    """What Ray imports: see ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``."""
    return [Middleware(LostReplica)]
