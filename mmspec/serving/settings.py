"""What a server answers with, and whom: all that a process needs to build its application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.adaptation.options import AdaptOptions
from mmspec.errors import UserError
from mmspec.jobs import ranks
from mmspec.sampling.params import LIBRARY
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
        others: further drafters, which requests may name.
    """

    loading: Mapping[str, Any]
    limits: Limits
    access: Mapping[str, Any]
    prefix_cache: int = 0
    adapt: AdaptOptions | None = None
    others: Sequence[str] = ()

    def pipelines(self) -> dict[str, Pipeline]:
        """That of ``pipeline``, and one over its target for each further drafter, by names of their drafters.

        Raises:
            UserError: as for ``pipeline``, or two drafters have the same name.
        """
        from mmspec import plugins
        from mmspec.drafters.per_sequence import per_sequence
        from mmspec.drafters.registry import make_drafter
        from mmspec.pipeline import Pipeline

        options, home = self.loading, plugins.model_path(self.loading["model"])
        # Drafters first: a misspelt name must not wait for the loading of a large model.
        drafters = [per_sequence(make_drafter(name, home, options["trust_remote_code"])) for name in self.others]
        pipe = self.pipeline()
        common: dict[str, Any] = {"max_num_seqs": pipe.max_num_seqs, "generation_config": pipe.generation_config}
        pipes = [pipe, *(Pipeline(pipe.target, pipe.io, drafter, pipe.name, **common) for drafter in drafters)]
        for one in pipes[1:]:
            self._warm_up(one)
        names = [_label(*one) for one in zip((options["drafter"], *self.others), pipes, strict=True)]
        if len(set(names)) < len(names):
            raise UserError(f"drafters must have different names: got {', '.join(names)}")
        return dict(zip(names, pipes, strict=True))

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
        self._warm_up(pipe)
        return pipe

    def _warm_up(self, pipe: Pipeline) -> None:
        pipe.warm_up(self.limits.max_running, self.limits.max_model_len or None)
        pipe.calibrate()

    def defaults(self, pipe: Pipeline) -> str:
        """What requests have that set no sampling parameters, in one line; neutral values are left out."""
        values = {"temperature": LIBRARY["temperature"], **pipe.defaults.served}
        tokens = min(values.pop("max_new_tokens", self.limits.max_tokens), self.limits.max_tokens)
        shown = {name: value for name, value in values.items() if name == "temperature" or value != LIBRARY[name]}
        names = [f"{name} {value}" for name, value in shown.items()]
        return ", ".join([*names, f"max_tokens {tokens}", *pipe.defaults.others()])

    def app(self, pipes: Mapping[str, Pipeline], scrape: Callable[[], Awaitable[Collector]] | None = None) -> FastAPI:
        """The application of ``pipelines()``; see ``create_app``."""
        from mmspec.serving.app import create_app

        return create_app(next(iter(pipes.values())), self.limits, **self.access, drafters=pipes, scrape=scrape)


def _label(drafter: str, pipe: Pipeline) -> str:
    """What requests call a drafter that is chosen like this on the command line: not by a path."""
    from mmspec.drafters.registry import AUTO, PLAIN, registered_name

    if drafter == AUTO:
        return registered_name(pipe.drafter) or PLAIN
    return drafter.rstrip("/").rpartition("/")[2]
