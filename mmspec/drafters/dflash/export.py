"""DFlash drafters written in published layouts; the inverse of ``published``. No other engine has read them yet.

- ``z-lab``: DFlash and JetSpec, with the target's embedding and output layer;
- ``speculators``: DFlash and DSpark (vllm-project/speculators), for vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.drafters.dflash.config import DFlashConfig
from mmspec.drafters.dflash.drafter import DFlash
from mmspec.drafters.dflash.published import published_parts
from mmspec.drafters.exported import check_exported, layer_fields, speculators_fields, vocabularies, write_exported
from mmspec.drafters.parts import unstack
from mmspec.errors import UserError


def export(drafter: DFlash, target: Any, folder: Path, layout: str) -> None:
    """Write a DFlash drafter for other engines. Without an output layer of its own, it drafts all tokens there.

    Args:
        target: configuration of transformers of the target, with ``name_or_path``.
        layout: ``"z-lab"`` or ``"speculators"``.

    Raises:
        UserError: the drafter was trained for another target, or the layout cannot describe it.
    """
    network, decoder = drafter.network.config, target.get_text_config()
    source = drafter.verifier or drafter.published or {}
    check_exported({"hidden_size": network.hidden_size, **source}, target)
    network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    tensors = unstack(drafter.network.state_dict(), published_parts(network), network)
    if layout == "z-lab":
        config = _z_lab(network, decoder)
    else:
        config = _speculators(network, target)
        if drafter.draft_ids is not None and network.head:
            tensors |= vocabularies(drafter.draft_ids, decoder.vocab_size)
    write_exported(folder, config, tensors)


def _layers(network: DFlashConfig, decoder: Any) -> dict[str, Any]:
    kinds = ["sliding_attention" if n in network.sliding else "full_attention" for n in range(network.layers)]
    return {
        **layer_fields(network, decoder, "qwen3"),
        "layer_types": kinds,
        "sliding_window": network.window or None,
        "use_sliding_window": bool(network.sliding),
    }


def _z_lab(network: DFlashConfig, decoder: Any) -> dict[str, Any]:
    if network.head or network.embedding:
        raise UserError("format z-lab requires the target's output layer and embedding: the drafter has its own")
    if network.dspark or network.from_anchor:
        raise UserError("format z-lab requires a drafter without the heads and positions of DSpark: use speculators")
    if network.causal not in ([], list(range(network.layers))):
        raise UserError(f"format z-lab requires all layers to be causal, or none: got {network.causal}")
    own = {"mask_token_id": network.mask_token_id, "target_layer_ids": network.target_layer_ids}
    return {
        "architectures": ["DFlashDraftModel"],
        **_layers(network, decoder),
        "block_size": network.block_size,
        "dflash_config": {**own, **({"causal_head": True} if network.causal else {})},
        "num_target_layers": decoder.num_hidden_layers,
        "rope_theta": network.rope.get("rope_theta", network.rope_theta),
    }


def _speculators(network: DFlashConfig, target: Any) -> dict[str, Any]:
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
        **speculators_fields("dspark" if network.dspark else "dflash", target, network.drafts),
        "transformer_layer_config": _layers(network, decoder),
    }
