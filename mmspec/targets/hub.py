"""Hub ids: detection, and loading from the local cache if the hub cannot be reached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from mmspec import plugins
from mmspec.errors import UserError

_TIMEOUT = 5.0  # seconds


def is_path(name: str) -> bool:
    """Whether a name is a path; hub ids are ``name`` or ``owner/name`` and never end as GGUF files do."""
    is_written_so = not name or name.startswith((".", "/", "~")) or name.lower().endswith(".gguf")
    return is_written_so or name.count("/") > 1 or os.path.exists(name)


def is_on_hub(name: str) -> bool:
    """Whether a name is neither an embedded model nor a local path."""
    return name not in plugins.names("models") and not is_path(name)


@contextmanager
def cache_if_offline(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """Options of ``from_pretrained``: restrict to the local cache if ``name`` is a hub id and the hub is unreachable.

    Without these options transformers retries for half a minute per missing file.

    Args:
        kind: ``"model"``, ``"drafter"`` or ``"assistant"``, for the message.
        name: hub id, folder or file.

    Raises:
        UserError: the path does not exist, or the hub cannot be reached and a file is not cached.
    """
    expected = f"{plugins.expected_models(name)}, a local folder, a GGUF file or a reachable hub id"
    expected = f"cannot load {kind} {name!r}: expected {expected}; there is no such folder or file"
    if is_path(name) and not os.path.exists(name):
        raise UserError(expected)
    reason = _obstacle() if is_on_hub(name) else None
    try:
        yield {"local_files_only": True} if reason else {}
    except OSError as error:
        if reason is None:
            raise
        raise UserError(f"{expected}, the local cache of the hub lacks it, and {reason}") from error


def _obstacle() -> str | None:
    """Reason why the hub is unreachable; None if it answers with any status."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # the type depends on the HTTP library of this release of huggingface_hub
        return f"the network or the hub ({constants.ENDPOINT}) cannot be reached"
    return None
