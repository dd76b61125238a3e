"""Layers of native multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), as transformers builds them.

A layer projects a token's embedding and the state before it, each normed, to a decoder layer of the target's kind; the
output predicts the token after that one. The first layer takes the target's last hidden states, each further one the
outputs of the layer before it.

They are read strictly from the target's own checkpoint, from which transformers drops them.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.checkpoint import load_weights, tensor_names, weight_files
from mmspec.errors import UserError, explained
from mmspec.targets.attention import NAME, set_attention
from mmspec.targets.masks import SLIDING
from mmspec.targets.support import from_pretrained

_WITHOUT_CLASS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Model types whose checkpoints have a layer with full attention, which transformers has no configuration of."""

_ATTENTION = {"full_attention", SLIDING[0]}


def layer_config(decoder: PreTrainedConfig, source: str) -> PreTrainedConfig:
    """Configuration of the layers from the target's text configuration; ``num_hidden_layers`` is their number.

    Raises:
        UserError: there are none, or they are of a kind that cannot verify trees.
    """
    config = copy.deepcopy(decoder)
    if config.model_type in _WITHOUT_CLASS:
        for name, value in {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}.items():
            if (received := getattr(config, name, value)) != value:
                raise UserError(f"{source}: {name} must be {value} for its MTP layer: got {received!r}")
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    if not getattr(config, "num_mtp_layers", None):
        raise UserError(f"{source}: expected a model with MTP layers, received {config.model_type} without any")
    with explained(f"{source}: expected MTP layers that transformers builds", ValueError):
        layers: PreTrainedConfig = config.get_mtp_config()
    if other := sorted(set(getattr(layers, "layer_types", None) or ()) - _ATTENTION):
        raise UserError(
            f"{source}: MTP layers must be full or sliding-window attention: those of {config.model_type} are "
            f"{', '.join(other)}"
        )
    return layers


def build(config: PreTrainedConfig) -> tuple[Any, Any]:
    """A model of transformers with these layers (``MtpModel``), and one on the meta device whose classes it has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = MtpModel(model, config.num_hidden_layers)
    set_attention(built, NAME if model._supports_sdpa else "eager")
    return built, model


class MTPNetwork(nn.Module):
    """The layers, with masks and caches of trees.

    Args:
        built: from ``build``.
    """

    def __init__(self, built: Any) -> None:
        super().__init__()
        self.config, self.count = built.config, len(built.layers)
        self.layers = built.layers
        self.norm = built.shared_post_norm if built.use_shared_post_norm else nn.Identity()
        self.attention: str = built.config._attn_implementation
        # Not a module of this one, whose dtype its frequencies must not take.
        self._rotary: list[Any] = []
        if built.rotary_emb is not None:
            with torch.device("cpu"):
                self._rotary.append(type(built.rotary_emb)(config=self.config))
        self._by_kind = any(isinstance(value, dict) for value in (self.config.rope_parameters or {}).values())

    def forward(
        self,
        number: int,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: TreeCache,
        **options: Any,
    ) -> Tensor:
        """Outputs of a layer, (batch, nodes, hidden).

        Args:
            embeds: (batch, nodes, hidden), embeddings of tokens.
            states: (batch, nodes, hidden), at the tokens before.
            positions: (batch, nodes) or (axes, batch, nodes) int64.
            mask: (batch, 1, nodes, slots); None for causal attention of a prompt, or a node that attends to everything.
            **options: further arguments of the attention.
        """
        rotation = None
        for rotary in self._rotary:
            kind = {"layer_type": self.config.layer_types[number]} if self._by_kind else {}
            axes = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
            rotation = rotary.to(states.device)(states, position_ids=axes, **kind)
        outputs: Tensor = self.layers[number](
            embeds.to(states.dtype),
            states,
            position_embeddings=rotation,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            **options,
        )
        return self.norm(outputs)


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
        The layers, in their original dtype, and the target, for ``layouts.check_target``.

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
