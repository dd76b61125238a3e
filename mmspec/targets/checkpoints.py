"""Checkpoints in local folders or on the hub, or in the hub's local cache if it cannot be reached.

A checkpoint must have exactly the model's weights, and its own code runs only if it is trusted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import get_session
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import logging

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


def from_pretrained(auto_class: Any, name: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """``auto_class.from_pretrained`` that runs Python code of the folder only if ``trust_remote_code``.

    By default transformers would ask on standard input. Raises ``UserError``: the folder needs custom code, which is
    not allowed.
    """
    if options.get("local_files_only") and issubclass(auto_class, _BaseAutoModelClass):
        # With peft installed, transformers also looks for an adapter.
        options = {**options, "adapter_kwargs": {"local_files_only": True, "cache_dir": options.get("cache_dir")}}
    try:
        with bars_on_terminals():
            return auto_class.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"{str(name)!r} needs Python code that it brings along, which runs only if it is trusted: expected "
            "trust_remote_code=True (--trust-remote-code on the command line) or a folder without such code"
        ) from error


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Show progress bars of transformers and the hub only if standard error is a terminal."""
    hides = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hides:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hides:
            logging.enable_progress_bar()


def read_whole(auto_class: Any, name: str, dtype: Any = "auto", **options: Any) -> PreTrainedModel:
    """Load a model with exactly the checkpoint's weights, by default in the checkpoint's dtype. Raises ``UserError``:
    weights are missing, of other shapes, or unexpected, such as more layers than the configuration has. transformers
    would only warn, and initialise or drop them."""
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    try:
        model, report = from_pretrained(auto_class, name, **options)
    except (UnpicklingError, EOFError, RuntimeError) as error:
        # torch's errors for pickled weights (``.bin``) advise unsafe loading.
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        raise UserError(
            f"cannot load model {name!r}: expected weights in safetensors files, or pickled tensors and nothing else, "
            "received a pickle that is damaged or holds other objects, which may run code and are not loaded"
        ) from error
    found = (report[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected"))
    refuse_other_weights(model, name, *found)
    return model


def refuse_other_weights(
    model: PreTrainedModel, name: str, missing: Iterable[str], mismatched: Iterable[Any], unexpected: Iterable[str]
) -> None:
    """Raise unless a checkpoint has exactly its model's weights; ``mismatched`` has (name, found shape, expected)."""
    problems = [f"{key} is missing" for key in sorted(missing)]
    problems += [f"{key} has shape {tuple(got)}, not {tuple(want)}" for key, got, want in sorted(mismatched)]
    problems += [f"{key} is not one of them" for key in sorted(unexpected)]
    if problems:
        shown = "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise UserError(
            f"cannot load model {name!r}: expected exactly the weights of {type(model).__name__}, but {shown}"
        )
