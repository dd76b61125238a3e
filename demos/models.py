"""Cache of loaded models with their drafters; requests run one at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Generator, Iterator
from threading import RLock
from typing import Any, TypeVar

import torch
from rich.console import Console

from mmspec import plugins
from mmspec.cli.session import SINGLE_THREADED, drafter_name, open_pipeline
from mmspec.drafters.drafter import Drafter, lend
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.speculation.calibrate import cost_table
from mmspec.speculation.trace import Traced
from mmspec.targets.loading import make_drafter
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget

T = TypeVar("T")

_DRAFTERS = 4  # cached drafters per model


class LoadedModel:
    """One model with a cache of its drafters.

    A drafter that learns is copied for each request: otherwise one visitor's tokens would show up in another's draft
    trees, and repeated requests would be drafted from memory.

    Attributes:
        target, processor: of the model.
        name: what it was loaded by.
    """

    def __init__(self, target: TransformersTarget, processor: Processor, name: str) -> None:
        self.target, self.processor = target, processor
        self.name = name
        self._drafters: OrderedDict[str, tuple[Drafter | None, list[Pipeline]]] = OrderedDict()

    def pipeline(self, drafter: str) -> Pipeline:
        """A pipeline with a traced drafter and the adaptive budget of the last request.

        Args:
            drafter: as for ``mmspec.load``.

        Raises:
            UserError: the drafter is unknown, or made for another model.
        """
        cached, last = self._get_drafter(drafter)
        lent = lend(cached, self.target)
        pipe = Pipeline(self.target, self.processor, None if lent is None else Traced(lent), self.name)
        pipe.budget = last.pop().budget if last else None
        last.append(pipe)
        return pipe

    def plain_pipeline(self) -> Pipeline:
        """A plain decoding pipeline that shares the weights but not the caches, to run interleaved with another."""
        return Pipeline(self.target.fork(), self.processor, None, self.name)

    def drafter_label(self, drafter: str) -> str:
        """The registered name of a drafter, or "none"."""
        return drafter_name(self._get_drafter(drafter)[0]) or "none"

    def _get_drafter(self, name: str) -> tuple[Drafter | None, list[Pipeline]]:
        if name not in self._drafters:
            self._drafters[name] = make_drafter(name, str(self.target.model.config.name_or_path)), []
            while len(self._drafters) > _DRAFTERS:
                self._drafters.popitem(last=False)
        self._drafters.move_to_end(name)
        return self._drafters[name]


class ModelCache:
    """LRU cache of loaded models.

    Args:
        capacity: maximum number of models in memory.
        device, dtype: as for ``mmspec.load``.
    """

    def __init__(self, capacity: int = 2, device: str = "auto", dtype: str = "auto") -> None:
        self.capacity = capacity
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._threads = torch.get_num_threads()
        self._lock = RLock()  # a garbage-collected request is closed in any thread
        self._work: Generator[Any, None, None] | None = None  # the latest request's

    def __len__(self) -> int:
        return len(self._loaded)

    def get(self, name: str) -> LoadedModel:
        """Returns a model, loading it if it is not cached.

        Raises:
            UserError: the model does not exist or is not supported as a target.
        """
        if not name:
            raise UserError(f"choose a model: expected {', '.join(plugins.names('models'))}, a folder or a hub id")
        if name not in self._loaded:
            while len(self._loaded) >= self.capacity:
                self._loaded.popitem(last=False)
            pipe = open_pipeline(Console(stderr=True), model=name, drafter=None, **self._options)
            pipe.target.cost = cost_table(pipe.target)
            self._loaded[name] = LoadedModel(pipe.target, pipe.io, name)
        self._loaded.move_to_end(name)
        loaded = self._loaded[name]
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if loaded.target.model.num_parameters() < SINGLE_THREADED else self._threads)
        return loaded

    def one_at_a_time(self, work: Generator[T, None, None]) -> Iterator[T]:
        """Run a request's steps while no other request's steps run.

        The server runs requests one after the other, so that one which is unfinished when the next begins was
        cancelled: it is closed, which frees the model for the next.
        """
        with self._lock:
            if self._work is not None:
                self._work.close()
            self._work = work
        ended: Any = object()
        try:
            while True:
                with self._lock:
                    if self._work is not work:
                        return
                    result = next(work, ended)
                if result is ended:
                    return
                yield result
        finally:
            with self._lock:
                work.close()
