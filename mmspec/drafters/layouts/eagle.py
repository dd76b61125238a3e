"""EAGLE-1 to EAGLE-4, P-EAGLE, MSD, ViSpec and Kangaroo heads, read and written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from mmspec.drafters.layouts.fields import (
    EMBEDDING,
    REQUIRED,
    Reading,
    Source,
    Writing,
    layer_names,
    written_layer,
    written_speculators,
)
from mmspec.errors import UserError

_NORM, _QKV = "layers.0.input_layernorm.weight", [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
_EAGLE = layer_names("", "layers.0.")
_ADAPTOR = {
    "adaptor.queries": ("imadpt.q",),
    "adaptor.key": ("imadpt.k_proj",),
    "adaptor.value": ("imadpt.v_proj",),
    "adaptor.out": ("imadpt.o_proj",),
}
_HARMLESS = {"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"}  # of old releases of transformers
_TENSORS = {EMBEDDING, *_HARMLESS, "fc.weight", "fc.bias", *(f"{name}.bias" for name in _QKV)} | {
    f"{name}.weight" for some in _EAGLE.values() for name in some
}


def is_eagle(names: set[str]) -> bool:
    """Whether an EAGLE-1/2 or MSD drafter has these tensors."""
    own = names - {EMBEDDING, *_HARMLESS}
    return "fc.weight" in names or (bool(own) and names <= _TENSORS)


def is_kangaroo(names: set[str]) -> bool:
    others = any(name.startswith(("fc.", "layers.0.mlp.")) for name in names)
    return not others and any(f"{part}.weight" in names for part in _QKV)


def read_eagle(source: Source) -> Reading:
    for name in ("fc", "img_fc"):  # files such as EAGLE heads for Llama-3 omit zero biases
        if source.config.get("bias") is False and (rows := source.rows(f"{name}.weight")):
            source.tensors.setdefault(f"{name}.bias", source.tensors[f"{name}.weight"].new_zeros(rows))
    shape, layers, rope = source.layer(), source.count("num_hidden_layers", default=1), source.rope()
    if layers != 1 or rope["rope_type"] != "default":
        raise UserError(
            f"{source.where}/config.json: expected one layer with plain rotary positions, received {layers} with rope "
            f"scaling {rope['rope_type']!r}"
        )
    source.ignore("attention_bias")
    has_bias = bool(source.config.get("qkv_bias")) or any(f"{name}.bias" in source.tensors for name in _QKV)
    network = {**shape, "rope": rope, "rope_theta": float(rope["rope_theta"])}
    network |= {"input_norm": _NORM in source.tensors, "qkv_bias": has_bias}
    return Reading(network, _EAGLE, source.count("vocab_size", default=source.rows(EMBEDDING) or REQUIRED))


def read_msd(source: Source) -> Reading:
    found = read_eagle(source)
    found.required = (EMBEDDING,)
    if source.config.get("model_type") == "qwen2_vl":  # a complete layer; others lack the first norm
        found.network |= {"input_norm": True, "qkv_bias": True}
    return found


def read_vispec(source: Source) -> Reading:
    found = read_eagle(source)
    found.names = {**_EAGLE, **_ADAPTOR}
    return found


def read_kangaroo(source: Source) -> Reading:
    source.get("num_hidden_layers", kind=Literal[1], default=1)
    return Reading({**source.layer(), "mlp": 0}, layer_names("layers.#.", "layers.0."), source.vocabulary())


def write_eagle(network: Any, target: Any, tokens: int) -> Writing:
    """SafeAILab/EAGLE, for vLLM."""
    further = ("decoupled", "reads", "norm_output", "confidence", "input_norm", "qkv_bias")
    own = [name for name in (*further, "visual_states", "latents", "hide_visual") if getattr(network, name, False)]
    if own := [*own, *(["slots"] if network.slots > 1 else [])]:
        raise UserError(f"format eagle requires a layer of EAGLE-1: the drafter has {', '.join(own)}")
    config = written_layer(network, target, "llama") | {"rope_theta": network.rope_theta}
    return Writing({"architectures": ["LlamaForCausalLM"], **config}, _EAGLE)


SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_EAGLE3 = layer_names("layers.#.", "layers.{0}.", embed_norm="input_layernorm", hidden_norm="hidden_norm")
_MIDLAYER = {"layers.0.": "midlayer."}
_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # ids of layers whose inputs are read
_OUTPUT_IDS = (*(f"eagle_config.{name}" for name in _IDS), "aux_hidden_states_layer_ids")  # whose outputs are read
_CANDIDATES = "efficient_lm_head"  # EAGLE-4's low-rank head
_SLIDING = "sliding_attention"
_RETRIEVED = 256  # candidates per state if the configuration has no number


def read_eagle3(source: Source) -> Reading:
    is_eagle4 = source.has(_CANDIDATES) or source.named("eagle4")
    is_parallel = "mask_hidden" in source.tensors or source.named("peagle")
    has_head = "lm_head.weight" in source.tensors
    shape, vocab = source.layer(), source.count("vocab_size")
    source.refuse("attention_bias", "mlp_bias", "qkv_bias")
    draft = source.count("draft_vocab_size", default=source.rows("lm_head.weight") or vocab)
    layers = source.count("num_hidden_layers", default=1)
    reads = source.layer_ids(*_IDS, *_OUTPUT_IDS, default=[], shifted=_OUTPUT_IDS, by=1)
    masks = ("mask_token_id", "ptd_token_id", "pard_token")
    source.ignore(*masks, "num_candidates", "candidate_head.num_candidates")
    network = {
        **shape,
        "rope": source.rope(),
        "target_size": source.count("target_hidden_size", default=shape["hidden_size"]),
        "reads": reads,
        "states": len(reads) or 3,
        "layers": layers,
        "head": draft * (is_eagle4 or has_head),
        "embedding": vocab * (EMBEDDING in source.tensors),
        **{name: bool(source.get(name, f"eagle_config.{name}", default=False)) for name in SWITCHES},
        "mask_token_id": source.get(*masks, kind=NonNegativeInt) if is_parallel else None,
        "window": _window(source, layers, is_eagle4),
    }
    if is_eagle4:
        rank = source.rows(f"{_CANDIDATES}_down_proj.weight") or 1  # if missing, a later check names it
        network |= {"head_rank": rank, "candidates": _candidates(source, draft)}
    return Reading(network, _EAGLE3, vocab, draft, prefixes=_MIDLAYER)


def _window(source: Source, layers: int, is_eagle4: bool) -> int:
    """Sliding window of all layers; 0 without. Flat configurations of EAGLE-3 copy the target's window: ignored."""
    known, window = is_eagle4 or "transformer_layer_config" in source.config, source.fields.get("sliding_window")
    kinds = list((source.fields.get("layer_types") if known else None) or ())[:layers]
    if is_eagle4 and not kinds and window is not None:
        kinds = [_SLIDING]
    sliding = {kind == _SLIDING for kind in kinds}
    if len(sliding) > 1:
        raise UserError(f"{source.where}/config.json: layer_types must be all {_SLIDING} or none: got {kinds}")
    return source.check("sliding_window", PositiveInt, window) if sliding == {True} else 0


