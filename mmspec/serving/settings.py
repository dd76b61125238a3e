"""Settings of a server: request limits, listening address, and everything a process needs to build the application.

Imports neither torch nor the server packages.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from mmspec.adaptation import AdaptOptions
from mmspec.cli.options import LoadOptions
from mmspec.errors import UserError, shown
from mmspec.jobs import ranks
from mmspec.sampling.params import LIBRARY
from mmspec.validation import check, inherited, option, options

if TYPE_CHECKING:
    from mmspec.pipeline import Pipeline


SPARE_REQUESTS = 64
"""Further requests in addition to running and waiting requests: they are read, refused, or ask for metrics."""


@options
class Limits:
    """Request limits and log level: options of ``mmspec serve``."""

    max_running: int = option(8, "Choices that decode at the same time.", ge=1)
    max_waiting: int = option(32, "Choices that wait for others; further requests get status 429.", ge=0)
    max_body: int = option(32, "MiB of a request's body and of a downloaded file.", ge=1)
    max_characters: int = option(500_000, "Characters of a request's prompts.", ge=1)
    max_tokens: int = option(2048, "Generated tokens of a choice, at most; by default the model's or 256.", ge=1)
    max_draft_tokens: int = option(64, "Draft tokens per step that a request may ask for.", ge=0, le=512)
    fixed_speculation: bool = option(False, "Refuse the fields speculative and num_draft_tokens of requests.")
    max_model_len: int = inherited(LoadOptions, "max_model_len")
    max_images: int = option(8, "Images of a request.", ge=0)
    max_videos: int = option(2, "Videos of a request.", ge=0)
    max_pixels: int = option(1 << 24, "Pixels of an image or video frame.", ge=1)
    frames: int = option(8, "Frames that are sampled from a video.", ge=1, le=512)
    max_video_seconds: int = option(300, "Duration of a video, in seconds.", ge=1)
    max_stored: int = option(256, "Responses that are kept for previous_response_id, for an hour.", ge=0)
    request_timeout: int = option(0, "Seconds after which a request ends with an error; 0 is no limit.", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Of the log on standard error.")
    shutdown_timeout: int = option(3, "Seconds that running requests have to end after SIGTERM.", ge=0)

    def context_limit(self, model: int | None) -> int | None:
        """Maximum tokens of prompt and output together, for a model with this limit of its own."""
        return min((limit for limit in (self.max_model_len, model) if limit), default=None)

    @property
    def body_bytes(self) -> int:
        """Maximum bytes of a request body or a downloaded file."""
        return self.max_body << 20

    @property
    def requests(self) -> int:
        """Maximum concurrent requests, probes excluded."""
        return self.max_running + self.max_waiting + SPARE_REQUESTS


@options
class ServeOptions:
    """Further options of ``mmspec serve``."""

    allow_urls: bool = option(False, "Download images and videos of requests from public addresses.")
    prefix_cache: int = option(2048, "Memory for the states of earlier prompts; 0 computes every prompt.", ge=0)
    prefix_cache_dir: Path | None = option(None, "Save these states in this folder, for later servers too.")
    prefix_cache_size: int = option(8192, "Limit on the size of --prefix-cache-dir.", ge=1)
    engine: Literal["local", "ray"] = option("local", "local: this process; ray: replicas on Ray Serve.")
    replicas: int = option(1, "With --engine ray.", ge=1)
    replica_gpus: int = option(1, "GPUs per replica on Ray; --device-map auto spreads the model over them.", ge=1)


_METHODS = {
    **{name: name for name in ("ngram", "suffix", "mtp")},
    **dict.fromkeys(("eagle", "eagle3", "medusa", "dflash"), "{model}"),
    "draft_model": "small:{model}",
}
"""Drafters by vLLM's methods."""


