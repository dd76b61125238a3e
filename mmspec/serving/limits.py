"""Settings of a server: what it answers with, whom, its limits on requests, and its address.

Without torch or packages of servers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.adaptation.options import AdaptOptions
from mmspec.checks import Checked, option, whole
from mmspec.jobs import ranks

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client.registry import Collector

    from mmspec.pipeline import Pipeline

SPARE_REQUESTS = 64
"""Requests beside the running and waiting ones: they are read, refused, or ask for metrics."""


@dataclass(frozen=True)
class Limits(Checked):
    """Limits on requests; they are options of ``mmspec serve``."""

    max_running: int = option(8, whole(1), "Choices that decode at the same time.")
    max_waiting: int = option(32, whole(0), "Choices that wait for others; further requests get status 429.")
    max_body: int = option(32, whole(1), "MiB of a request's body and of a downloaded file.")
    max_characters: int = option(500_000, whole(1), "Characters of a request's prompts.")
    max_tokens: int = option(2048, whole(1), "Generated tokens of a choice, at most and by default.")
    max_model_len: int = option(0, whole(0), "Tokens of prompt and output together; 0 is the model's limit.")
    max_images: int = option(8, whole(0), "Images of a request.")
    max_videos: int = option(2, whole(0), "Videos of a request.")
    max_pixels: int = option(1 << 24, whole(1), "Pixels of an image or video frame.")
    frames: int = option(8, whole(1, 512), "Frames that are sampled from a video.")
    max_video_seconds: int = option(300, whole(1), "Duration of a video, in seconds.")
    max_stored: int = option(256, whole(0), "Responses that are kept for previous_response_id, for an hour.")
    request_timeout: int = option(0, whole(0), "Seconds after which a request ends with an error; 0 is no limit.")
    shutdown_timeout: int = option(3, whole(0), "Seconds that running requests have to end after SIGTERM.")

    @property
    def body_bytes(self) -> int:
        """Bytes of a body or a downloaded file."""
        return self.max_body << 20

    @property
    def requests(self) -> int:
        """Requests at a time, probes excepted."""
        return self.max_running + self.max_waiting + SPARE_REQUESTS


def is_loopback(host: str) -> bool:
    """Whether a host to listen on is reached from this machine only; False for names, which may resolve to any
    address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> set[str] | None:
    """Names by which requests may call a server that listens on ``host``, as in the Host header without its port; None
    for any, if it is not on a loopback address."""
    return {"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else None


def server_url(host: str, port: int) -> str:
    """Address of a server that listens on ``host``, without a path."""
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


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
        from mmspec.pipeline import Pipeline

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
