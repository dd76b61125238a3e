"""EAGLE-3 and DFlash drafters written in the formats of other engines; the inverse of their ``published`` modules.

- ``speculators`` (vllm-project/speculators), for vLLM: EAGLE-3 heads with tensors ``layers.0.*``, DFlash and DSpark;
- ``eagle``, for SGLang: EAGLE-3 heads with tensors ``midlayer.*`` and a flat configuration (SafeAILab/EAGLE), which has
  none of the switches of other projects;
- ``z-lab``: DFlash and JetSpec, with the target's embedding and output layer.

No other engine has read DFlash drafters written here yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.drafters.dflash import DFlashConfig
from mmspec.drafters.dflash.drafter import DFlash
from mmspec.drafters.dflash.published import published_parts as parts_of_blocks
from mmspec.drafters.eagle3 import Eagle3Config, default_reads
from mmspec.drafters.eagle3.drafter import Eagle3
from mmspec.drafters.eagle3.network import SWITCHES
from mmspec.drafters.eagle3.network import published_parts as parts_of_heads
from mmspec.drafters.parts import unstack
from mmspec.drafters.shape import HeadShape
from mmspec.errors import UserError
from mmspec.files import atomic, write_text


def export_head(drafter: Eagle3, target: Any, folder: Path, layout: str, tokens: int) -> None:
    """Write an EAGLE-3 head for other engines.

    Args:
        target: configuration of transformers of the target, with ``name_or_path``.
        layout: ``"speculators"`` or ``"eagle"``.
        tokens: draft tokens per step, the default of vLLM with this head.

    Raises:
        UserError: the head was trained for another target, or the layout cannot describe it.
    """
    network, decoder = drafter.network.config, target.get_text_config()
    _check_target(drafter.verifier or drafter.published or {}, target)
    _check_head(network, layout)
    network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    prefix = "layers.0" if layout == "speculators" else "midlayer"
    tensors = unstack(drafter.network.state_dict(), parts_of_heads(network, prefix), network)
    if drafter.draft_ids is not None:
        tensors |= _vocabularies(drafter.draft_ids, decoder.vocab_size)
    reads = network.reads or default_reads(decoder.num_hidden_layers)
    layer = _layer_fields(network, decoder, "llama")
    if layout == "speculators":
        config = _speculators_head(network, layer, reads, target, tokens)
    else:
        config = _eagle_head(network, layer, reads, target)
    _write(folder, {**config, "draft_vocab_size": network.head}, tensors)


def export_blocks(drafter: DFlash, target: Any, folder: Path, layout: str) -> None:
    """Write a DFlash drafter for other engines. Without an output layer of its own, it drafts all tokens there.

    Args:
        target: configuration of transformers of the target, with ``name_or_path``.
        layout: ``"z-lab"`` or ``"speculators"``.

    Raises:
        UserError: the drafter was trained for another target, or the layout cannot describe it.
    """
    network, decoder = drafter.network.config, target.get_text_config()
    source = drafter.verifier or drafter.published or {}
    _check_target({"hidden_size": network.hidden_size, **source}, target)
    network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    tensors = unstack(drafter.network.state_dict(), parts_of_blocks(network), network)
    if layout == "z-lab":
        config = _z_lab_blocks(network, decoder)
    else:
        config = _speculators_blocks(network, target)
        if drafter.draft_ids is not None and network.head:
            tensors |= _vocabularies(drafter.draft_ids, decoder.vocab_size)
    _write(folder, config, tensors)


def _check_target(source: Mapping[str, Any], target: Any) -> None:
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


def _check_head(network: Eagle3Config, layout: str) -> None:
    """Check that a layout can describe a head; raises ``UserError`` if not."""
    if not network.head:
        raise UserError(f"format {layout} requires a head with an output layer of its own: it uses the target's")
    if network.outputs:
        raise UserError(f"format {layout} names layers whose inputs are read: the head reads outputs {network.reads}")
    if network.window or network.candidates:
        received = "a sliding window" if network.window else "a low-rank output layer"
        raise UserError(f"format {layout} requires a head of EAGLE-3: the head has {received}")
    if layout == "eagle":
        switches = [name for name in SWITCHES if getattr(network, name)]
        if switches or network.layers > 1 or network.mask_token_id is not None:
            received = ", ".join(switches) or (f"{network.layers} layers" if network.layers > 1 else "mask_hidden")
            raise UserError(f"format eagle requires one layer without further norms: the head has {received}")


def _speculators_head(
    network: Eagle3Config, layer: dict[str, Any], reads: list[int], target: Any, tokens: int
) -> dict[str, Any]:
    masked = network.mask_token_id is not None
    return {
        "architectures": ["PEagleDraftModel" if masked else "Eagle3DraftModel"],
        **({"mask_token_id": network.mask_token_id} if masked else {}),
        "eagle_aux_hidden_state_layer_ids": reads,
        "embed_requires_grad": False,
        # Written even when false: vLLM's default of the first differs from that of speculators.
        **{name: getattr(network, name) for name in SWITCHES},
        **_speculators_fields("peagle" if masked else "eagle3", target, tokens),
        "target_hidden_size": None if network.source == network.hidden_size else network.source,
        "transformer_layer_config": layer,
    }


def _eagle_head(network: Eagle3Config, layer: dict[str, Any], reads: list[int], target: Any) -> dict[str, Any]:
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


def _z_lab_blocks(network: DFlashConfig, decoder: Any) -> dict[str, Any]:
    if network.head or network.embedding:
        raise UserError("format z-lab requires the target's output layer and embedding: the drafter has its own")
    if network.dspark or network.from_anchor:
        raise UserError("format z-lab requires a drafter without the heads and positions of DSpark: use speculators")
    if network.causal not in ([], list(range(network.layers))):
        raise UserError(f"format z-lab requires all layers to be causal, or none: got {network.causal}")
    own = {"mask_token_id": network.mask_token_id, "target_layer_ids": network.target_layer_ids}
    return {
        "architectures": ["DFlashDraftModel"],
        **_block_layers(network, decoder),
        "block_size": network.block_size,
        "dflash_config": {**own, **({"causal_head": True} if network.causal else {})},
        "num_target_layers": decoder.num_hidden_layers,
        "rope_theta": network.rope.get("rope_theta", network.rope_theta),
    }


def _speculators_blocks(network: DFlashConfig, target: Any) -> dict[str, Any]:
    decoder = target.get_text_config()
    drafts, corrected = network.head or decoder.vocab_size, network.markov_outputs
    if network.causal not in ([], network.sliding):
        raise UserError(f"format speculators requires layers with a window to be causal, or none: got {network.causal}")
    if corrected not in (0, drafts):
        raise UserError(
            f"format speculators requires an output layer of its own for the {corrected} tokens of a Markov head: the "
            "drafter uses the target's"
        )
    heads = {
        "confidence_head_with_markov": network.confidence == "markov",
        "enable_confidence_head": network.confidence != "none",
        "markov_head_type": network.markov_type,
        "markov_rank": network.markov_rank,
    }
    return {
        "architectures": ["DSparkDraftModel" if network.dspark else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in network.target_layer_ids],
        "block_size": network.block_size,
        "draft_vocab_size": drafts,
        **(heads if network.dspark else {}),
        "mask_token_id": network.mask_token_id,
        "sample_from_anchor": network.from_anchor,
        "sliding_window_non_causal": not network.causal,
        **_speculators_fields("dspark" if network.dspark else "dflash", target, network.drafts),
        "transformer_layer_config": _block_layers(network, decoder),
    }


def _block_layers(network: DFlashConfig, decoder: Any) -> dict[str, Any]:
    kinds = ["sliding_attention" if n in network.sliding else "full_attention" for n in range(network.layers)]
    return {
        **_layer_fields(network, decoder, "qwen3"),
        "layer_types": kinds,
        "sliding_window": network.window or None,
        "use_sliding_window": bool(network.sliding),
    }


def _layer_fields(network: HeadShape, decoder: Any, model_type: str) -> dict[str, Any]:
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


def _speculators_fields(algorithm: str, target: Any, tokens: int) -> dict[str, Any]:
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


def _vocabularies(draft_ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """Offsets from draft tokens to the target's, and the mask of the target's tokens that have one."""
    ids = draft_ids.cpu()
    marked = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a folder with these contents of ``config.json``, and the tensors' dtype."""
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / "model.safetensors") as part:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
    write_text(folder / "config.json", json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
