"""Request limits and listening address of the server. Imports neither torch nor the server packages."""

from __future__ import annotations

import ipaddress
from typing import Literal

from mmspec.validation import option, options

SPARE_REQUESTS = 64
"""Further requests in addition to running and waiting requests: they are read, refused, or ask for metrics."""


@options
class Limits:
    """Request limits and log level: options of ``mmspec serve``."""

    max_running: int = option(8, "Choices that decode at the same time.", ge=1)
    max_waiting: int = option(32, "Choices that wait for others; further requests get status 429.", ge=0)
    max_body: int = option(32, "MiB of a request's body and of a downloaded file.", ge=1)
    max_characters: int = option(500_000, "Characters of a request's prompts.", ge=1)
    max_tokens: int = option(2048, "Generated tokens of a choice, at most and by default.", ge=1)
    max_draft_tokens: int = option(64, "Draft tokens per step that a request may ask for.", ge=0, le=512)
    fixed_speculation: bool = option(False, "Refuse the fields speculative and num_draft_tokens of requests.")
    max_model_len: int = option(0, "Tokens of prompt and output together; 0 is the model's limit.", ge=0)
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


def is_loopback(host: str) -> bool:
    """Whether a listening host is a loopback address; False for names, which may resolve to any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> set[str] | None:
    """Accepted Host header values, without ports, of a server listening on ``host``; None accepts all (``host`` is not
    a loopback address)."""
    return {"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else None


def server_url(host: str, port: int) -> str:
    """URL of a server listening on ``host``, without a path."""
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"
