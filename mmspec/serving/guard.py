"""Middleware that refuses requests by their headers: host, origin and API key."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mmspec.serving.drain import PROBES
from mmspec.serving.errors import APIError


class Guard:
    """Refuses requests that a browser sends for another site's page, and those without the API key.

    A page whose name is made to resolve to this machine sends its own name as the host; other pages send their origin.

    Args:
        hosts: names in the Host header that are accepted, without ports; None accepts all.
        origins: origins of pages that may call the server, such as ``http://localhost:3000``; the server's own may.
        api_key: the key that requests must carry; None for none.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str], api_key: str | None
    ) -> None:
        self.app = app
        self._hosts, self._origins = hosts, origins
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if error is None else error.response())(scope, receive, send)

    def _error(self, path: str, headers: Headers) -> APIError | None:
        host = headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            return APIError(403, f"the host must be one of {', '.join(sorted(self._hosts))}: got {host!r}")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and urlsplit(origin).netloc != host:
            return APIError(403, f"requests of web pages need --allow-origin {origin!r}")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if self._key is not None and path not in PROBES:
            same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
            if not same or scheme.lower() != "bearer":  # RFC 9110: schemes are case-insensitive
                message = "a valid API key is needed: expected Authorization: Bearer KEY"
                return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()
