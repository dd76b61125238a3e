"""EAGLE-3 heads written in the layouts that vLLM and SGLang serve; the inverse of ``published_eagle3``.

- ``speculators``: tensors ``layers.0.*``, the layer's configuration apart (vllm-project/speculators), for vLLM;
- ``eagle``: tensors ``midlayer.*`` and a flat configuration (SafeAILab/EAGLE), for SGLang, which has none of the
  switches of other projects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.drafters.eagle3.config import Eagle3Config, default_reads
from mmspec.drafters.eagle3.drafter import Eagle3
from mmspec.drafters.eagle3.published import SWITCHES, published_parts
from mmspec.errors import UserError
from mmspec.files import atomic, write_text


def export(drafter: Eagle3, target: Any, folder: Path, layout: str, tokens: int) -> None:
    """Write an EAGLE-3 head for other engines.

    Args:
        drafter: loaded from a checkpoint.
        target: configuration of transformers of the target, with ``name_or_path``.
        folder: to write.
        layout: ``"speculators"`` or ``"eagle"``.
        tokens: draft tokens per step, the default of vLLM with this head.

    Raises:
        UserError: the head was trained for another target, or the layout cannot describe it.
    """
    network, decoder = drafter.network.config, target.get_text_config()
    _check(drafter, target, layout)
    prefix = "layers.0" if layout == "speculators" else "midlayer"
    tensors = _tensors(drafter.network.state_dict(), network, prefix)
    if drafter.draft_ids is not None:
        tensors |= _vocabularies(drafter.draft_ids, decoder.vocab_size)
    reads = network.reads or default_reads(decoder.num_hidden_layers)
    network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    layer = _layer(network, decoder)
    if layout == "speculators":
        config = _speculators(network, layer, reads, target, tokens)
    else:
        config = _eagle(network, layer, reads, target)
    config |= {"draft_vocab_size": network.head, "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / "model.safetensors") as part:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _check(drafter: Eagle3, target: Any, layout: str) -> None:
    network, source, decoder = (
        drafter.network.config,
        drafter.verifier or drafter.published or {},
        target.get_text_config(),
    )
    for name in ("hidden_size", "vocab_size"):
        if source[name] != getattr(decoder, name):
            raise UserError(
                f"the drafter was trained for {source['name_or_path'] or 'a target'} with {name} {source[name]}: got "
                f"{target.name_or_path} with {getattr(decoder, name)}"
            )
    classes = set(target.architectures or [])
    if classes and source["architectures"] and classes.isdisjoint(source["architectures"]):
        raise UserError(
            f"the drafter was trained for a target of class {', '.join(source['architectures'])}: got "
            f"{target.name_or_path} of class {', '.join(sorted(classes))}"
        )
    if not network.head:
        raise UserError(f"format {layout} requires a head with an output layer of its own: it uses the target's")
    if network.outputs:
        raise UserError(f"format {layout} names layers whose inputs are read: the head reads outputs {network.reads}")
    if layout == "eagle":
        switches = [name for name in SWITCHES if getattr(network, name)]
        if switches or network.layers > 1:
            received = ", ".join(switches) or f"{network.layers} layers"
            raise UserError(f"format eagle requires one layer without further norms: the head has {received}")


def _tensors(state: Mapping[str, Tensor], network: Eagle3Config, prefix: str) -> dict[str, Tensor]:
    """Tensors of a network under published names; those that are stacked here are apart there."""
    inner, keys = network.heads * network.head_dim, network.kv_heads * network.head_dim
    rows = {1: [-1], 2: [network.mlp] * 2, 3: [inner, keys, keys]}
    tensors: dict[str, Tensor] = {}
    for name, published in published_parts(network, prefix).items():
        parts = [state[name]] if len(published) == 1 else state[name].split(rows[len(published)])
        tensors |= dict(zip(published, (part.clone() for part in parts), strict=True))
    return tensors


def _vocabularies(draft_ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """Offsets from draft tokens to the target's, and the mask of the target's tokens that have one."""
    ids = draft_ids.cpu()
    marked = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def _layer(network: Eagle3Config, decoder: Any) -> dict[str, Any]:
    """The decoder layer as a configuration of Llama."""
    limit = getattr(decoder, "max_position_embeddings", None)  # none with ALiBi
    return {
        "attention_bias": False,
        "head_dim": network.head_dim,
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "intermediate_size": network.mlp,
        **({"max_position_embeddings": limit} if limit else {}),
        "model_type": "llama",
        "num_attention_heads": network.heads,
        "num_hidden_layers": network.layers,
        "num_key_value_heads": network.kv_heads,
        "rms_norm_eps": network.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": network.rope_theta, **network.rope},
        "tie_word_embeddings": False,
        "vocab_size": decoder.vocab_size,
    }


def _speculators(
    network: Eagle3Config, layer: dict[str, Any], reads: list[int], target: Any, tokens: int
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": reads,
        "embed_requires_grad": False,
        # Written even when false: vLLM's default of the first differs from that of speculators.
        **{name: getattr(network, name) for name in SWITCHES},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": target.architectures or [], "name_or_path": target.name_or_path},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": None if network.source == network.hidden_size else network.source,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def _eagle(network: Eagle3Config, layer: dict[str, Any], reads: list[int], target: Any) -> dict[str, Any]:
    rope = layer.pop("rope_parameters")
    scaled = rope["rope_type"] != "default" or "mrope_section" in rope
    outputs = [read - 1 for read in reads]  # named as outputs here
    wider = {} if network.source == network.hidden_size else {"target_hidden_size": network.source}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        **wider,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if scaled else None,
        "target_model_type": target.model_type,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
    }
