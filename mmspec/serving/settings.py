"""Server settings: everything a process needs to build the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.adaptation import AdaptOptions
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
    """Settings of a server; can be pickled for other processes.

    Attributes:
        loading: keywords of ``open_pipeline`` named in ``LOADING``.
        limits: as for ``create_app``.
        access: keywords of ``create_app``: ``api_key``, ``hosts``, ``origins``, ``names``, ``tool_parser`` and
            ``allow_urls``.
        prefix_cache: memory of the prefix cache, in MiB.
        adapt: drafters learn from all requests; None copies learning drafters for each sequence.
        others: additional drafters that requests may select.
    """

    loading: Mapping[str, Any]
    limits: Limits
    access: Mapping[str, Any]
    prefix_cache: int = 0
    adapt: AdaptOptions | None = None
    others: Sequence[str] = ()

    def pipelines(self) -> dict[str, Pipeline]:
        """Load one pipeline per drafter, by drafter name; all share one target.

        Raises:
            UserError: as for ``pipeline``, or two drafters have the same name.
        """
        from mmspec import plugins
        from mmspec.drafters.registry import make_drafter
        from mmspec.drafters.union import per_sequence
        from mmspec.pipeline import Pipeline

        options, home = self.loading, plugins.model_path(self.loading["model"])
        # Check drafters first: a misspelt name must fail before a large model is loaded.
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
        """Load the model and reserve memory for its sequences.

        Raises:
            UserError: see ``mmspec.load``.
        """
        from rich.console import Console

        from mmspec import plugins
        from mmspec.cli.session import open_pipeline
        from mmspec.drafters.registry import make_drafter
        from mmspec.drafters.union import per_sequence
        from mmspec.ops.cpu import give_back_freed_memory

        give_back_freed_memory()
        options, home = dict(self.loading), plugins.model_path(self.loading["model"])
        drafter = make_drafter(options["drafter"], home, options.get("trust_remote_code", False))
        options["drafter"] = per_sequence(drafter) if self.adapt is None else drafter
        options |= {"tp_plan": "auto" if ranks() > 1 else None, "adapt": self.adapt or False, "warm_up": 0}
        options |= {"max_num_seqs": self.limits.max_running, "prefix_cache": self.prefix_cache << 20}
        pipe = open_pipeline(Console(stderr=True), **options)
        self._warm_up(pipe)
        return pipe

    def _warm_up(self, pipe: Pipeline) -> None:
        pipe.warm_up(self.limits.max_running, self.limits.max_model_len or None)

    def defaults(self, pipe: Pipeline) -> str:
        """Default sampling parameters in one line, neutral values left out."""
        values = {"temperature": LIBRARY["temperature"], **pipe.defaults.served}
        tokens = min(values.pop("max_new_tokens", self.limits.max_tokens), self.limits.max_tokens)
        shown = {name: value for name, value in values.items() if name == "temperature" or value != LIBRARY[name]}
        names = [f"{name} {value}" for name, value in shown.items()]
        return ", ".join([*names, f"max_tokens {tokens}", *pipe.defaults.others()])

    def app(self, pipes: Mapping[str, Pipeline], scrape: Callable[[], Awaitable[Collector]] | None = None) -> FastAPI:
        """Build the application over ``pipelines()``; see ``create_app``."""
        from mmspec.serving.app import create_app

        return create_app(next(iter(pipes.values())), self.limits, **self.access, drafters=pipes, scrape=scrape)


def _label(drafter: str, pipe: Pipeline) -> str:
    """Name of a command-line drafter in requests: the registered name for ``auto``, the last component of a path."""
    from mmspec.drafters.registry import AUTO, PLAIN, registered_name

    if drafter == AUTO:
        return registered_name(pipe.drafter) or PLAIN
    return drafter.rstrip("/").rpartition("/")[2]
