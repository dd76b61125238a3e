"""DFlash, DFlash2, JetSpec, DSpark and XPress drafters, read and written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import NonNegativeInt

from mmspec.drafters.layouts.fields import (
    EMBEDDING,
    Reading,
    Source,
    Writing,
    layer_names,
    written_layer,
    written_speculators,
)
from mmspec.errors import UserError

NAMES = {
    **layer_names(
        "layers.#.", "layers.{0}.", q="self_attn.q_proj", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"
    ),
    "refiner.embed": ("refiner_head.token_embed",),
    "refiner.out": ("refiner_head.readout",),
    "refiner.state": ("refiner_head.down_h",),
    "refiner.mean": ("refiner_head.down_g",),
    "refiner.into": ("refiner_head.in_proj",),
    "refiner.mix": ("refiner_head.mix_l",),
    "refiner.gate_up": ("refiner_head.mlp_gate", "refiner_head.mlp_up"),
    "refiner.down": ("refiner_head.mlp_down",),
    "markov_embed": ("markov_head.markov_w1",),
    "markov_out": ("markov_head.markov_w2",),
    "markov_gate": ("markov_head.gate_proj",),
    "markov_cell": ("markov_head.joint_proj",),
    "confidence": ("confidence_head.proj",),
    **{
        f"layers.#.{one}_conv.{ours}": (f"layers.{{0}}.{one}_conv.{theirs}",)
        for one in ("attention", "mlp")
        for ours, theirs in (("base", "base_kernel"), ("delta", "kernel_projection"))
    },
    "predecessors.weight": ("candidate_selector.predecessor_codebook",),
    "successors.weight": ("candidate_selector.successor_codebook",),
    "selector_state": ("candidate_selector.hidden_projection",),
}
_ENCODER = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_dflash(source: Source) -> Reading:
    is_xpress, nested = source.named("xpress"), "speculators_model_type" in source.config
    is_dspark, is_dflash2 = nested and source.named("dspark"), nested and source.named("dflash2")
    shape, layers = source.layer(), source.count("num_hidden_layers")
    source.refuse("attention_bias", "mlp_bias", "fc_layernorm", "use_swa", "shift_label")
    source.get("attention_mode", kind=Literal["gqa"], default="gqa")
    source.get("projector_type", kind=Literal["dflash", "dspark"], default="dflash")
    source.ignore("num_jacobi_passes", "markov_head_type")  # the first is for chains
    vocab = source.vocabulary()
    sliding, has_head = _sliding(source, layers), "lm_head.weight" in source.tensors
    own = source.vocabulary("draft_vocab_size", default=source.rows("lm_head.weight") or None)
    head = (own or 0) * has_head
    rank = source.get("markov_rank", "xpress_rank", kind=NonNegativeInt, default=256 * (is_dspark or is_xpress))
    ids, inputs = ("target_layer_ids", "dflash_config.target_layer_ids"), "aux_hidden_state_layer_ids"
    network = {
        **shape,
        "layers": layers,
        "rope": source.rope(),
        "block_size": source.count("block_size"),
        "mask_token_id": source.get("mask_token_id", "dflash_config.mask_token_id", kind=NonNegativeInt),
        "target_layer_ids": source.layer_ids(ids[0], inputs, ids[1], shifted=(inputs,), by=-1),
        "sliding": sliding,
        "window": source.count("sliding_window") if sliding else None,
        "causal": _causal(source, layers, sliding),
        "head": head,
        "embedding": source.rows(EMBEDDING),
        "from_anchor": source.flag("sample_from_anchor", "query_zero_predicts_next", default=source.named("dspark")),
        "markov_rank": rank,
        "refiner_ratio": source.count("xpress_mlp_ratio", default=2),
        "confidence": _confidence(source, is_dspark, rank),
    }
    for name, least, default in (
        ("conv_kernel_size", 0, 2 * is_dflash2),
        ("conv_group_size", 1, 16),
        ("selector_rank", 0, 256 * is_dflash2),
        ("selector_top_k", 1, 16),
    ):
        network[name] = source.get(name, f"dflash_config.{name}", kind=Annotated[int, Ge(least)], default=default)
    if head or rank or network["selector_rank"]:
        vocab = source.count("vocab_size")
    if network["selector_rank"]:
        network["selector_tokens"] = vocab
    if rank:
        kinds = Literal["vanilla", "gated", "rnn"]
        kind = "xpress" if is_xpress else source.get("markov_head_type", kind=kinds, default="vanilla")
        network |= {"markov_type": kind, "markov_inputs": vocab, "markov_outputs": head or vocab}
    return Reading(network, NAMES, vocab, head, prefixes=_ENCODER)


def _sliding(source: Source, layers: int) -> list[int]:
    """Layers with a sliding window."""
    kinds = source.fields.get("layer_types") or [_FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {_SLIDING, _FULL}:
        raise UserError(
            f"{source.where}/config.json: layer_types must be {layers} of {_SLIDING} and {_FULL}: got {kinds!r}"
        )
    return [number for number, kind in enumerate(kinds) if kind == _SLIDING]


def _causal(source: Source, layers: int, sliding: list[int]) -> list[int]:
    """Layers that are causal inside a block: all, none, or sliding-window layers. The default follows the training code
    (vllm-project/speculators, z-lab/dflash, deepseek-ai/DeepSpec, transformers)."""
    causal = source.get("causal_head", "causal", "is_causal", kind=bool, default=None)
    plain = "dflash2" if "speculators_model_type" in source.config else "dspark"
    non_causal = source.named(plain) or source.named("museglimmer")
    non_causal = source.flag("sliding_window_non_causal", default=non_causal)
    if causal is not None:
        return list(range(layers)) if causal else []
    return [] if non_causal else sliding


def _confidence(source: Source, is_dspark: bool, markov_rank: int) -> str:
    has_head = is_dspark or bool(source.fields.get("confidence_head_alpha"))
    has_head = source.flag("enable_confidence_head", default=has_head)
    with_markov = source.flag("confidence_head_with_markov", default=markov_rank > 0)
    return "none" if not has_head else "markov" if with_markov else "state"


_WRITTEN = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "xpress": "XPressSpeculator",
}
"""Kinds of DFlash drafters and their classes."""


def _kind(network: Any) -> str:
    if network.dspark:
        return "xpress" if network.markov_type == "xpress" else "dspark"
    return "dflash2" if network.selector_rank else "dflash"


def write_z_lab(network: Any, target: Any, tokens: int) -> Writing:
    _check_dflash2("z-lab", network)
    if network.head or network.embedding:
        raise UserError("format z-lab requires the target's output layer and embedding: the drafter has its own")
    if network.dspark or network.from_anchor:
        raise UserError("format z-lab requires a drafter without the heads and positions of DSpark: use speculators")
    every = list(range(network.layers))
    if network.causal not in ([], network.sliding, every):
        raise UserError(
            f"format z-lab requires all layers to be causal, or none, or those with a window: got {network.causal}"
        )
    own = {"mask_token_id": network.mask_token_id, "target_layer_ids": network.target_layer_ids}
    config = {
        "architectures": [_WRITTEN[_kind(network)]],
        **_written_layer(network, target),
        "block_size": network.block_size,
        "dflash_config": {
            **_written_dflash2(network),
            **own,
            **({"causal_head": True} if network.causal == every else {}),
        },
        "num_target_layers": target.get_text_config().num_hidden_layers,
        "rope_theta": network.rope_parameters["rope_theta"],
    }
    if network.causal != network.sliding:
        config["is_causal"] = bool(network.causal)
    return Writing(config, NAMES)


def write_speculators(network: Any, target: Any, tokens: int) -> Writing:
    _check_dflash2("speculators", network)
    kind, confidence = _kind(network), network.confidence
    if kind == "xpress" and confidence != "none":
        raise UserError("format speculators requires an XPress drafter without a confidence head")
    if network.causal not in ([], network.sliding):
        raise UserError(f"format speculators requires layers with a window to be causal, or none: got {network.causal}")
    config = {
        "architectures": [_WRITTEN[kind]],
        **_written_dflash2(network),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in network.target_layer_ids],
        "block_size": network.block_size,
        "draft_vocab_size": network.head or target.get_text_config().vocab_size,
        "mask_token_id": network.mask_token_id,
        "sample_from_anchor": network.from_anchor,
        "sliding_window_non_causal": not network.causal,
        **written_speculators(kind, target, network.drafts),
        "transformer_layer_config": _written_layer(network, target),
    }
    if kind == "xpress":
        config |= {"xpress_rank": network.markov_rank, "xpress_mlp_ratio": network.refiner_ratio}
    elif kind == "dspark":
        config |= {
            "enable_confidence_head": confidence != "none",
            "confidence_head_with_markov": confidence == "markov",
        }
        config |= {"markov_head_type": network.markov_type, "markov_rank": network.markov_rank}
    return Writing(config, NAMES)


def _check_dflash2(form: str, network: Any) -> None:
    if bool(network.conv_kernel_size) != bool(network.selector_rank):
        has = "convolutions" if network.conv_kernel_size else "a selector"
        raise UserError(f"format {form} requires convolutions and a selector, or neither: the drafter has {has} only")


def _written_layer(network: Any, target: Any) -> dict[str, Any]:
    return {
        **written_layer(network, target, "qwen3"),
        "rope_parameters": network.rope_parameters,
        "layer_types": [_SLIDING if layer in network.sliding else _FULL for layer in range(network.layers)],
        "sliding_window": network.window or None,
        "use_sliding_window": bool(network.sliding),
    }


def _written_dflash2(network: Any) -> dict[str, Any]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: getattr(network, name) for name in names} if _kind(network) == "dflash2" else {}
