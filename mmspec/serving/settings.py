"""What a server answers with, and whom: all that a process needs to build its application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.adaptation.options import AdaptOptions
from mmspec.jobs import ranks
from mmspec.serving.limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client.registry import Collector

    from mmspec.pipeline import Pipeline


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, which can be pickled for other processes.

    Attributes:
        loading: keywords of ``open_pipeline`` named in ``LOADING``.
        limits: as for ``create_app``.
        access: its keywords ``api_key``, ``hosts``, ``origins``, ``names``, ``tool_parser`` and ``allow_urls``.
        prefix_cache: memory for the states of earlier prompts, in MiB.
        adapt: drafters learn from all requests; None copies learning drafters for each sequence.
    """

    loading: Mapping[str, Any]
    limits: Limits
    access: Mapping[str, Any]
    prefix_cache: int = 0
    adapt: AdaptOptions | None = None

    def pipeline(self) -> Pipeline:
        """Load the model, reserve memory for its sequences and measure the cost of its verify passes.

        Raises:
            UserError: see ``mmspec.load``.
        """
        from rich.console import Console

        from mmspec.cli.session import open_pipeline
        from mmspec.drafters.per_sequence import per_sequence
        from mmspec.ops.cpu import give_back_freed_memory
        from mmspec.pipeline import Pipeline

        give_back_freed_memory()
        loading = {**self.loading, "tp_plan": "auto" if ranks() > 1 else None}
        serving: dict[str, Any] = {"max_num_seqs": self.limits.max_running, "prefix_cache": self.prefix_cache << 20}
        if self.adapt is not None:
            pipe = open_pipeline(Console(stderr=True), **loading, **serving, adapt=self.adapt, warm_up=0)
        else:
            loaded = open_pipeline(Console(stderr=True), **loading, warm_up=0)
            serving["generation_config"] = self.loading["generation_config"]
            pipe = Pipeline(loaded.target, loaded.io, per_sequence(loaded.drafter), loaded.name, **serving)
        pipe.warm_up(self.limits.max_running, self.limits.max_model_len or None)
        pipe.calibrate()
        return pipe

    def defaults(self, pipe: Pipeline) -> str:
        """What requests have that set no sampling parameters, in one line; neutral values are left out."""
        from mmspec.sampling.params import LIBRARY

        values = {**pipe.defaults.served}
        tokens = min(values.pop("max_new_tokens", self.limits.max_tokens), self.limits.max_tokens)
        shown = {name: value for name, value in values.items() if name == "temperature" or value != LIBRARY[name]}
        names = [f"{name} {value}" for name, value in shown.items()]
        return ", ".join([*names, f"max_tokens {tokens}", *pipe.defaults.others()])

    def app(self, pipe: Pipeline, scrape: Callable[[], Awaitable[Collector]] | None = None) -> FastAPI:
        """The application; see ``create_app``."""
        from mmspec.serving.app import create_app

        return create_app(pipe, self.limits, **self.access, scrape=scrape)