def _candidates(source: Source, draft: int) -> int:
    given = source.config.get("candidate_head")
    number = (given if isinstance(given, dict) else source.config).get("num_candidates", _RETRIEVED)
    return min(source.check("num_candidates", PositiveInt, number), draft)


def write_speculators(network: Any, target: Any, tokens: int) -> Writing:
    """vllm-project/speculators, for vLLM."""
    _check_eagle3("speculators", network)
    algorithm, name = ("peagle", "PEagleDraftModel") if network.parallel else ("eagle3", "Eagle3DraftModel")
    config = {
        "architectures": [name],
        "eagle_aux_hidden_state_layer_ids": network.inputs_read(target.get_text_config().num_hidden_layers),
        "embed_requires_grad": False,
        # even when false: vLLM and speculators have different defaults for the first
        **{name: getattr(network, name) for name in SWITCHES},
        **written_speculators(algorithm, target, tokens),
        "target_hidden_size": None if network.source == network.hidden_size else network.source,
        "transformer_layer_config": {
            **written_layer(network, target, "llama"),
            "rope_parameters": network.rope_parameters,
        },
        "draft_vocab_size": network.head,
    }
    if network.parallel:
        config["mask_token_id"] = network.mask_token_id
    return Writing(config, _EAGLE3)


def write_eagle3(network: Any, target: Any, tokens: int) -> Writing:
    """SafeAILab/EAGLE, for SGLang, without the switches of other projects."""
    _check_eagle3("eagle", network)
    switches = [name for name in SWITCHES if getattr(network, name)]
    if switches or network.layers > 1 or network.mask_token_id is not None:
        received = ", ".join(switches) or (f"{network.layers} layers" if network.layers > 1 else "mask_hidden")
        raise UserError(f"format eagle requires one layer without further norms: the head has {received}")
    scaling = {name: value for name, value in network.rope_parameters.items() if name != "rope_theta"}
    reads = [layer - 1 for layer in network.inputs_read(target.get_text_config().num_hidden_layers)]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **written_layer(network, target, "llama"),
        "rope_theta": network.rope_parameters["rope_theta"],
        "rope_scaling": scaling if scaling["rope_type"] != "default" or "mrope_section" in scaling else None,
        "target_model_type": target.model_type,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": reads},
        "draft_vocab_size": network.head,
    }
    if network.source != network.hidden_size:
        config["target_hidden_size"] = network.source
    return Writing(config, _EAGLE3, _MIDLAYER)


def _check_eagle3(form: str, network: Any) -> None:
    if not network.head:
        raise UserError(f"format {form} requires a head with an output layer of its own: it uses the target's")
    if network.outputs:
        raise UserError(f"format {form} names layers whose inputs are read: the head reads outputs {network.reads}")
    if network.window or network.candidates:
        received = "a sliding window" if network.window else "a low-rank output layer"
        raise UserError(f"format {form} requires a head of EAGLE-3: the head has {received}")
