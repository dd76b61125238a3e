"""EAGLE-3 heads written in the layouts that vLLM and SGLang serve; the inverse of ``published_eagle3``.

- ``speculators``: tensors ``layers.0.*``, the layer's configuration apart (vllm-project/speculators), for vLLM;
- ``eagle``: tensors ``midlayer.*`` and a flat configuration (SafeAILab/EAGLE), for SGLang, which has none of the
  switches of other projects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.drafters.eagle3.config import Eagle3Config, default_reads
from mmspec.drafters.eagle3.drafter import Eagle3
from mmspec.drafters.eagle3.published import SWITCHES, published_parts
from mmspec.drafters.exported import check_exported, layer_fields, speculators_fields, vocabularies, write_exported
from mmspec.drafters.parts import unstack
from mmspec.errors import UserError


def export(drafter: Eagle3, target: Any, folder: Path, layout: str, tokens: int) -> None:
    """Write an EAGLE-3 head for other engines.

    Args:
        target: configuration of transformers of the target, with ``name_or_path``.
        layout: ``"speculators"`` or ``"eagle"``.
        tokens: draft tokens per step, the default of vLLM with this head.

    Raises:
        UserError: the head was trained for another target, or the layout cannot describe it.
    """
    network, decoder = drafter.network.config, target.get_text_config()
    _check(drafter, target, layout)
    prefix = "layers.0" if layout == "speculators" else "midlayer"
    tensors = unstack(drafter.network.state_dict(), published_parts(network, prefix), network)
    if drafter.draft_ids is not None:
        tensors |= vocabularies(drafter.draft_ids, decoder.vocab_size)
    reads = network.reads or default_reads(decoder.num_hidden_layers)
    network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    layer = layer_fields(network, decoder, "llama")
    if layout == "speculators":
        config = _speculators(network, layer, reads, target, tokens)
    else:
        config = _eagle(network, layer, reads, target)
    write_exported(folder, {**config, "draft_vocab_size": network.head}, tensors)


def _check(drafter: Eagle3, target: Any, layout: str) -> None:
    network = drafter.network.config
    check_exported(drafter.verifier or drafter.published or {}, target)
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


def _speculators(
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
        **speculators_fields("peagle" if masked else "eagle3", target, tokens),
        "target_hidden_size": None if network.source == network.hidden_size else network.source,
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