def drafter_of(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """The drafter and the number of draft tokens of vLLM's ``--speculative-config``. Raises ``UserError``: a field or a
    method is unknown, or of another type."""
    known = ("method", "model", "num_speculative_tokens")
    if unknown := config.keys() - set(known):
        raise UserError(f"--speculative-config has the fields {', '.join(known)}: got {', '.join(sorted(unknown))}")
    method, model, count = map(config.get, known)
    if not isinstance(method, str) or (drafter := _METHODS.get(method)) is None:
        raise UserError(f"method must be one of {', '.join(_METHODS)}: got {shown(method)}")
    if not isinstance(model, str if "{model}" in drafter else NoneType):
        raise UserError(f"the method {method} needs {'a' if '{model}' in drafter else 'no'} model: got {shown(model)}")
    return drafter.format(model=model), check("num_speculative_tokens", PositiveInt | None, count)


def is_loopback(host: str) -> bool:
    """Whether a listening host is a loopback address; False for names, which may resolve to any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_names(host: str) -> set[str] | None:
    """Accepted Host header values, without ports, of a server listening on ``host``; None accepts all (``host`` is not
    a loopback address)."""
    return {"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else None


def server_url(host: str, port: int) -> str:
    """URL of a server listening on ``host``, without a path."""
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server; can be pickled for other processes.

    Attributes:
        loading: keywords of ``open_pipeline``: those named in ``LOADING``, ``adapters``, ``prefix_cache``, ...
        access: keywords of ``create_app``: ``api_key``, ``hosts``, ``origins``, ``names``, ``allow_urls``, ...
        adapt: drafters learn from all requests; None copies learning drafters for each sequence.
    """

    loading: Mapping[str, Any]
    limits: Limits
    access: Mapping[str, Any]
    adapt: AdaptOptions | None = None
    others: Sequence[str] = ()

    def pipelines(self) -> dict[str, Pipeline]:
        """Load the model, and reserve memory for its sequences: a pipeline per drafter, by name, all on one target.
        Raises ``UserError``: see ``mmspec.load``; or two drafters have the same name."""
        from rich.console import Console

        from mmspec import plugins
        from mmspec.cli.session import open_pipeline
        from mmspec.drafters.registry import make_drafter
        from mmspec.drafters.union import per_sequence
        from mmspec.ops.cpu import give_back_freed_memory
        from mmspec.pipeline import Pipeline

        give_back_freed_memory()
        options, home = dict(self.loading), plugins.model_path(self.loading["model"])
        names = [options["drafter"], *self.others]
        # Drafters first: a misspelt name must fail before a large model is loaded.
        drafters = [make_drafter(name, home, options.get("trust_remote_code", False)) for name in names]
        first, *others = drafters if self.adapt is not None else map(per_sequence, drafters)
        options |= {"tp_plan": "auto" if ranks() > 1 else None, "adapt": self.adapt or False, "warm_up": 0}
        options |= {"max_num_seqs": self.limits.max_running, "drafter": first}
        pipe = open_pipeline(Console(stderr=True), **options)
        common: dict[str, Any] = {"max_num_seqs": pipe.max_num_seqs, "generation_config": pipe.generation_config}
        pipes = [pipe, *(Pipeline(pipe.target, pipe.processor, drafter, pipe.name, **common) for drafter in others)]
        for one in pipes:
            one.warm_up(self.limits.max_running, self.limits.max_model_len or None)
        names = [_label(*one) for one in zip(names, pipes, strict=True)]
        if len(set(names)) < len(names):
            raise UserError(f"drafters must have different names: got {', '.join(names)}")
        return dict(zip(names, pipes, strict=True))

    def defaults(self, pipe: Pipeline) -> str:
        """Default sampling parameters in one line, neutral values left out."""
        values = {"temperature": LIBRARY["temperature"], **pipe.defaults.served}
        tokens = min(values.pop("max_new_tokens", self.limits.max_tokens), self.limits.max_tokens)
        shown = {name: value for name, value in values.items() if name == "temperature" or value != LIBRARY[name]}
        names = [f"{name} {value}" for name, value in shown.items()]
        return ", ".join([*names, f"max_tokens {tokens}", *pipe.defaults.others()])


def _label(drafter: str, pipe: Pipeline) -> str:
    """Name of a command-line drafter in requests: the registered name for ``auto``, the last component of a path."""
    from mmspec.drafters.registry import AUTO, PLAIN, registered_name

    if drafter == AUTO:
        return registered_name(pipe.drafter) or PLAIN
    return drafter.rstrip("/").rpartition("/")[2]
