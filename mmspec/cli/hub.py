"""Models named by hub id, on machines that cannot reach the hub."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from mmspec import plugins
from mmspec.loading import is_path

_PATIENCE = 3.0  # seconds


def is_on_hub(model: str) -> bool:
    """Whether a model's name is neither an embedded one nor a local path."""
    return model not in plugins.names("models") and not is_path(model)


def fail_fast_offline() -> None:
    """Switch to offline mode when the hub cannot be reached: files of the local cache load at once, all else fails at
    once, instead of after half a minute of retries. A proxy is left to do what it does."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies() or os.environ.get("MMSPEC_DEBUG"):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_PATIENCE).close()
    except (OSError, UnicodeError):
        constants.HF_HUB_OFFLINE = True
