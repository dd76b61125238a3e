"""Loaded models with an engine per drafter, and their request queue: requests run together, races run alone."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console

from mmspec import plugins
from mmspec.adaptation import AdaptOptions
from mmspec.cli.session import SINGLE_THREADED, open_pipeline
from mmspec.drafters.registry import make_drafter
from mmspec.drafters.union import per_sequence
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.defaults import MODELS
from mmspec.serving.errors import APIError
from mmspec.targets.gguf_file import file_in

T = TypeVar("T")
RUNNING = 8
"""Requests that are answered at the same time; further requests wait."""

WAITING = 24
"""Requests that wait for their turn; further requests are rejected."""

_POLL = 0.5  # seconds between cancellation checks of queued requests
_PIPELINES = 8  # cached pipelines per model
_TOKENS = 2048  # KV cache tokens that each reserves on a GPU


class QueuePlace(Future[None]):
    """A request's place in the queue; done when the request may start, alone or with others."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone


class RequestQueue:
    """FIFO queue of requests, which may run together or alone, and of the API's choices; see
    ``mmspec.serving.runner.Admission``. Thread-safe.

    Requests after an exclusive request start when the exclusive request has ended.
    """

    def __init__(self) -> None:
        self._places: list[QueuePlace] = []  # running or waiting
        self._choices: list[QueuePlace] = []  # of the API, running
        self.waiting = 0
        self._lock = RLock()  # re-entrant: garbage collection may end a request in any thread

    def join(self, count: int = 1, *, alone: bool = False) -> list[QueuePlace]:
        """Append ``count`` places to the queue. Raises ``UserError`` if the queue is full."""
        with self._lock:
            if len(self._places) + count > RUNNING + WAITING:
                raise UserError(f"the server is busy with {RUNNING + WAITING} requests: try again in a minute")
            joined = [QueuePlace(alone) for _ in range(count)]
            self._places += joined
            self._start()
            return joined

    def leave(self, places: Iterable[QueuePlace]) -> None:
        """Remove requests that have ended or stopped waiting."""
        with self._lock:
            for place in places:
                self._places.remove(place)
            self._start()

    def _start(self) -> None:
        places = list(self._places)  # garbage collection below may call ``leave`` in this thread
        for ahead, place in enumerate(places):
            if ahead and (place.alone or ahead >= RUNNING or places[ahead - 1].alone):
                break
            if not place.done() and place.set_running_or_notify_cancel():
                place.set_result(None)

    def run(self, work: Iterator[T], waiting: Callable[[int], T], *, alone: bool = False) -> Iterator[T]:
        """Run a request's steps, together with other requests or alone; see ``join``. Until it starts, ``waiting`` of
        the number of requests ahead is yielded periodically."""
        joined = self.join(alone=alone)
        try:
            seconds = 0.0  # report the place immediately
            while not wait(joined, seconds).done:
                yield waiting(self._places.index(joined[0]))
                seconds = _POLL
            yield from work
        finally:
            self.leave(joined)

    @property
    def running(self) -> int:
        """Number of running choices."""
        return len(self._choices)

    async def acquire(self, count: int) -> None:
        """Wait until ``count`` choices may start. Raises ``APIError``: status 429, the queue is full."""
        try:
            joined = self.join(count)
        except UserError as error:
            raise APIError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}) from None
        self.waiting += count
        try:
            await asyncio.gather(*map(asyncio.wrap_future, joined))
        except asyncio.CancelledError:
            self.leave(joined)
            raise
        finally:
            self.waiting -= count
        self._choices += joined

    def release(self, count: int = 1) -> None:
        """Remove ended choices. Running choices are interchangeable."""
        self.leave([self._choices.pop() for _ in range(count)])


