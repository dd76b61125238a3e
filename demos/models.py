"""Models in memory: each read once, a few at a time, and one request at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Generator, Iterator
from threading import RLock
from typing import Any, TypeVar

import torch
from rich.console import Console

from mmspec import plugins
from mmspec.budget import AdaptiveBudget
from mmspec.calibrate import cost_table
from mmspec.cli.session import SINGLE_THREADED, drafter_name, open_pipeline
from mmspec.drafter import Drafter, lend
from mmspec.errors import UserError
from mmspec.loading import make_drafter
from mmspec.pipeline import Pipeline
from mmspec.trace import Traced
from mmspec.transformers_target import TransformersTarget

T = TypeVar("T")

_DRAFTERS = 4  # per model, kept beside it


class Loaded:
    """One model with the drafters that were asked for.

    Every request drafts with a copy of a drafter that learns: it would otherwise show one visitor's words in another's
    trees, and would know a repeated request by heart.

    Attributes:
        target: the model.
    """

    def __init__(self, target: TransformersTarget, name: str) -> None:
        self.target = target
        self.name = name
        self._drafters: OrderedDict[str, tuple[Drafter | None, dict[int, AdaptiveBudget]]] = OrderedDict()

    def pipeline(self, drafter: str) -> Pipeline:
        """The model with a traced drafter, and with what is known of the tree sizes that pay.

        Args:
            drafter: as for ``mmspec.load``.

        Raises:
            UserError: no such drafter, or one of another model.
        """
        kept, budgets = self._drafter(drafter)
        lent = lend(kept, self.target)
        pipe = Pipeline(self.target, None if lent is None else Traced(lent), self.name)
        pipe.budgets = budgets
        return pipe

    def rival(self) -> Pipeline:
        """Plain decoding of the same weights, with caches of its own: it can be under way beside the other."""
        target = type(self.target)(self.target.model, self.target.processor)
        target.cost = self.target.cost
        return Pipeline(target, None, self.name)

    def label(self, drafter: str) -> str:
        """The registered name of what ``drafter`` stands for, or "none"."""
        return drafter_name(self._drafter(drafter)[0]) or "none"

    def _drafter(self, name: str) -> tuple[Drafter | None, dict[int, AdaptiveBudget]]:
        if name not in self._drafters:
            self._drafters[name] = make_drafter(name, str(self.target.model.config.name_or_path)), {}
            while len(self._drafters) > _DRAFTERS:
                self._drafters.popitem(last=False)
        self._drafters.move_to_end(name)
        return self._drafters[name]


class Models:
    """The models that are in memory, the least recently used one given up first.

    Args:
        keep: how many.
        device, dtype: as for ``mmspec.load``.
    """

    def __init__(self, keep: int = 2, device: str = "auto", dtype: str = "auto") -> None:
        self.keep = keep
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._threads = torch.get_num_threads()
        self._lock = RLock()  # a collected request ends its work in whatever thread collects it
        self._work: Generator[Any, None, None] | None = None  # of the latest request

    def __len__(self) -> int:
        return len(self._loaded)

    def get(self, name: str) -> Loaded:
        """A model, from memory where it is there.

        Raises:
            UserError: there is none of this name, or it cannot be a target.
        """
        if not name:
            raise UserError(f"choose a model: expected {', '.join(plugins.names('models'))}, a folder or a hub id")
        if name not in self._loaded:
            while len(self._loaded) >= self.keep:
                self._loaded.popitem(last=False)
            target = open_pipeline(Console(stderr=True), model=name, drafter=None, **self._options).target
            target.cost = cost_table(target)
            self._loaded[name] = Loaded(target, name)
        self._loaded.move_to_end(name)
        loaded = self._loaded[name]
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if loaded.target.model.num_parameters() < SINGLE_THREADED else self._threads)
        return loaded

    def one_at_a_time(self, work: Generator[T, None, None]) -> Iterator[T]:
        """Run a request's steps while no other request's are run.

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
