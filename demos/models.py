"""Loaded models with an engine per drafter: requests decode together, except for races."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from threading import Condition, RLock
from typing import Any, TypeVar

import torch
from rich.console import Console

from demos.methods import make_method
from mmspec import plugins
from mmspec.cli.session import SINGLE_THREADED, drafter_name, open_pipeline
from mmspec.drafters.per_sequence import per_sequence
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.speculation.calibrate import cost_table
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget

T = TypeVar("T")

RUNNING = 8
"""Requests that are answered at the same time; further ones wait."""

WAITING = 24
"""Requests that wait for their turn; further ones are rejected."""

_PIPELINES = 8  # cached pipelines per model
_POLL = 0.5  # seconds after which a request that waits for its turn can be cancelled


class LoadedModel:
    """One model with a cache of pipelines, one per method; see ``demos.methods``.

    A drafter that learns is copied for each sequence: otherwise one visitor's tokens would show up in another's draft
    trees, and repeated requests would be drafted from memory.

    Attributes:
        target, processor: of the model.
        name: what it was loaded by.
    """

    def __init__(self, target: TransformersTarget, processor: Processor, name: str) -> None:
        self.target, self.processor = target, processor
        self.name = name
        self._pipelines: OrderedDict[str, Pipeline] = OrderedDict()
        self._lock = RLock()

    def pipeline(self, method: str) -> Pipeline:
        """The pipeline of a method, made if it is not cached. Threads may share it.

        Raises:
            UserError: see ``make_method``.
        """
        with self._lock:
            return _cached(self._pipelines, method, _PIPELINES, self.open)

    def open(self, method: str) -> Pipeline:
        """A new pipeline; see ``pipeline``."""
        target = self.target.fork()
        drafter = per_sequence(make_method(method, str(self.target.model.config.name_or_path), target))
        return Pipeline(target, self.processor, drafter, self.name)


class ModelCache:
    """LRU cache of loaded models, and the order of requests to them.

    Args:
        capacity: maximum number of models in memory.
        device, dtype: as for ``mmspec.load``.
    """

    def __init__(self, capacity: int = 2, device: str = "auto", dtype: str = "auto") -> None:
        self.capacity = capacity
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._threads = torch.get_num_threads()
        self._lock = RLock()
        self._requests: list[list[bool]] = []  # in the order of arrival, whether each must run alone
        self._changed = Condition()  # on a re-entrant lock: a garbage-collected request ends in any thread

    def __len__(self) -> int:
        return len(self._loaded)

    def get(self, name: str) -> LoadedModel:
        """Returns a model, loading it if it is not cached.

        Raises:
            UserError: the model does not exist or is not supported as a target.
        """
        if not name:
            raise UserError(f"choose a model: expected {', '.join(plugins.names('models'))}, a folder or a hub id")
        with self._lock:
            loaded = _cached(self._loaded, name, self.capacity, self._load)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if loaded.target.model.num_parameters() < SINGLE_THREADED else self._threads)
        return loaded

    def _load(self, name: str) -> LoadedModel:
        pipe = open_pipeline(Console(stderr=True), model=name, drafter=None, **self._options)
        pipe.target.cost = cost_table(pipe.target)
        return LoadedModel(pipe.target, pipe.io, name)

    def in_turn(self, work: Iterator[T], waiting: Callable[[int], T], *, alone: bool = False) -> Iterator[T]:
        """Run a request together with others, or while no other runs.

        Requests that arrive after one that must run alone begin when it has ended.

        Args:
            work: the request's steps. Closing the iterator that is returned ends it.
            waiting: result for the number of requests ahead, yielded now and then until the request begins.

        Raises:
            UserError: too many requests wait already.
        """
        request = [alone]
        with self._changed:
            if len(self._requests) >= RUNNING + WAITING:
                raise UserError(f"the server is busy with {RUNNING + WAITING} requests: try again in a minute")
            self._requests.append(request)
        try:
            seconds = 0.0  # the place is known at once
            while (ahead := self._ahead(request, seconds)) is not None:
                yield waiting(ahead)
                seconds = _POLL
            yield from work
        finally:
            with self._changed:
                self._requests = [one for one in self._requests if one is not request]
                self._changed.notify_all()

    def _ahead(self, request: list[bool], seconds: float) -> int | None:
        """Number of requests before one that may not begin within ``seconds``; None if it may."""

        def earlier() -> list[list[bool]]:
            return self._requests[: next(place for place, one in enumerate(self._requests) if one is request)]

        def free() -> bool:
            before = earlier()
            return not before if request[0] else [True] not in before and len(before) < RUNNING

        with self._changed:
            return None if self._changed.wait_for(free, seconds) else len(earlier())


def label(pipe: Pipeline) -> str:
    """The registered name of a pipeline's drafter, or "none"."""
    return drafter_name(pipe.drafter) or "none"


def _cached(entries: OrderedDict[str, T], name: str, capacity: int, make: Callable[[str], T]) -> T:
    """An entry of an LRU cache. The oldest is dropped before a new one is made: both might not fit into memory."""
    if name not in entries:
        while len(entries) >= capacity:
            entries.popitem(last=False)
        entries[name] = make(name)
    entries.move_to_end(name)
    return entries[name]
