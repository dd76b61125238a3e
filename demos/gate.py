"""What visitors may send to the server, and which files they may fetch from it."""

from __future__ import annotations

from pathlib import Path

import anyio
import gradio as gr
from gradio.blocks import Block
from gradio_client.utils import is_http_url_like
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from demos.questions import LARGEST_UPLOAD
from demos.storage import Uploads

_API = "/gradio_api"
_POSTS = ("/upload", "/queue/join", "/cancel", "/reset", "/login")
_CALLS = ("/call/", "/run/")  # and a name; "/run" serves what the page does without the queue
_CLOSED = ("/proxy=", "/deep_link", "/stream", "/custom_component")
_LARGEST_FORM = 64 * 2**10  # bytes of an upload beside its file
_LARGEST_QUESTION = 2**20  # bytes of any other request


class Gate:
    """ASGI middleware: refuses what the page and its clients do not need, and limits what they send.

    gradio's server has further routes. One stores recordings outside of the folder of uploads and leaves them there,
    others write states into it or fetch addresses of the web for whoever asks.

    Args:
        app: the server.
        uploads: where it stores what visitors send.
    """

    def __init__(self, app: ASGIApp, uploads: Uploads) -> None:
        self.app = app
        self.uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = (scope["path"].partition(_API)[2] or scope["path"]).rstrip("/")
        if scope["method"] == "POST":
            status, message = self._post_refused(route, Headers(scope=scope))
        else:
            status, message = self._get_refused(route)
        if status:
            await PlainTextResponse(message, status)(scope, receive, send)
        elif scope["method"] == "POST" and route == "/upload":
            await self._upload(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _get_refused(self, route: str) -> tuple[int, str]:
        for fetch in ("/file=", "/file/"):
            if route.startswith(fetch) and not self.uploads.holds(route.removeprefix(fetch)):
                return 403, "this file is not served"
        return (404, "not found") if route.startswith(_CLOSED) else (0, "")

    def _post_refused(self, route: str, headers: Headers) -> tuple[int, str]:
        if route not in _POSTS and not route.startswith(_CALLS):
            return 404, "not found"
        length = headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or "transfer-encoding" in headers:
            return 411, "a request must tell its length: expected a Content-Length header"
        largest = LARGEST_UPLOAD * 2**20 + _LARGEST_FORM if route == "/upload" else _LARGEST_QUESTION
        if int(length) > largest:
            return 413, f"a request must have at most {largest} bytes: got {length}"
        return 0, ""

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = int(Headers(scope=scope)["content-length"])
        reserved = False

        async def reserve_first() -> Message:
            # The body is read after the login was checked, so that nobody else has uploads evicted.
            nonlocal reserved
            if not reserved:
                reserved = await anyio.to_thread.run_sync(self.uploads.reserve, size)
                if not reserved:
                    raise HTTPException(507, "the server's space for uploads is full: try again in a few minutes")
            return await receive()

        try:
            await self.app(scope, reserve_first, send)
        finally:
            if reserved:
                self.uploads.release(size)


_move_to_cache = Block.async_move_resource_to_block_cache


async def no_downloads(block: Block, url_or_file_path: str | Path | None) -> str | None:
    """gradio's way of a file from a request to a component, without the download that it starts for addresses."""
    if is_http_url_like(url_or_file_path):
        told = "addresses are not fetched: expected an uploaded file, gradio_client's handle_file(PATH)"
        raise gr.Error(told, print_exception=False)
    return await _move_to_cache(block, url_or_file_path)
