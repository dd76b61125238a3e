"""Loaded models with an engine per drafter, and their request queue: requests run together, races run alone."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, RLock
from typing import Any, TypeVar

import torch
from rich.console import Console

from mmspec import plugins
from mmspec.adaptation.options import AdaptOptions
from mmspec.cli.session import SINGLE_THREADED, open_pipeline
from mmspec.drafters.per_sequence import per_sequence
from mmspec.drafters.registry import make_drafter
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.defaults import MODELS
from mmspec.targets.gguf import file_in
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget

T = TypeVar("T")
RUNNING = 8
"""Requests that are answered at the same time; further requests wait."""

WAITING = 24
"""Requests that wait for their turn; further requests are rejected."""

_POLL = 0.5  # seconds between cancellation checks of queued requests


@dataclass(frozen=True, eq=False)
class QueuePlace:
    """A request's place in the queue.

    Attributes:
        alone: whether the request must run alone.
    """

    alone: bool = False


class RequestQueue:
    """FIFO queue of requests, which may run together or alone. Thread-safe.

    Requests after an exclusive request start when the exclusive request has ended.
    """

    def __init__(self) -> None:
        self._turns: list[QueuePlace] = []  # running or waiting
        self._changed = Condition()  # re-entrant lock: garbage collection may end a request in any thread

    def join(self, count: int = 1, *, alone: bool = False) -> list[QueuePlace]:
        """Append ``count`` turns to the queue.

        Raises:
            UserError: the queue is full.
        """
        with self._changed:
            if len(self._turns) + count > RUNNING + WAITING:
                raise UserError(f"the server is busy with {RUNNING + WAITING} requests: try again in a minute")
            joined = [QueuePlace(alone) for _ in range(count)]
            self._turns += joined
            return joined

    def ahead(self, turn: QueuePlace, seconds: float = 0.0) -> int | None:
        """Wait up to ``seconds`` for a turn; returns the number of requests ahead, None if the request may start."""

        def earlier() -> list[QueuePlace]:
            turns = list(self._turns)  # garbage collection here may call ``leave`` in this thread
            return turns[: turns.index(turn)]

        def free() -> bool:
            before = earlier()
            return not before if turn.alone else len(before) < RUNNING and not any(other.alone for other in before)

        with self._changed:
            return None if self._changed.wait_for(free, seconds) else len(earlier())

    def leave(self, turns: Iterable[QueuePlace]) -> None:
        """Remove turns of requests that have ended or stopped waiting."""
        with self._changed:
            for turn in turns:
                self._turns.remove(turn)
            self._changed.notify_all()

    def run(self, work: Iterator[T], waiting: Callable[[int], T], *, alone: bool = False) -> Iterator[T]:
        """Run a request, together with others or alone.

        Args:
            work: the request's steps, closed with the returned iterator.
            waiting: result for the number of requests ahead, yielded periodically until the request starts.

        Raises:
            UserError: see ``join``.
        """
        joined = self.join(alone=alone)
        try:
            seconds = 0.0  # report the place immediately
            while (ahead := self.ahead(joined[0], seconds)) is not None:
                yield waiting(ahead)
                seconds = _POLL
            yield from work
        finally:
            self.leave(joined)


_PIPELINES = 8  # cached pipelines per model
_TOKENS = 2048  # KV cache tokens that each reserves on a GPU


class LoadedModel:
    """One model with a cache of pipelines, one per method; see ``mmspec.demos.catalog``.

    A learning drafter is copied for each sequence: otherwise one visitor's tokens would appear in another visitor's
    draft trees, and repeated requests would be drafted from memory.

    Attributes:
        target, processor: the model's target and processor.
        name: hub id or folder it was loaded from.
        generation_config: as for ``mmspec.load``.
        kept: the method whose pipeline is never evicted; None for no method.
    """

    def __init__(
        self, target: TransformersTarget, processor: Processor, name: str, generation_config: str = MODELS
    ) -> None:
        self.target, self.processor = target, processor
        self.name = name
        self.generation_config = generation_config
        self.kept: str | None = None
        self._pipelines: OrderedDict[str, Pipeline] = OrderedDict()
        self._lock = RLock()

    @property
    def one_image(self) -> bool:
        """Whether the model is LLaVA-1.5 (arXiv 2310.03744) or LLaVA-NeXT, trained with one image per prompt."""
        return self.target.model.config.model_type in ("llava", "llava_next")

    def pipeline(self, method: str) -> Pipeline:
        """The cached or new pipeline of a method. Thread-safe.

        Raises:
            UserError: the drafter is unknown, made for another model, or does not draft chains.
        """
        with self._lock:
            return _cached(self._pipelines, method, _PIPELINES, self.open, self.kept)

    def open(self, method: str, adapt: AdaptOptions | None = None) -> Pipeline:
        """Create a pipeline; see ``pipeline``. With ``adapt``, the drafter learns from all sequences."""
        drafter = make_drafter(method, str(self.target.model.config.name_or_path))
        if adapt is None:
            drafter = per_sequence(drafter)
        options: dict[str, Any] = {"generation_config": self.generation_config, "adapt": adapt}
        pipe = Pipeline(self.target.fork(), self.processor, drafter, self.name, **options)
        pipe.warm_up(1, _TOKENS)
        return pipe


class ModelCache:
    """LRU cache of loaded models, and their request queue.

    Args:
        capacity: maximum number of models in memory.
        device, dtype, generation_config: as for ``mmspec.load``.
        mmproj: as for ``mmspec.load``, for GGUF models.

    Attributes:
        turns: request queue.
        kept: the model that is never evicted; None for no model.
    """

    def __init__(
        self,
        capacity: int = 2,
        device: str = "auto",
        dtype: str = "auto",
        generation_config: str = MODELS,
        mmproj: Path | None = None,
    ) -> None:
        self.capacity, self._mmproj = capacity, mmproj
        self._options: dict[str, Any] = {"device": device, "dtype": dtype, "generation_config": generation_config}
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._threads = torch.get_num_threads()
        self._lock = RLock()
        self.turns = RequestQueue()
        self.kept: str | None = None

    def __len__(self) -> int:
        return len(self._loaded)

    def get(self, name: str) -> LoadedModel:
        """Return a model, loading it if it is not cached.

        Raises:
            UserError: the model does not exist or is not supported as a target.
        """
        if not name:
            raise UserError(f"choose a model: expected {', '.join(plugins.names('models'))}, a folder or a hub id")
        with self._lock:
            loaded = _cached(self._loaded, name, self.capacity, self._load, self.kept)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if loaded.target.model.num_parameters() < SINGLE_THREADED else self._threads)
        return loaded

    def keep(self, name: str, method: str, adapt: AdaptOptions | None = None) -> Pipeline:
        """Return a method's pipeline, and exempt the pipeline and its model from eviction.

        Args:
            adapt: return a separate pipeline with a learning drafter instead. Races repeat requests, so their drafters
                must not learn.

        Raises:
            UserError: see ``get`` and ``LoadedModel.pipeline``.
        """
        self.kept = name
        loaded = self.get(name)
        if adapt is not None:
            return loaded.open(method, adapt)
        loaded.kept = method
        return loaded.pipeline(method)

    def _load(self, name: str) -> LoadedModel:
        mmproj = self._mmproj if file_in(plugins.model_path(name)) is not None else None
        pipe = open_pipeline(Console(stderr=True), model=name, drafter=None, warm_up=0, mmproj=mmproj, **self._options)
        return LoadedModel(pipe.target, pipe.io, name, pipe.generation_config)


def _cached(
    entries: OrderedDict[str, T], name: str, capacity: int, make: Callable[[str], T], kept: str | None = None
) -> T:
    """Get or create an entry of an LRU cache.

    The oldest entry except ``kept`` is dropped before a new entry is made: both might not fit into memory.
    """
    if name not in entries:
        while len(entries) >= capacity:
            del entries[next(entry for entry in entries if entry != kept)]
        entries[name] = make(name)
    entries.move_to_end(name)
    return entries[name]
