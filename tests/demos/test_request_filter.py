"""The filter of requests by itself: routes, lengths at their limits, reserved space."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.server import _CALL_ROUTES, _CLOSED_ROUTES, _GRADIO, _POST_ROUTES, RequestFilter
from mmspec.demos.storage import UploadFolder

UPLOAD = MAX_UPLOAD_MIB * 2**20 + 2**16  # with the form around the file
OTHER = 2**20
POSTS = [*_POST_ROUTES, *(f"{route}x" for route in _CALL_ROUTES)]


class Sender:
    """Sends requests through a filter; the application answers with the bytes that are reserved once it has read."""

    def __init__(self, folder: Path) -> None:
        self.uploads = UploadFolder(folder, 1 << 40)

    def __call__(
        self, method: str, path: str, headers: dict[str, Any] | None = None, reads: int = 2
    ) -> tuple[int, str]:
        """Status and text of the response."""

        async def application(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(reads):
                await receive()
            await PlainTextResponse(str(self.uploads._reserved))(scope, receive, send)

        async def ask() -> httpx.Response:
            filtered = RequestFilter(application, self.uploads)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(filtered), base_url="http://demo") as client:
                request = client.build_request(method, path)
                request.headers = httpx.Headers({name: str(value).encode("latin-1") for name, value in headers.items()})
                return await client.send(request)

        headers = headers or {}
        response = asyncio.run(ask())
        assert self.uploads._reserved == 0
        return response.status_code, response.text


@pytest.fixture
def sent(tmp_path: Path) -> Sender:
    return Sender(tmp_path)


@pytest.mark.parametrize("prefix", ["", _GRADIO])
@pytest.mark.parametrize("route", POSTS)
def test_every_open_route_takes_requests_up_to_its_limit(sent: Sender, route: str, prefix: str) -> None:
    most = UPLOAD if route == "/upload" else OTHER
    for length in (0, most):
        assert sent("POST", prefix + route, {"Content-Length": length}) == (200, str(length * (route == "/upload")))
    error = f"a request must have at most {most} bytes: got {most + 1}"
    assert sent("POST", prefix + route, {"Content-Length": most + 1}) == (413, error)


@pytest.mark.parametrize("length", ["", "-1", "+1", "1.0", "²", "0x1", None])
def test_bodies_must_state_their_length(sent: Sender, length: str | None) -> None:
    """A chunked body is longer than a length that is stated beside it."""
    given = {} if length is None else {"Content-Length": length}
    for headers in (given, {"Content-Length": "10", "Transfer-Encoding": "chunked"}, {"Transfer-Encoding": "chunked"}):
        for route in ("/upload", "/queue/join"):
            error = "a request must state its length: expected a Content-Length header"
            assert sent("POST", _GRADIO + route, headers) == (411, error)


def test_other_routes_are_closed(sent: Sender) -> None:
    for route in ("/", "/proxy=x", "/component_server", "/uploads", "/call", "/run", "/queue/data"):
        assert sent("POST", _GRADIO + route, {"Content-Length": 1}) == (404, "not found")
    for route in _CLOSED_ROUTES:
        assert sent("GET", f"{_GRADIO}{route}x") == (404, "not found")
        assert sent("HEAD", f"{_GRADIO}{route}x")[0] == 404


@pytest.mark.parametrize("fetch", ["/file=", "/file/"])
def test_files_of_the_upload_folder_only(sent: Sender, fetch: str) -> None:
    for method in ("GET", "HEAD"):
        assert sent(method, f"{_GRADIO}{fetch}{sent.uploads.folder}/a.png")[0] == 200
        assert sent(method, f"{_GRADIO}{fetch}/etc/passwd")[0] == 403


def test_space_is_reserved_when_a_body_is_read(sent: Sender) -> None:
    headers = {"Content-Length": 100}
    assert sent("POST", "/upload", headers, reads=0) == (200, "0")  # as one that the login check has refused
    sent.uploads.limit = 100
    assert sent("POST", "/upload", headers) == (200, "100")
    sent.uploads.limit = 99
    with pytest.raises(HTTPException, match="the server's space for uploads is full") as caught:
        sent("POST", "/upload", headers)
    assert caught.value.status_code == 507


def test_other_connections_pass(sent: Sender) -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(RequestFilter(application, sent.uploads)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
