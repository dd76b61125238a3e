"""The filter of requests by itself: lengths at their limits, routes, reserved space."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.server import _API, _CALL_ROUTES, _CLOSED_ROUTES, _POST_ROUTES, RequestFilter

UPLOAD = MAX_UPLOAD_MIB * 2**20 + 2**16  # with the form around the file
OTHER = 2**20
POSTS = [*_POST_ROUTES, *(f"{route}x" for route in _CALL_ROUTES)]


class Uploads:
    """Space for uploads of which ``free`` bytes are left."""

    def __init__(self, free: int) -> None:
        self.free, self.log = free, []

    def reserve(self, size: int) -> bool:
        self.log.append(("reserve", size))
        return size <= self.free

    def release(self, size: int) -> None:
        self.log.append(("release", size))

    def contains(self, path: str) -> bool:
        return Path(path).parent == Path("/uploads")


def sent(
    method: str, path: str, headers: dict[str, str] | None = None, free: int = 1 << 40, reads: bool = True
) -> tuple[int, str, list[Any]]:
    """Status and text of a response, 200 of the application, and what happened to the space for uploads."""
    uploads, found = Uploads(free), SimpleNamespace(status=0, body=b"")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if reads:
            await receive()
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"passed"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        found.status = message.get("status", found.status)
        found.body += message.get("body", b"")

    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    asyncio.run(RequestFilter(application, uploads)(scope, receive, send))  # type: ignore[arg-type]
    return found.status, found.body.decode(), uploads.log


@pytest.mark.parametrize("prefix", ["", _API])
@pytest.mark.parametrize("route", POSTS)
def test_every_open_route_takes_requests_up_to_its_limit(route: str, prefix: str) -> None:
    most = UPLOAD if route == "/upload" else OTHER
    for length, status in ((0, 200), (most - 1, 200), (most, 200), (most + 1, 413), (10 * most, 413)):
        found, text, _ = sent("POST", prefix + route, {"Content-Length": str(length)})
        assert found == status
        if status == 413:
            assert text == f"a request must have at most {most} bytes: got {length}"


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Transfer-Encoding": "chunked"},
        {"Content-Length": "10", "Transfer-Encoding": "chunked"},
        {"Content-Length": "10", "Transfer-Encoding": "identity"},
        {"Content-Length": ""},
        {"Content-Length": "-1"},
        {"Content-Length": "+1"},
        {"Content-Length": "1.0"},
        {"Content-Length": "²"},
        {"Content-Length": "0x1"},
    ],
    ids=str,
)
def test_bodies_must_state_their_length(route: str, headers: dict[str, str]) -> None:
    """A chunked body is longer than a length that is stated beside it."""
    status, text, log = sent("POST", _API + route, headers)
    assert (status, text) == (411, "a request must state its length: expected a Content-Length header")
    assert log == []


@pytest.mark.parametrize("route", ["/", "/proxy=x", "/component_server", "/uploads", "/call", "/run", "/queue/data"])
def test_other_routes_take_no_posts(route: str) -> None:
    assert sent("POST", _API + route, {"Content-Length": "1"})[:2] == (404, "not found")


@pytest.mark.parametrize("route", _CLOSED_ROUTES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_closed_routes(route: str, method: str) -> None:
    assert sent(method, f"{_API}{route}x")[:2] == (404, "not found")


@pytest.mark.parametrize("fetch", ["/file=", "/file/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_files_of_the_upload_folder_only(fetch: str, method: str) -> None:
    assert sent(method, f"{_API}{fetch}/uploads/a.png")[0] == 200
    assert sent(method, f"{_API}{fetch}/etc/passwd")[:2] == (403, "this file is not served")


@pytest.mark.parametrize(("free", "fits"), [(100, True), (101, True), (99, False)])
def test_space_is_reserved_once_and_released(free: int, fits: bool) -> None:
    headers = {"Content-Length": "100"}
    if fits:
        assert sent("POST", "/upload", headers, free) == (200, "passed", [("reserve", 100), ("release", 100)])
        return
    with pytest.raises(HTTPException, match="the server's space for uploads is full") as caught:
        sent("POST", "/upload", headers, free)
    assert caught.value.status_code == 507


def test_uploads_that_are_refused_before_they_are_read_take_no_space() -> None:
    assert sent("POST", "/upload", {"Content-Length": "100"}, reads=False) == (200, "passed", [])


def test_other_connections_pass() -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    filtered = RequestFilter(application, Uploads(0))  # type: ignore[arg-type]
    asyncio.run(filtered({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
