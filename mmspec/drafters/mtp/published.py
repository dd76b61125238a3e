"""Native MTP layers, read from the target's own checkpoint: ``mtp.*``, which transformers drops on load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from mmspec.drafters.hidden_state.rope import turning_order
from mmspec.drafters.published import check_tensors
from mmspec.drafters.shape import RopeShape
from mmspec.drafters.weight_files import load_weights, tensor_names, weight_files
from mmspec.errors import UserError, explained
from mmspec.targets.support import from_pretrained

_PREFIX = "mtp."
_FAMILY = "qwen3_5_text"
_SECTIONS = [11, 11, 10]  # of position axes, where the configuration has none: transformers' default
_LAYER = "mtp.layers.0."
# Our parameters that are one tensor of the checkpoint each.
_SAME = {
    "fc": "mtp.fc",
    "embed_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer.input_norm": f"{_LAYER}input_layernorm",
    "layer.post_norm": f"{_LAYER}post_attention_layernorm",
    "layer.out": f"{_LAYER}self_attn.o_proj",
    "layer.down": f"{_LAYER}mlp.down_proj",
}


def has_mtp(folder: Path) -> bool:
    """Whether a checkpoint has tensors of a native MTP layer."""
    return any(name.startswith(_PREFIX) for file in weight_files(folder) for name in tensor_names(file))


def read_mtp(folder: Path) -> tuple[RopeShape, dict[str, Tensor], dict[str, Any]]:
    """Read the MTP layer of a target's checkpoint; other tensors are not read.

    Returns:
        The network's configuration; its tensors under the names of ``MTPNetwork``, in their original dtype; and the
        target, for ``published.check_target``.

    Raises:
        UserError: there is none, it is of another architecture, or a tensor is missing, unexpected or of the wrong
            shape.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        names = tensor_names(file)
        wanted = {name for name in names if name.startswith(_PREFIX)}
        if wanted:
            loaded = load_weights(file, shapes_only=[name for name in names if name not in wanted])
            tensors |= {name: loaded[name] for name in wanted}
    if not tensors:
        raise UserError(f"{folder}: expected the checkpoint of a target with a native MTP layer (mtp.*), received none")
    with explained(f"{folder}: expected the configuration of a model", OSError, ValueError):
        decoder = from_pretrained(AutoConfig, folder).get_text_config()
    config = network_config(decoder, str(folder))
    check_tensors(tensors, _shapes(config), "an MTP layer", str(folder))
    verifier = {
        "name_or_path": folder.name,
        "model_type": decoder.model_type,
        "hidden_size": decoder.hidden_size,
        "vocab_size": decoder.vocab_size,
    }
    return config, convert(tensors, config), verifier


def convert(tensors: Mapping[str, Tensor], config: RopeShape) -> dict[str, Tensor]:
    """The tensors of an ``MTPNetwork`` from those of a checkpoint.

    ``q_proj`` holds query and gate of each head in turn. Queries and keys are put in ``turning_order``.
    """
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    order = turning_order(head_dim, config.turned)
    attention = {name: tensors[f"{_LAYER}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
    query, gate = attention["q_proj"].view(heads, 2, head_dim, -1).unbind(1)
    key = attention["k_proj"].view(kv_heads, head_dim, -1)
    qk = torch.cat([query, key])[:, order].flatten(0, 1)
    norms = [tensors[f"{_LAYER}self_attn.{one}_norm.weight"][order] for one in "qk"]
    gate_up = [tensors[f"{_LAYER}mlp.{one}_proj.weight"] for one in ("gate", "up")]
    return {
        **{f"{ours}.weight": tensors[f"{theirs}.weight"] for ours, theirs in _SAME.items()},
        "layer.qkv.weight": torch.cat([qk, attention["v_proj"]]),
        "layer.gate.weight": gate.flatten(0, 1),
        "layer.head_norm.weight": torch.cat([norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1)]),
        "layer.gate_up.weight": torch.cat(gate_up),
    }


def network_config(decoder: Any, source: str) -> RopeShape:
    """Configuration of the network from the target's text configuration.

    Raises:
        UserError: the target is of another family, or its layer of another architecture.
    """
    if decoder.model_type != _FAMILY:
        kind = f"{decoder.model_type}, a mixture of experts" if hasattr(decoder, "num_experts") else decoder.model_type
        raise UserError(f"{source}: expected the MTP layer of a {_FAMILY}, received that of a {kind}")
    expected = {
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
    }
    for name, value in expected.items():
        if (received := getattr(decoder, name, value)) != value:
            raise UserError(f"{source}/config.json: {name} must be {value} for its MTP layer: got {received!r}")
    # Position axes are always interleaved, whatever the configuration says.
    rope = {"mrope_section": _SECTIONS, **decoder.rope_parameters, "mrope_interleaved": True}
    return RopeShape.like(decoder, rope=rope)


def _shapes(config: RopeShape) -> dict[str, tuple[int, ...]]:
    """Expected shapes of the checkpoint's tensors."""
    width, head_dim, mlp = config.hidden_size, config.head_dim, config.mlp
    inner, keys = config.heads * head_dim, config.kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc": (width, 2 * width),
        "mtp.pre_fc_norm_embedding": (width,),
        "mtp.pre_fc_norm_hidden": (width,),
        "mtp.norm": (width,),
        f"{_LAYER}input_layernorm": (width,),
        f"{_LAYER}post_attention_layernorm": (width,),
        f"{_LAYER}self_attn.q_proj": (2 * inner, width),
        f"{_LAYER}self_attn.k_proj": (keys, width),
        f"{_LAYER}self_attn.v_proj": (keys, width),
        f"{_LAYER}self_attn.o_proj": (width, inner),
        f"{_LAYER}self_attn.q_norm": (head_dim,),
        f"{_LAYER}self_attn.k_norm": (head_dim,),
        f"{_LAYER}mlp.gate_proj": (mlp, width),
        f"{_LAYER}mlp.up_proj": (mlp, width),
        f"{_LAYER}mlp.down_proj": (width, mlp),
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}
