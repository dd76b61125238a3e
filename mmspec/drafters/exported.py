"""What the published formats that drafters are written in have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.drafters.shape import HeadShape
from mmspec.errors import UserError
from mmspec.files import atomic, write_text


def check_exported(source: Mapping[str, Any], target: Any) -> None:
    """Check that a drafter may be written for a target; raises ``UserError`` for another one than its own.

    Args:
        source: the drafter's target as far as it is known, see ``published.check_target``.
        target: configuration of transformers.
    """
    decoder, known = target.get_text_config(), source.get("name_or_path") or "a target"
    for name in ("hidden_size", "vocab_size"):
        if source.get(name) not in (None, getattr(decoder, name)):
            raise UserError(
                f"the drafter was trained for {known} with {name} {source[name]}: got {target.name_or_path} with "
                f"{getattr(decoder, name)}"
            )
    classes, expected = set(target.architectures or []), source.get("architectures") or []
    if classes and expected and classes.isdisjoint(expected):
        raise UserError(
            f"the drafter was trained for a target of class {', '.join(expected)}: got {target.name_or_path} of class "
            f"{', '.join(sorted(classes))}"
        )


def layer_fields(network: HeadShape, decoder: Any, model_type: str) -> dict[str, Any]:
    """Decoder layers as a configuration of transformers.

    Args:
        decoder: the target's text configuration.
    """
    limit = getattr(decoder, "max_position_embeddings", None)  # none with ALiBi
    return {
        "attention_bias": False,
        "head_dim": network.head_dim,
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "intermediate_size": network.mlp,
        **({"max_position_embeddings": limit} if limit else {}),
        "model_type": model_type,
        "num_attention_heads": network.heads,
        "num_hidden_layers": network.layers,
        "num_key_value_heads": network.kv_heads,
        "rms_norm_eps": network.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": network.rope_theta, **network.rope},
        "tie_word_embeddings": False,
        "vocab_size": decoder.vocab_size,
    }


def speculators_fields(algorithm: str, target: Any, tokens: int) -> dict[str, Any]:
    """Fields of every drafter in the format of vllm-project/speculators.

    Args:
        target: configuration of transformers.
        tokens: draft tokens per step, the default of vLLM.
    """
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1}],
            "verifier": {"architectures": target.architectures or [], "name_or_path": target.name_or_path},
        },
        "speculators_model_type": algorithm,
        "tie_word_embeddings": False,
    }


def vocabularies(draft_ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """Offsets from draft tokens to the target's, and the mask of the target's tokens that have one."""
    ids = draft_ids.cpu()
    marked = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def write_exported(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a folder with these contents of ``config.json``, and the tensors' dtype."""
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / "model.safetensors") as part:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
    write_text(folder / "config.json", json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