class LRU(Generic[T]):
    """Cache of named objects, with at most ``capacity`` objects. Thread-safe.

    The oldest object is dropped before a new object is made: both might not fit into memory.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._objects: OrderedDict[str, T] = OrderedDict()
        self._kept: str | None = None
        self._lock = RLock()

    def get(self, name: str, make: Callable[[str], T], *, keep: bool = False) -> T:
        """Get or make an object; with ``keep``, it is never dropped."""
        with self._lock:
            self._kept = name if keep else self._kept
            if name not in self._objects:
                while len(self._objects) >= self._capacity:
                    del self._objects[next(other for other in self._objects if other != self._kept)]
                self._objects[name] = make(name)
            self._objects.move_to_end(name)
            return self._objects[name]


class LoadedModel:
    """One model with a cache of pipelines, one per method; see ``mmspec.demos.catalog``.

    A learning drafter is copied for each sequence: otherwise one visitor's tokens would appear in another visitor's
    draft trees, and repeated requests would be drafted from memory.

    Args:
        loaded: a pipeline of the model without a drafter.
    """

    def __init__(self, loaded: Pipeline) -> None:
        self._loaded = loaded
        self.target, self.processor, self.name = loaded.target, loaded.processor, loaded.name
        self._pipelines = LRU[Pipeline](_PIPELINES)

    @property
    def one_image(self) -> bool:
        """Whether the model is LLaVA-1.5 (arXiv 2310.03744) or LLaVA-NeXT, trained with one image per prompt."""
        return self.target.model.config.model_type in ("llava", "llava_next")

    def pipeline(self, method: str, *, keep: bool = False) -> Pipeline:
        """The cached or new pipeline of a method. Raises ``UserError``: the drafter is unknown, made for another model,
        or does not draft chains."""
        return self._pipelines.get(method, self.open, keep=keep)

    def open(self, method: str, adapt: AdaptOptions | None = None) -> Pipeline:
        """Create a pipeline; see ``pipeline``. With ``adapt``, the drafter learns from all sequences."""
        drafter = make_drafter(method, str(self.target.model.config.name_or_path))
        options: dict[str, Any] = {"generation_config": self._loaded.generation_config, "adapt": adapt}
        drafter = per_sequence(drafter) if adapt is None else drafter
        pipe = Pipeline(self.target.fork(), self.processor, drafter, self.name, **options)
        pipe.warm_up(1, _TOKENS)
        return pipe


class ModelCache:
    """LRU cache of loaded models, and their request queue.

    Args:
        capacity: maximum number of models in memory.
        mmproj: as for ``mmspec.load``, for GGUF models.
        options: ``device``, ``dtype`` and ``generation_config`` of ``mmspec.load``.

    Attributes:
        turns: request queue.
    """

    def __init__(self, capacity: int = 2, mmproj: Path | None = None, **options: str) -> None:
        self._mmproj = mmproj
        self._options: dict[str, Any] = {"device": "auto", "dtype": "auto", "generation_config": MODELS, **options}
        self._models = LRU[LoadedModel](capacity)
        self._threads = torch.get_num_threads()
        self.turns = RequestQueue()

    def get(self, name: str, *, keep: bool = False) -> LoadedModel:
        """Return a model, loading it if it is not cached. Raises ``UserError`` if it is not supported as a target."""
        if not name:
            raise UserError(f"choose a model: expected {', '.join(plugins.names('models'))}, a folder or a hub id")
        loaded = self._models.get(name, self._load, keep=keep)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if loaded.target.model.num_parameters() < SINGLE_THREADED else self._threads)
        return loaded

    def keep(self, name: str, method: str, adapt: AdaptOptions | None = None) -> Pipeline:
        """Return a method's pipeline, and exempt the pipeline and its model from eviction.

        With ``adapt``, the pipeline is separate and its drafter learns: races repeat requests, so their drafters must
        not learn.
        """
        loaded = self.get(name, keep=True)
        return loaded.pipeline(method, keep=True) if adapt is None else loaded.open(method, adapt)

    def _load(self, name: str) -> LoadedModel:
        mmproj = self._mmproj if file_in(plugins.model_path(name)) is not None else None
        pipe = open_pipeline(Console(stderr=True), model=name, drafter=None, warm_up=0, mmproj=mmproj, **self._options)
        return LoadedModel(pipe)
