"""Responses that later requests continue or read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from mmspec.serving.errors import APIError
from mmspec.serving.response_request import ITEMS, Item

_BYTES = 256 << 20


@dataclass(frozen=True)
class _Stored:
    response: dict[str, Any]
    items: Sequence[Item]
    size: int
    time: float


class StoredResponses:
    """Responses of the Responses API with their conversations, in memory. Threads may share it.

    Args:
        most: responses that are kept; the oldest is dropped. Their texts have at most 256 MiB.
        seconds: after which they are dropped.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._kept: dict[str, _Stored] = {}  # the oldest first
        self._size = 0
        self._lock = Lock()

    def add(self, response: dict[str, Any], asked: Sequence[Item]) -> None:
        """Keep a response and its conversation.

        Args:
            asked: the items before those of the response; a call that was cut short is not among the latter.
        """
        answered = [one for one in response["output"] if one["type"] == "message" or one["status"] == "completed"]
        items = [*asked, *ITEMS.validate_python(answered)]
        size = len(json.dumps(response)) + len(ITEMS.dump_json(items))
        with self._lock:
            self._kept[response["id"]] = _Stored(response, items, size, time.monotonic())
            self._size += size
            self._trim()

    def items(self, name: str | None) -> Sequence[Item]:
        """The conversation up to a response, its output included; none before the first.

        Raises:
            APIError: status 400, the response is not kept.
        """
        if name is None:
            return ()
        if (kept := self._find(name)) is not None:
            return kept.items
        message = f"previous_response_id must be that of a response which the server keeps: got {name[:80]!r}"
        raise APIError(400, message, "previous_response_id", "previous_response_not_found")

    def get(self, name: str) -> dict[str, Any]:
        """A response.

        Raises:
            APIError: status 404, it is not kept.
        """
        if (kept := self._find(name)) is not None:
            return kept.response
        raise APIError(404, f"no response of this id is kept: got {name[:80]!r}", "response_id")

    def delete(self, name: str) -> dict[str, Any]:
        """Drop a response; returns OpenAI's object of that.

        Raises:
            APIError: status 404, it is not kept.
        """
        self.get(name)
        with self._lock:
            self._drop(name)
        return {"id": name, "object": "response", "deleted": True}

    def _find(self, name: str) -> _Stored | None:
        with self._lock:
            self._trim()
            return self._kept.get(name)

    def _trim(self) -> None:
        oldest = time.monotonic() - self._seconds
        while self._kept:
            name, first = next(iter(self._kept.items()))
            if len(self._kept) <= self._most and self._size <= _BYTES and first.time >= oldest:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        if (gone := self._kept.pop(name, None)) is not None:
            self._size -= gone.size
