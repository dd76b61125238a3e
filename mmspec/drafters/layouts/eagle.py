"""EAGLE-1, EAGLE-2, MSD, ViSpec and Kangaroo: layers with the inputs of EAGLE, read and written."""

from __future__ import annotations

from typing import Any, Literal

from mmspec.drafters.layouts.fields import EMBEDDING, REQUIRED, Reading, Source, Writing, layer_names, written_layer
from mmspec.errors import UserError

_NORM, _QKV = "layers.0.input_layernorm.weight", [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
_NAMES = layer_names("", "layers.0.")
_ADAPTOR = {
    "adaptor.queries": ("imadpt.q",),
    "adaptor.key": ("imadpt.k_proj",),
    "adaptor.value": ("imadpt.v_proj",),
    "adaptor.out": ("imadpt.o_proj",),
}
_HARMLESS = {"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"}  # of old releases of transformers
_TENSORS = {EMBEDDING, *_HARMLESS, "fc.weight", "fc.bias", *(f"{name}.bias" for name in _QKV)} | {
    f"{name}.weight" for some in _NAMES.values() for name in some
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
    return Reading(network, _NAMES, source.count("vocab_size", default=source.rows(EMBEDDING) or REQUIRED))


def read_msd(source: Source) -> Reading:
    found = read_eagle(source)
    found.required = (EMBEDDING,)
    if source.config.get("model_type") == "qwen2_vl":  # a complete layer; others lack the first norm
        found.network |= {"input_norm": True, "qkv_bias": True}
    return found


def read_vispec(source: Source) -> Reading:
    found = read_eagle(source)
    found.names = {**_NAMES, **_ADAPTOR}
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
    return Writing({"architectures": ["LlamaForCausalLM"], **config}, _NAMES)
