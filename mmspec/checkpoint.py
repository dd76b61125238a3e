"""Drafter checkpoints: a folder with ``config.json`` and ``model.safetensors``.

``config.json`` names the drafter (``mmspec_drafter``, as registered), its settings, and the target it was made for:
``verifier: {name_or_path, architectures, hidden_size, vocab_size}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.errors import UserError

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_COMPARED = ("architectures", "hidden_size", "vocab_size")


def drafter_name(folder: Path) -> str | None:
    """The registered name of the drafter in a folder; None where the folder holds none."""
    try:
        return json.loads((folder / _CONFIG).read_text()).get("mmspec_drafter")
    except (OSError, ValueError, AttributeError):
        return None


def read(folder: Path, names: set[str] | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a drafter checkpoint.

    Args:
        names: the tensors that it must hold, neither more nor fewer; None leaves that to the caller.

    Raises:
        UserError: a file is missing or damaged, or tensors are missing or unknown.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text())
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: expected a drafter's {_CONFIG} and {_WEIGHTS}, received {error}") from error
    if "verifier" not in config:
        raise UserError(f"{folder}/{_CONFIG}: expected a verifier, received none")
    if names is not None and set(tensors) != names:
        received = ", ".join(sorted(tensors)) or "none"
        raise UserError(f"{folder}: expected the tensors {', '.join(sorted(names))}, received {received}")
    return config, tensors


def load_exactly(network: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Give a network these tensors, in its own tensors' place; it may lie on the meta device.

    Args:
        folder: where they were read, for the message.

    Raises:
        UserError: a tensor is missing, unknown or of another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    received = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | received.keys()):
        if expected.get(name) != received.get(name):
            raise UserError(
                f"{folder}: expected {name} {expected.get(name, 'not to be there')}, "
                f"received {received.get(name, 'none')}"
            )
    network.load_state_dict(tensors, assign=True)


def write(folder: Path, name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> None:
    """Write a drafter checkpoint, each file whole or not at all.

    Args:
        name: the drafter's registered name.
        settings: its own settings.
        target: the target it was made for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"mmspec_drafter": name, **settings, "verifier": verifier_of(target)}
    part = folder / (_WEIGHTS + ".part")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
    os.replace(part, folder / _WEIGHTS)
    part = folder / (_CONFIG + ".part")
    part.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(part, folder / _CONFIG)


def verifier_of(target: Any) -> dict[str, Any]:
    """How a checkpoint names its target."""
    return {
        "name_or_path": Path(getattr(target.model.config, "name_or_path", "") or "").name,
        "architectures": [type(target.model).__name__],
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
    }


def check_verifier(verifier: Mapping[str, Any], target: Any) -> None:
    """Refuse a drafter on another target than its own.

    Raises:
        UserError: naming both sides.
    """
    ours = verifier_of(target)
    different = [key for key in _COMPARED if verifier.get(key) != ours[key]]
    if different:
        made = ", ".join(f"{key} {verifier.get(key)}" for key in different)
        here = ", ".join(f"{key} {ours[key]}" for key in different)
        raise UserError(
            f"the drafter was made for {verifier.get('name_or_path') or 'another target'} ({made}): got {here}"
        )
