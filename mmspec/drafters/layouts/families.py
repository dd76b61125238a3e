"""DFlash, EAGLE, Medusa and Kangaroo drafters, each with its successors, read and written."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from mmspec.drafters.checkpoint import take_draft_ids
from mmspec.drafters.layouts.fields import (
    EMBEDDING,
    REQUIRED,
    Names,
    Reading,
    Source,
    Writing,
    layer_names,
    published_names,
    rows_of,
    written_layer,
    written_speculators,
)
from mmspec.drafters.spec import RotaryShape
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


def write_dflash_speculators(network: Any, target: Any, tokens: int) -> Writing:
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


_FEW = Annotated[int, Interval(ge=1, le=64)]
_SIZES = ("hidden_size", "truncated_vocab_size", "max_paths", "topk", "num_lookahead_tokens")  # in the tensors
_PREFIX = "prefix_embeding_layer"  # sic
COPIES = ("input_embed_fn.weight", f"{_PREFIX}.embed_tokens.weight")
_SHARED = ("lm_head.weight", "lm_heads.0.weight")  # of the target, with original_lm_head
_VLLM = {"heads.#.#.linear": ("blocks.{0}.layers.{1}",), "outputs.#": ("lm_heads.{0}",)}
_ORIGINAL = {"heads.#.#.linear": ("{0}.{1}.linear",), "outputs.#": ("{0}.{layers}",)}
_MLP = {
    "heads.#.#.linear": ("hydra_mlp.{0}.{1}.linear",),
    "heads.#.#.residual": ("hydra_mlp.{0}.{1}.res_connection",),
    "outputs.#": ("hydra_lm_head.{0}",),
}
_PREFIX_MLP = {
    "heads.#.#.linear": ("hydra_mlp.{0}.{odd}.linear",),
    "heads.#.#.residual": ("hydra_mlp.{0}.{odd}.res_connection",),
    "outputs.#": ("hydra_lm_head.{0}.1",),
    **layer_names("layers.#.", f"{_PREFIX}.layers.0."),
    "norm": (f"{_PREFIX}.norm",),
}


def read_medusa(source: Source) -> Reading:
    return _read_heads(source, _VLLM if any("blocks." in name for name in source.tensors) else _ORIGINAL)


def read_hydra(source: Source) -> Reading:
    found = _read_heads(source, _PREFIX_MLP if source.fields.get("head_arch") == "prefix-mlp" else _MLP)
    found.network["head"] = max(found.network["head"], 1)
    return found


def _read_heads(source: Source, names: Names) -> Reading:
    source.tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in source.tensors.items()}
    vocab, draft_ids = _take_token_map(source)
    heads = max(source.get("num_heads", kind=_FEW, default=1), _head_count(source, names))
    layers = max(source.get(name, kind=_FEW, default=1) for name in ("num_layers", "num_hidden_layers"))
    has_fc_bias, shares_head = (source.flag(name, default=False) for name in ("fc_bias", "original_lm_head"))
    source.get("logit_scale", kind=Annotated[float, Interval(ge=1, le=1)], default=1.0)
    source.get("head_arch", kind=Literal["mlp", "prefix-mlp"], default="mlp")
    source.get("hidden_state_offset", kind=Literal[0], default=0)
    source.ignore(*_SIZES)

    def rows(parameter: str) -> int:
        """Rows of the heads' parameters; {} is the head's number."""
        parts = published_names(map(parameter.format, range(heads)), names, layers=layers)
        return source.rows(*(name for some in parts.values() for name in some))

    hydra, width = "heads.#.#.residual" in names, max(rows(f"heads.{{}}.{at}.linear.weight") for at in range(layers))
    own = rows("outputs.{}.weight") if hydra or not shares_head else 0
    network = {
        "hidden_size": width,
        "heads": heads,
        "layers": layers,
        "bias": has_fc_bias or names is not _VLLM,
        "grounded": source.flag("grounded_heads", default=False),
        "head": own if draft_ids is None or not own else len(draft_ids),
        "head_bias": hydra,
        "prefix": _prefix_layer(source, width) if names is _PREFIX_MLP else {},
    }
    return Reading(
        network, names, vocab or network["head"] or None, draft_ids=draft_ids, copies=_SHARED if shares_head else ()
    )


def _take_token_map(source: Source) -> tuple[int | None, Tensor | None]:
    """Read the vocabulary and vLLM's draft vocabulary, and select its rows from full-size output layers."""
    vocab = source.vocabulary()
    ids = take_draft_ids(source.tensors, vocab or 0, Path(source.where), "token_map")
    for name in source.tensors if ids is not None else ():
        if name.startswith("lm_heads.") and rows_of(source.tensors, name) == vocab:
            source.tensors[name] = source.tensors[name][ids]
    return vocab, ids


def _head_count(source: Source, names: Names) -> int:
    first = names["heads.#.#.linear"][0].partition("{0}")[0]
    found = (re.match(re.escape(first) + r"(\d{1,4})\.", name) for name in source.tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _prefix_layer(source: Source, width: int) -> dict[str, Any]:
    """Shape of Hydra's decoder layer, from its tensors; the head size is the largest that fits, up to 128."""
    parts = ("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    names = ([f"{_PREFIX}.layers.0.{one}.weight" for one in some] for some in parts)
    queries, keys, mlp = (max(2, source.rows(*some)) for some in names)
    queries += -queries % keys  # a missing or misshapen tensor raises later
    size = gcd(keys, 128)
    return asdict(RotaryShape(width, queries // size, keys // size, size, mlp))


def write_vllm(network: Any, target: Any, tokens: int) -> Writing:
    _check_written(network)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": network.heads,
        "num_hidden_layers": network.layers,
        "hidden_size": network.hidden_size,
        "medusa_fc_bias": network.bias,
        "truncated_vocab_size": network.head,
        "vocab_size": target.get_text_config().vocab_size,
    }
    return Writing(config, _VLLM)


def write_medusa(network: Any, target: Any, tokens: int) -> Writing:
    """FasterDecoding/Medusa."""
    _check_written(network)
    if not network.bias:
        raise UserError("format medusa requires heads with biases: they have none")
    sizes = {"medusa_num_heads": network.heads, "medusa_num_layers": network.layers}
    config = {"base_model_name_or_path": target.name_or_path, **sizes}
    return Writing(config, _ORIGINAL, file="medusa_lm_head.safetensors")


def _check_written(network: Any) -> None:
    if not network.head:
        raise UserError("formats of Medusa require output layers of the heads' own: they use the target's")


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


def write_eagle3_speculators(network: Any, target: Any, tokens: int) -> Writing:
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
