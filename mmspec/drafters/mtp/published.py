"""Native MTP layers, read strictly from the target's own checkpoint, from which transformers drops them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from mmspec.drafters.checkpoint import load_weights, tensor_names, weight_files
from mmspec.drafters.mtp.network import MTPNetwork, build, layer_config
from mmspec.errors import UserError, explained
from mmspec.targets.support import from_pretrained

_OWN = re.compile(r"^(?:model\.)?mtp\.(.*?)(\.(?:weight|bias))?$")
_PARTS = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
"""Parts of a single layer beside its decoder layer, as they are published, and their names in transformers."""
_NUMBERED = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.(.*)$")
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and output layer."""


def has_mtp(folder: Path) -> bool:
    """Whether a checkpoint has tensors of native MTP layers."""
    names = [name for file in weight_files(folder) for name in tensor_names(file)]
    return any(_OWN.match(name) or name.endswith(".eh_proj.weight") for name in names)


def read_mtp(folder: Path) -> tuple[MTPNetwork, dict[str, Any]]:
    """Read the MTP layers of a target's checkpoint; other tensors are not read.

    Returns:
        The layers, in their original dtype, and the target, for ``published.check_target``.

    Raises:
        UserError: there are none, they cannot draft trees, or a tensor is missing, unexpected or of the wrong shape.
    """
    if not has_mtp(folder):
        raise UserError(f"{folder}: expected the checkpoint of a target with native MTP layers, received none")
    with explained(f"{folder}: expected the configuration of a model", OSError, ValueError):
        decoder = from_pretrained(AutoConfig, folder).get_text_config()
    config = layer_config(decoder, str(folder))
    errors = ValueError, TypeError, AttributeError, KeyError, IndexError
    with explained(f"{folder}: expected MTP layers that transformers builds", *errors), torch.device("meta"):
        built, model = build(config)
    _load(built, model, _tensors(folder, decoder.num_hidden_layers), str(folder))
    verifier = {
        "name_or_path": folder.name,
        "model_type": decoder.model_type,
        "hidden_size": decoder.hidden_size,
        "vocab_size": decoder.vocab_size,
    }
    return MTPNetwork(built), verifier


def _tensors(folder: Path, layers: int) -> dict[str, Tensor]:
    """Tensors of the MTP layers under the names that transformers converts.

    Args:
        layers: of the target; those with higher numbers are MTP layers.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        names = {name: own for name in tensor_names(file) if (own := _own_name(name, layers))}
        if names:
            loaded = load_weights(file, shapes_only=[name for name in tensor_names(file) if name not in names])
            tensors |= {own: loaded[name] for name, own in names.items()}
    return tensors


def _own_name(name: str, layers: int) -> str | None:
    if name.endswith(_SHARED):
        return None
    if match := _OWN.match(name):
        part, kind = match[1], match[2] or ""
        layer = re.match(r"layers\.(\d+)\.(.*)", part)
        own = f"layers.{layer[1]}.mtp_block.{layer[2]}" if layer else f"layers.0.{_PARTS.get(part, part)}"
        return own + kind
    match = _NUMBERED.match(name)
    return f"layers.{int(match[1]) - layers}.mtp_block.{match[2]}" if match and int(match[1]) >= layers else None


def _load(built: Any, model: Any, tensors: dict[str, Tensor], source: str) -> None:
    """Load tensors by transformers' conversions.

    Args:
        built, model: see ``network.build``.
        source: name of the checkpoint in error messages.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:  # float8 means nothing without its scales
            raise UserError(f"{source}: {name} must be a floating point tensor: got {tensor.dtype}")
    conversions: list[Any] = [
        *get_model_conversion_mapping(built, add_legacy=False),
        *get_model_conversion_mapping(model),
    ]
    report, _ = convert_and_load_state_dict_in_model(
        model=built, state_dict=dict(tensors), load_config=LoadStateDictConfig(weight_mapping=conversions)
    )
    problems = [f"missing {name}" for name in sorted(report.missing_keys) if name.startswith(("layers", "shared_post"))]
    problems += [f"unknown {name}" for name in sorted(report.unexpected_keys)]
    problems += [
        f"{name} of shape {tuple(got)}, not {tuple(want)}" for name, got, want in sorted(report.mismatched_keys)
    ]
    problems += [f"{name} that cannot be converted" for name in sorted(report.conversion_errors)]
    if problems:
        raise UserError(f"{source}: expected exactly the tensors of its MTP layers, received {'; '.join(problems[:3])}")
