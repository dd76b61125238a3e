"""Safe loading of third-party weight files: safetensors or pickled (``weights_only``), single or sharded."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspec.drafters.checkpoint import read_json
from mmspec.errors import UserError, explained

HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Weight files of published Medusa and Hydra heads, beside which a folder may have those of the target."""


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder, heads first, safetensors preferred; empty if there are none.

    Raises:
        UserError: an invalid index, or one that lists a file outside of its folder.
    """
    for name in (*HEADS, "model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _shards(folder / f"{name}.index.json")
    return []


def _shards(index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{index}: expected a weight_map from tensor names to files, received none")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserError(f"{index}: expected files in the same folder, received {name!r}")
    return [index.parent / name for name in names]


def tensor_names(file: Path) -> list[str]:
    """Tensor names of a file; raises as ``load_weights``."""
    if file.suffix != ".safetensors":
        return list(load_weights(file))
    with _opened(file) as stored:
        return list(stored.keys())


def load_weights(file: Path, shapes_only: Collection[str] = ()) -> dict[str, Tensor]:
    """Load the tensors of a file on the CPU; pickled ones are memory-mapped.

    Args:
        shapes_only: names to return as meta tensors, without reading them.

    Raises:
        UserError: a damaged file, or one with anything but named tensors.
    """
    if file.suffix != ".safetensors":
        return _unpickle(file)
    with _opened(file) as stored:
        return {
            name: torch.empty(stored.get_slice(name).get_shape(), device="meta")
            if name in shapes_only
            else stored.get_tensor(name)
            for name in stored.keys()  # noqa: SIM118, not a mapping
        }


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with explained(f"{file}: expected a safetensors file", OSError, SafetensorError), safe_open(file, "pt") as stored:
        yield stored


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        # Files of torch before 1.6 are not zip archives and cannot be mapped.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{file}: expected tensors and nothing else, received {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected named tensors, received {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{file}: expected named tensors, received {name!r} of type {type(value).__name__}")
    return dict(content)
