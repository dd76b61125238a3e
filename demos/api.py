"""OpenAI's API beside the page: in the same process, on a pipeline of the page, in the same order of requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from mmspec.adaptation.options import AdaptOptions
from mmspec.demos.models import RUNNING, WAITING, ModelCache, Turn, Turns
from mmspec.errors import UserError
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits, host_names
from mmspec.serving.middleware import PROBES

_PATHS = ("/v1", "/tokenize", "/detokenize", "/metrics", *PROBES)
_POLL = 0.02  # seconds between looks at the queue: requests of the page end in other threads


class SharedSlots:
    """Slots of the API's choices among the turns of the page's requests; see ``mmspec.serving.runner.Admission``.

    Attributes:
        waiting: choices that wait for their turn.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._running: list[Turn] = []
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._running)

    async def acquire(self, count: int) -> None:
        """Wait until ``count`` choices may begin.

        Raises:
            APIError: status 429, too many requests wait already.
        """
        try:
            joined = self._turns.join(count)
        except UserError as error:
            raise APIError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}) from None
        self.waiting += count
        try:
            while self._turns.ahead(joined[-1]) is not None:
                await asyncio.sleep(_POLL)
        except asyncio.CancelledError:
            self._turns.leave(joined)
            raise
        finally:
            self.waiting -= count
        self._running += joined

    def release(self, count: int = 1) -> None:
        """Choices have ended. Turns that run are alike: it does not matter which of them leave."""
        self._turns.leave([self._running.pop() for _ in range(count)])


@dataclass(frozen=True)
class API:
    """Who may call the API, and which pipeline answers.

    Attributes:
        model, drafter: the pipeline's; it stays loaded.
        host: address that the server listens on; None accepts every name in the Host header.
        key: the key that requests must carry; None for none.
        adapt: its drafter learns from requests, on a pipeline that the page does not use; None for no.
    """

    model: str
    drafter: str = "auto"
    host: str | None = "127.0.0.1"
    key: str | None = None
    adapt: AdaptOptions | None = None

    def app(self, models: ModelCache) -> FastAPI:
        """The application; see ``mmspec.serving.app.create_app``.

        Raises:
            UserError: the model or drafter cannot be loaded.
        """
        from mmspec.serving.app import create_app  # the page alone does not need its packages

        return create_app(
            models.keep(self.model, self.drafter, self.adapt),
            Limits(max_running=RUNNING, max_waiting=WAITING),
            api_key=self.key,
            hosts=None if self.host is None else host_names(self.host),
            slots=SharedSlots(models.turns),
        )


class Dispatcher:
    """ASGI middleware: requests for the API's paths go to the API, all others to the page."""

    def __init__(self, app: ASGIApp, api: ASGIApp) -> None:
        self.app, self.api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and _is_api(scope["path"])
        await (self.api if is_api else self.app)(scope, receive, send)


def _is_api(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in _PATHS)
