"""Loaded models with an engine per drafter, and their request queue: requests run together, races run alone."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
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
from mmspec.serving.middleware import RequestQueue
from mmspec.targets.gguf_file import file_in

T = TypeVar("T")
RUNNING = 8  # requests that are answered at the same time; further requests wait
WAITING = 24  # requests that wait for their turn; further requests are rejected
_PIPELINES = 8  # cached pipelines per model
_TOKENS = 2048  # KV cache tokens that each reserves on a GPU


class LRU(Generic[T]):
    """Cache of named objects, with at most ``capacity`` objects. Thread-safe. The oldest object is dropped before a new
    object is made: both might not fit into memory."""

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
    """One model, and a pipeline per method; see ``mmspec.demos.catalog``.

    A learning drafter is copied for each sequence: otherwise one visitor's tokens would appear in another visitor's
    draft trees, and repeated requests would be drafted from memory.
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
        return self._pipelines.get(method, self.open, keep=keep)

    def open(self, method: str, adapt: AdaptOptions | None = None) -> Pipeline:
        """A new pipeline, see ``pipeline``. With ``adapt``, the drafter learns from all sequences."""
        drafter = make_drafter(method, str(self.target.model.config.name_or_path))
        options: dict[str, Any] = {"generation_config": self._loaded.generation_config, "adapt": adapt}
        drafter = per_sequence(drafter) if adapt is None else drafter
        pipe = Pipeline(self.target.fork(), self.processor, drafter, self.name, **options)
        pipe.warm_up(1, _TOKENS)
        return pipe


class ModelCache:
    """LRU cache of loaded models, and their request queue (``turns``); options are those of ``mmspec.load``."""

    def __init__(self, capacity: int = 2, mmproj: Path | None = None, **options: str) -> None:
        self._mmproj = mmproj
        self._options: dict[str, Any] = {"device": "auto", "dtype": "auto", "generation_config": MODELS, **options}
        self._models = LRU[LoadedModel](capacity)
        self._threads = torch.get_num_threads()
        self.turns = RequestQueue(RUNNING, WAITING)

    def get(self, name: str, *, keep: bool = False) -> LoadedModel:
        """A cached or new model. Raises ``UserError`` if it is not supported as a target."""
        if not name:
            raise UserError(f"choose a model: expected {', '.join(plugins.names('models'))}, a folder or a hub id")
        loaded = self._models.get(name, self._load, keep=keep)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if loaded.target.model.num_parameters() < SINGLE_THREADED else self._threads)
        return loaded

    def keep(self, name: str, method: str, adapt: AdaptOptions | None = None) -> Pipeline:
        """A method's pipeline, exempt from eviction with its model. With ``adapt``, the pipeline is separate and its
        drafter learns: races repeat requests, so their drafters must not learn."""
        loaded = self.get(name, keep=True)
        return loaded.pipeline(method, keep=True) if adapt is None else loaded.open(method, adapt)

    def _load(self, name: str) -> LoadedModel:
        mmproj = self._mmproj if file_in(plugins.model_path(name)) is not None else None
        pipe = open_pipeline(Console(stderr=True), model=name, drafter=None, warm_up=0, mmproj=mmproj, **self._options)
        return LoadedModel(pipe)
