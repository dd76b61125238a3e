"""DFlash drafters written in the layout that z-lab publishes; the inverse of ``published``. No other engine has read
them yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mmspec.drafters.dflash.config import DFlashConfig
from mmspec.drafters.dflash.drafter import DFlash
from mmspec.drafters.dflash.published import published_parts
from mmspec.errors import UserError
from mmspec.files import atomic, write_text


def export(drafter: DFlash, target: Any, folder: Path) -> None:
    """Write a DFlash drafter for other engines, which draft all tokens of the target.

    Args:
        drafter: loaded from a checkpoint.
        target: configuration of transformers of the target, with ``name_or_path``.
        folder: to write.

    Raises:
        UserError: the drafter was trained for another target, or has an output layer or embedding of its own.
    """
    network, made, decoder = drafter.network.config, drafter.verifier or {}, target.get_text_config()
    expected = {"hidden_size": network.hidden_size, "vocab_size": made.get("vocab_size")}
    for name, value in expected.items():
        if value is not None and value != getattr(decoder, name):
            raise UserError(
                f"the drafter was trained for {made.get('name_or_path') or 'a target'} with {name} {value}: got "
                f"{target.name_or_path} with {getattr(decoder, name)}"
            )
    if network.head or network.embedding:
        raise UserError("format z-lab requires the target's output layer and embedding: the drafter has its own")
    network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    tensors = published_tensors(drafter.network.state_dict(), network)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / "model.safetensors") as part:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
    write_text(folder / "config.json", json.dumps({**_config(network, decoder), "dtype": dtype}, indent=2) + "\n")


def published_tensors(state: Mapping[str, Tensor], network: DFlashConfig, renamed: bool = False) -> dict[str, Tensor]:
    """Tensors of a network under published names; those that are stacked here are apart there.

    Args:
        renamed: as for ``published_parts``.
    """
    found: dict[str, Tensor] = {}
    for ours, theirs in published_parts(network, renamed).items():
        parts = state[ours].split([rows for _, rows in theirs])
        found |= {name: part.clone() for (name, _), part in zip(theirs, parts, strict=True)}
    return found


def _config(network: DFlashConfig, decoder: Any) -> dict[str, Any]:
    limit = getattr(decoder, "max_position_embeddings", None)
    kinds = ["sliding_attention" if n in network.sliding else "full_attention" for n in range(network.layers)]
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": network.block_size,
        "dflash_config": {"mask_token_id": network.mask_token_id, "target_layer_ids": network.target_layer_ids},
        "head_dim": network.head_dim,
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "intermediate_size": network.mlp,
        "layer_types": kinds,
        **({"max_position_embeddings": limit} if limit else {}),
        "model_type": "qwen3",
        "num_attention_heads": network.heads,
        "num_hidden_layers": network.layers,
        "num_key_value_heads": network.kv_heads,
        "num_target_layers": decoder.num_hidden_layers,
        "rms_norm_eps": network.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": network.rope_theta, **network.rope},
        "rope_theta": network.rope.get("rope_theta", network.rope_theta),
        "sliding_window": network.window or None,
        "tie_word_embeddings": False,
        "use_sliding_window": bool(network.sliding),
        "vocab_size": decoder.vocab_size,
    }
