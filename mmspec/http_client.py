"""HTTP client of model servers: this package's, others with OpenAI's API, and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

import httpx

TIMEOUT = 600.0
"""Seconds for loading a model and for each request."""


def open_client(url: str, key: str | None = None) -> httpx.Client:
    """A client with the base URL ``url``, whose requests carry the API key; each request opens a connection.

    Some servers close a connection after an aborted stream, which a kept connection would notice too late.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits)


def stream_json(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """POST a request and yield the JSON objects of its server-sent events; closing the iterator aborts the request.
    Raises ``httpx.HTTPStatusError``: the server refused the request; its message contains the reply."""
    with client.stream("POST", path, json=body) as reply:
        if reply.is_error:
            text = reply.read().decode(errors="replace")
            raise httpx.HTTPStatusError(f"status {reply.status_code}: {text}", request=reply.request, response=reply)
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
