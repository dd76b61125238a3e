"""Restrict the HTTP requests that gradio's server accepts: routes, sizes and files."""

from __future__ import annotations

import secrets
from pathlib import Path

import anyio
import gradio as gr
from gradio.blocks import Block
from gradio_client.utils import is_http_url_like
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.storage import UploadFolder

_API = "/gradio_api"
_POST_ROUTES = ("/upload", "/queue/join", "/cancel", "/reset", "/login")
_CALL_ROUTES = ("/call/", "/run/")  # followed by an endpoint; "/run" serves the page's unqueued events
_CLOSED_ROUTES = ("/proxy=", "/deep_link", "/stream", "/custom_component")
_ALIVE = "/alive"  # answered with an id of this server, which differs after a restart
_MAX_FORM_BYTES = 64 * 2**10  # bytes of an upload's form besides the file
_MAX_REQUEST_BYTES = 2**20  # bytes of any other request


class RequestFilter:
    """ASGI middleware that rejects unneeded routes and oversized requests, and serves files of the upload folder only.

    gradio's server has further routes: one stores recordings outside of the upload folder and never removes them,
    others write state files there, or download URLs on behalf of clients.
    """

    def __init__(self, app: ASGIApp, uploads: UploadFolder) -> None:
        self.app = app
        self.uploads = uploads
        self.server = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = (scope["path"].partition(_API)[2] or scope["path"]).rstrip("/")
        if scope["method"] == "POST":
            status, message = self._check_post(route, Headers(scope=scope))
        else:
            status, message = (200, self.server) if route == _ALIVE else self._check_get(route)
        if status:
            await PlainTextResponse(message, status)(scope, receive, send)
        elif scope["method"] == "POST" and route == "/upload":
            await self._upload(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _check_get(self, route: str) -> tuple[int, str]:
        """Status and message of a rejected request; 0 if it is accepted."""
        for fetch in ("/file=", "/file/"):
            if route.startswith(fetch) and not self.uploads.contains(route.removeprefix(fetch)):
                return 403, "this file is not served"
        return (404, "not found") if route.startswith(_CLOSED_ROUTES) else (0, "")

    def _check_post(self, route: str, headers: Headers) -> tuple[int, str]:
        if route not in _POST_ROUTES and not route.startswith(_CALL_ROUTES):
            return 404, "not found"
        length = headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or "transfer-encoding" in headers:
            return 411, "a request must state its length: expected a Content-Length header"
        largest = MAX_UPLOAD_MIB * 2**20 + _MAX_FORM_BYTES if route == "/upload" else _MAX_REQUEST_BYTES
        if int(length) > largest:
            return 413, f"a request must have at most {largest} bytes: got {length}"
        return 0, ""

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = int(Headers(scope=scope)["content-length"])
        reserved = False

        async def reserve_first() -> Message:
            # The body is read only after the login check: requests without a login evict no uploads.
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


async def refuse_urls(block: Block, url_or_file_path: str | Path | None) -> str | None:
    """gradio's function that moves a request's file to a component, without its download of URLs."""
    if is_http_url_like(url_or_file_path):
        message = "URLs are not downloaded: expected an uploaded file, gradio_client's handle_file(PATH)"
        raise gr.Error(message, print_exception=False)
    return await _move_to_cache(block, url_or_file_path)
