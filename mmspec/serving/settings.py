"""What a server answers with, and whom: all that a process needs to build its application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.adaptation.options import AdaptOptions
from mmspec.jobs import ranks
from mmspec.serving.limits import Limits

if TYPE_CHECKING:  # a process that only deploys replicas needs no torch
    from fastapi import FastAPI
    from prometheus_client.registry import Collector

    from mmspec.pipeline import Pipeline


@dataclass(frozen=True)
class Settings:
    """Settings of a server, which can be pickled for other processes.

    Attributes:
        model, drafter, device, dtype, trust_remote_code, generation_config, device_map: as for ``open_pipeline``.
        prefix_cache: memory for the states of earlier prompts, in MiB.
        api_key, hosts, origins, allow_urls: as for ``create_app``.
        served_model_name, tool_parser: its ``names`` and ``tool_parser``.
        adapt: drafters learn from all requests; None copies those that learn for each sequence.
    """

    model: str
    drafter: str
    device: str
    dtype: str
    trust_remote_code: bool
    generation_config: str
    prefix_cache: int
    limits: Limits
    api_key: str | None
    hosts: Collection[str] | None
    origins: Sequence[str]
    allow_urls: bool
    served_model_name: Sequence[str] = ()
    tool_parser: str = "auto"
    adapt: AdaptOptions | None = None
    device_map: Any = None

    def pipeline(self) -> Pipeline:
        """Load the model, and measure the cost of its verify passes.

        Raises:
            UserError: see ``mmspec.load``.
        """
        from rich.console import Console

        from mmspec.cli.options import LOADING
        from mmspec.cli.session import open_pipeline
        from mmspec.drafters.per_sequence import per_sequence
        from mmspec.pipeline import Pipeline

        loading: dict[str, Any] = {name: getattr(self, name) for name in LOADING}
        serving: dict[str, Any] = {"max_num_seqs": self.limits.max_running, "prefix_cache": self.prefix_cache << 20}
        loading["tp_plan"] = "auto" if ranks() > 1 else None
        if self.adapt is not None:
            pipe = open_pipeline(Console(stderr=True), **loading, **serving, adapt=self.adapt)
        else:
            loaded = open_pipeline(Console(stderr=True), **loading)
            serving["generation_config"] = self.generation_config
            pipe = Pipeline(loaded.target, loaded.io, per_sequence(loaded.drafter), loaded.name, **serving)
        pipe.calibrate()
        return pipe

    def app(self, pipe: Pipeline, scrape: Callable[[], Awaitable[Collector]] | None = None) -> FastAPI:
        """The application; see ``create_app``."""
        from mmspec.serving.app import create_app

        return create_app(
            pipe,
            self.limits,
            api_key=self.api_key,
            hosts=self.hosts,
            origins=self.origins,
            allow_urls=self.allow_urls,
            names=self.served_model_name,
            tool_parser=self.tool_parser,
            scrape=scrape,
        )
