"""The guard by itself: hosts, origins and keys of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mmspec.serving.middleware import Guard
from mmspec.serving.settings import host_names, server_url

HOSTS = {"localhost", "127.0.0.1", "[::1]"}
ORIGINS = ["http://app.example"]


def status(headers: dict[str, str], path: str = "/v1/models", kind: str = "http", **options: Any) -> int:
    """That of the response; 200 of the application."""
    found: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        found.append(message)

    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": given}
    guard = Guard(application, **{"hosts": HOSTS, "origins": ORIGINS, "api_key": None, **options})
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return found[0]["status"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("[::2]:8000", 403),
        ("localhost.evil.example", 403),
        ("evil.example:80", 403),
        ("", 403),
    ],
)
def test_names_of_the_server(host: str, expected: int) -> None:
    assert status({"Host": host}) == expected
    assert status({"Host": host}, hosts=None) == 200
    assert status({}, hosts=None) == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://app.example", 200),
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("http://app.example.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_origins_of_pages(origin: str, expected: int) -> None:
    assert status({"Host": "localhost:8000", "Origin": origin}) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Bearer secret", 200),
        ("bearer  secret ", 200),
        ("BEARER secret", 200),
        ("Bearer secre", 401),
        ("Bearer secrets", 401),
        ("Bearer Secret", 401),
        ("Bearer", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer s\xe9cret", 401),
        (None, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health/x"])
def test_keys(given: str | None, expected: int, path: str) -> None:
    headers = {"Host": "localhost"} if given is None else {"Host": "localhost", "Authorization": given}
    assert status(headers, path, api_key="secret") == expected
    assert status(headers, "/health", api_key="secret") == 200
    assert status(headers, path) == 200


def test_other_connections_pass() -> None:
    assert status({}, kind="lifespan", api_key="secret") == 200


@pytest.mark.parametrize(
    ("host", "address", "known"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", HOSTS),
        ("localhost", "http://localhost:80", HOSTS),
        ("::1", "http://[::1]:80", HOSTS | {"::1"}),
        ("[::1]", "http://[::1]:80", HOSTS),
        ("127.0.0.2", "http://127.0.0.2:80", HOSTS | {"127.0.0.2"}),
        ("0.0.0.0", "http://0.0.0.0:80", None),
        ("::", "http://[::]:80", None),
        ("server.example", "http://server.example:80", None),
    ],
)
def test_addresses_and_names_of_a_server(host: str, address: str, known: set[str] | None) -> None:
    assert (server_url(host, 80), host_names(host)) == (address, known)
