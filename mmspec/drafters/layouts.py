"""Published drafter checkpoint layouts: one table for recognition, reading and writing.

``LAYOUTS`` maps the tensor names and ``config.json`` fields of each layout to this package's; ``FORMATS`` lists the
output formats for other engines. Reading is strict and runs no code of the checkpoint.

- ``eagle``: EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858). They project ``[embedding of the next token ;
  hidden state]``, use plain rotary positions (Qwen2-VL's three axes are equal for text), and contain a copy of the
  target's embedding, of which only the number of rows is used.
- ``msd``: MSD drafters (arXiv 2505.14260), such as those for LLaVA-1.5 and Qwen2-VL. They have the tensors of EAGLE and
  do not record the handling of visual positions in training: folders with a text model's ``config.json`` are read as
  EAGLE, others as MSD; ``eagle:FOLDER`` and ``msd:FOLDER`` override this.
- ``vispec``: ViSpec drafters (arXiv 2509.15235), EAGLE with an image adaptor.
- ``eagle3``: EAGLE-3, EAGLE-4 and P-EAGLE heads (arXiv 2503.01840, 2602.01469): ``midlayer.*`` (SafeAILab/EAGLE,
  sgl-project/SpecForge, Tencent/AngelSlim), ``layers.0.*`` with a nested ``transformer_layer_config``
  (vllm-project/speculators), or without embedding and ``t2d`` (NVIDIA/Model-Optimizer). EAGLE-4 heads have the tensors
  that NVIDIA-NeMo/Automodel documents; quantised output layers and mixtures of experts are not read.
- ``dflash``: DFlash, DFlash2, JetSpec, DSpark and XPress drafters (arXiv 2602.06036, 2606.18394, 2607.05147,
  2608.02438): flat (z-lab, deepseek-ai/DeepSpec), nested (vllm-project/speculators), or with ``encoder.*``
  (transformers). ``causal_head`` of JetSpec is ``causal`` or ``is_causal`` in vLLM.
- ``medusa``: Medusa heads (arXiv 2401.10774) of FasterDecoding/Medusa, text-generation-inference, which share the
  target's output layer, and vLLM, with the draft vocabulary in ``token_map`` and, with ``original_lm_head``, one copy
  of the target's output layer. Files may have more heads than their configuration.
- ``hydra``: Hydra heads (arXiv 2402.05109, zankner/Hydra); with ``hydra_head_arch`` ``prefix-mlp``, each dropout counts
  as a layer, and ``prefix_embeding_layer`` is a decoder of one layer.
- ``kangaroo``: Kangaroo adapters (arXiv 2404.18911, Equationliu/Kangaroo): a one-layer Llama, of which attention and
  norms are used. The rotary base is always 10,000. The configuration does not contain the exit layer.

``d2t`` holds offsets: row i of an output layer is the target's token i + d2t[i].
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import gcd
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Interval
from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmspec.drafters.checkpoint import load_weights, read_config, take_draft_ids, tensor_names, weight_files
from mmspec.drafters.layer import rotary_of
from mmspec.drafters.shape import LayerShape, RotaryShape
from mmspec.errors import UserError
from mmspec.files import atomic, read_json, write_text
from mmspec.validation import check, condition
from mmspec.validation import read as read_options

Published = tuple[Any, dict[str, Tensor], Tensor | None, dict[str, Any]]
"""Result of reading a published drafter: network configuration, tensors in their original dtype, draft vocabulary, (n,)
int64 (None is the target's), and the target, for ``check_target``."""

Values = dict[str, Any]
Names = Mapping[str, tuple[str, ...]]
"""Maps a module or parameter, with # for a number, to the published names that it stacks: {0} is the first number,
{odd} is 2 * last number + 1, {layers} is the number of layers."""


class Source:
    """A published checkpoint.

    Attributes:
        config: contents of ``config.json``.
        fields: flattened contents of ``config.json``: nested objects merged, the layout's prefix removed.
        tensors: tensors by published name.
        draft_ids: target token of each draft token, (n,) int64; None is the identity.
        where: name of the checkpoint in error messages.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: Layout, where: str) -> None:
        self.config, self.tensors, self.where = config, dict(tensors), where
        self.draft_ids: Tensor | None = None
        self.fields = {name.removeprefix(layout.prefix): value for name, value in config.items()}
        for name in layout.nested:
            inside = config.get(name) or {}
            if not isinstance(inside, Mapping):
                raise UserError(f"{where}/config.json: {name} must be an object: got {inside!r}")
            self.fields |= inside
        layout.prepare(self)

    def first(self, names: Sequence[str]) -> tuple[str, Any]:
        """The first of these fields that is set, and its value; the value is None if no field is set."""
        for name in names:
            value: Any = self.fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None and value != []:
                return name, value
        return names[0], None

    def check(self, name: str, kind: Any, value: Any) -> Any:
        return check(f"{self.where}/config.json: {name}", kind, value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name)
        return self.check(name, bool, default if value is None else value)

    def rows(self, *names: str) -> int:
        """Maximum number of rows of the named tensors; 0 if all are absent."""
        return max((rows_of(self.tensors, name) or 0 for name in names), default=0)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.tensors)

    def named(self, part: str) -> bool:
        """Whether the name of a class or algorithm contains ``part``."""
        return any(part in name for name in _class_names(self.config, self.fields.get("projector_type")))


class Written(NamedTuple):
    """A drafter to write for another engine.

    Attributes:
        network: network configuration.
        target: transformers configuration of the target.
        tokens: default number of draft tokens per step in vLLM.
    """

    network: Any
    target: Any
    tokens: int

    @property
    def decoder(self) -> Any:
        return self.target.get_text_config()


REQUIRED, OWN, OMITTED = object(), object(), object()
"""Markers: a field without a default; the default of this package's configuration; a field that is not written."""

UNSET = Annotated[Any, condition("unset or false", lambda value: not value)]


@dataclass(frozen=True)
class Field:
    """Maps a configuration field to fields of a published ``config.json``.

    Attributes:
        ours: name in this package's configuration, or of an intermediate value for other fields; empty if only checked.
        names: published names, the first that is set counts; a dot denotes a nested object.
        kind: type of the published value, possibly with limits.
        default: value if no name is set, or a function of the checkpoint and the preceding fields.
        shifts: by name, an offset to add to each of a list of published numbers.
        read: replaces all of the above: computes the value from the checkpoint and the preceding fields.
        needed: whether to read the field for this checkpoint.
        encode: converts the value back to the published value, before shifts.
    """

    ours: str
    names: tuple[str, ...] = ()
    kind: Any = Any
    default: Any = REQUIRED
    shifts: Mapping[str, int] = field(default_factory=dict)
    read: Callable[[Source, Values], Any] | None = None
    needed: Callable[[Source, Values], bool] = lambda source, values: True
    encode: Callable[[Any, Written], Any] = lambda value, written: value

    def value(self, source: Source, values: Values) -> Any:
        """The converted value; ``OWN`` means the configuration's default."""
        if not self.needed(source, values):
            return OWN
        if self.read is not None:
            return self.read(source, values)
        name, value = source.first(self.names)
        if value is None:
            if self.default is OWN:
                return OWN
            if self.default is not REQUIRED:
                value = self.default(source, values) if callable(self.default) else self.default
        value, shift = source.check(name, self.kind, value), self.shifts.get(name, 0)
        return [one + shift for one in value] if shift else value

    def written(self, name: str, written: Written) -> Any:
        """The published value under one of ``names``."""
        if not self.ours:
            return self.default
        ours = getattr(written.network, self.ours, self.default)
        value, shift = self.encode(ours, written), self.shifts.get(name, 0)
        return [one - shift for one in value] if shift else value


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Attributes:
        title: description of the checkpoint in messages.
        recognises: predicate on configuration, lower-case class names and tensor names.
        names: tensor names; a field called ``names`` overrides them.
        fields: fields of ``config.json``.
        prefixes: replacement tensor prefixes, used if any tensor of the checkpoint has them.
        prefix: optional prefix of field names.
        nested: nested objects of ``config.json``, whose fields override top-level fields.
        copies: unused copies of the target's tensors; ``required`` copies must be present.
        shared: like ``copies``, for checkpoints with ``original_lm_head``.
        prepare: preprocesses a checkpoint before it is read.
        like: other layouts that can be read as this layout.
    """

    title: str
    recognises: Callable[[Mapping[str, Any], list[str], set[str]], bool]
    names: Names
    fields: tuple[Field, ...]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    nested: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    prepare: Callable[[Source], None] = lambda source: None
    like: tuple[str, ...] = ()


def layer_names(ours: str, theirs: str, **more: str) -> dict[str, tuple[str, ...]]:
    """Names of a decoder layer's modules under prefixes, plus ``more``."""
    found = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "kv": ("self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "input_norm": ("input_layernorm",),
        "post_norm": ("post_attention_layernorm",),
        **{module: (name,) for module, name in more.items()},
    }
    return {f"{ours}{module}": tuple(f"{theirs}{name}" for name in some) for module, some in found.items()}


def published_names(
    parameters: Iterable[str], names: Names, prefixes: Mapping[str, str] = MappingProxyType({}), layers: int = 1
) -> dict[str, list[str]]:
    """Map each parameter to the published parameters that it stacks.

    Args:
        prefixes: replacements of published prefixes.
        layers: number of layers in the configuration.
    """
    parts: dict[str, list[str]] = {}
    for ours in parameters:
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", ours)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", ours)
        module, _, leaf = pattern.rpartition(".")
        given = {"odd": 2 * int(numbers[-1]) + 1 if numbers else 0, "layers": layers}
        if pattern in names:
            some = [name.format(*numbers, **given) for name in names[pattern]]
        elif module in names:
            some = [f"{name.format(*numbers, **given)}.{leaf}" for name in names[module]]
        else:
            some = [ours]
        for before, after in prefixes.items():
            some = [f"{after}{name.removeprefix(before)}" if name.startswith(before) else name for name in some]
        parts[ours] = some
    return parts


def rope_parameters(source: Source, values: Values) -> dict[str, Any]:
    """Rotary parameters of a published configuration, as transformers' ``rope_parameters``."""
    rope: dict[str, Any] = {}
    config = source.fields
    for key in ("rope_scaling", "rope_parameters"):
        rope |= config[key] if isinstance(config.get(key), dict) else {}
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    usual = rope.get("rope_theta", 1e6 if config.get("model_type") == "qwen2_vl" else 10000.0)
    theta = source.check(
        "rope_theta", PositiveFloat, usual if config.get("rope_theta") is None else config["rope_theta"]
    )
    if kind not in ("default", "mrope") and config.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {**rope, "rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}


def _written_rope(written: Written) -> dict[str, Any]:
    network = written.network
    return {"rope_type": "default", "rope_theta": network.rope_theta, **network.rope}


def _plain_theta(source: Source, values: Values) -> float:
    rope = values["rope"]
    if values["layers"] != 1 or rope["rope_type"] != "default":
        raise UserError(
            f"{source.where}/config.json: expected one layer with plain rotary positions, received {values['layers']} "
            f"with rope scaling {rope['rope_type']!r}"
        )
    return float(rope["rope_theta"])


LAYER = (
    Field("hidden_size", ("hidden_size",), PositiveInt),
    Field("heads", ("num_attention_heads",), PositiveInt),
    Field("kv_heads", ("num_key_value_heads",), PositiveInt, lambda s, v: v["heads"]),
    Field("head_dim", ("head_dim",), default=lambda s, v: v["hidden_size"] // v["heads"]),
    Field("mlp", ("intermediate_size",), PositiveInt),
    Field("norm_eps", ("rms_norm_eps",), PositiveFloat, OWN),
    Field("", ("hidden_act",), Literal["silu"], "silu"),
    Field("halves", ("rope_is_neox_style", "is_neox_style"), bool, True),  # False rotates adjacent features together
)
ROPES = ("rope_parameters", "rope_scaling", "rope_theta")
ROPE = Field("rope", ROPES, read=rope_parameters, encode=lambda value, written: _written_rope(written))
VOCABULARY = Field("vocab_size", ("vocab_size",), PositiveInt | None, None)
NO_BIAS = (Field("", ("attention_bias",), UNSET, False), Field("", ("mlp_bias",), UNSET, False))

# EAGLE, MSD, ViSpec

EMBEDDING = "embed_tokens.weight"
_QKV = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
_EAGLE_NAMES = layer_names("", "layers.0.")
_HARMLESS = {"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"}  # of old releases of transformers
_EAGLE_TENSORS = {EMBEDDING, *_HARMLESS, "fc.weight", "fc.bias", *(f"{name}.bias" for name in _QKV)} | {
    f"{name}.weight" for some in _EAGLE_NAMES.values() for name in some
}
_TEXT_MODELS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()


def _is_eagle(config: Mapping[str, Any], classes: list[str], names: set[str]) -> bool:
    own = names - {EMBEDDING, *_HARMLESS}
    return "fc.weight" in names or (bool(own) and names <= _EAGLE_TENSORS)


def _zero_biases(source: Source) -> None:
    """Add zero biases that files omit, like EAGLE heads for Llama-3."""
    for name in ("fc", "img_fc"):
        if source.config.get("bias") is False and (rows := source.rows(f"{name}.weight")):
            source.tensors.setdefault(f"{name}.bias", source.tensors[f"{name}.weight"].new_zeros(rows))


def _eagle(**more: Any) -> Any:
    """A row of the layouts that extend EAGLE's.

    Args:
        **more: attributes of ``Layout`` that differ; ``whole``: predicate for configurations of a complete layer, with
            norm and biases, regardless of the tensors.
    """
    is_whole = more.pop("whole", lambda source: False)
    norm, biases = "layers.0.input_layernorm.weight", [f"{name}.bias" for name in _QKV]
    has_bias = lambda source: bool(source.config.get("qkv_bias")) or any(name in source.tensors for name in biases)  # noqa: E731
    row: dict[str, Any] = {
        "names": _EAGLE_NAMES,
        "fields": (
            *LAYER,
            Field("layers", ("num_hidden_layers",), PositiveInt, 1),
            ROPE,
            Field("rope_theta", ("rope_theta",), read=_plain_theta),
            Field("", ("attention_bias",), default=False),
            Field("input_norm", read=lambda s, v: is_whole(s) or norm in s.tensors),
            Field("qkv_bias", read=lambda s, v: is_whole(s) or has_bias(s)),
            Field("vocab_size", ("vocab_size",), PositiveInt, lambda s, v: s.rows(EMBEDDING) or None),
        ),
        "copies": (EMBEDDING,),
        "prepare": _zero_biases,
        "like": ("eagle", "msd", "vispec"),
    }
    return Layout(**{**row, **more})


# EAGLE-3, EAGLE-4, P-EAGLE

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # ids of layers whose inputs are read
_OUTPUT_IDS = (*(f"eagle_config.{name}" for name in _IDS), "aux_hidden_states_layer_ids")  # whose outputs are read
_CANDIDATES = "efficient_lm_head"  # EAGLE-4's low-rank head
_RETRIEVED = 256  # candidates per state if the configuration has no number
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _is_eagle4(source: Source, values: Values | None = None) -> bool:
    return source.has(_CANDIDATES) or source.named("eagle4")


def _is_parallel(source: Source, values: Values) -> bool:
    return "mask_hidden" in source.tensors or source.named("peagle")


def _window_of_all(source: Source, values: Values) -> int:
    """Sliding window of all layers; 0 without. Flat configurations of EAGLE-3 copy the target's window: ignored."""
    known, layers = _is_eagle4(source) or "transformer_layer_config" in source.config, values["layers"]
    kinds = list((source.fields.get("layer_types") if known else None) or ())[:layers]
    if _is_eagle4(source) and not kinds and source.fields.get("sliding_window") is not None:
        kinds = [_SLIDING]
    sliding = {kind == _SLIDING for kind in kinds}
    if len(sliding) > 1:
        raise UserError(f"{source.where}/config.json: layer_types must be all {_SLIDING} or none: got {kinds}")
    return source.check("sliding_window", PositiveInt, source.fields.get("sliding_window")) if sliding == {True} else 0


def _candidates(source: Source, values: Values) -> int:
    given = source.config.get("candidate_head")
    number = (given if isinstance(given, dict) else source.config).get("num_candidates", _RETRIEVED)
    return min(source.check("num_candidates", PositiveInt, number), values["draft"])


_EAGLE3_FIELDS = (
    *LAYER,
    *NO_BIAS,
    Field("", ("qkv_bias",), UNSET, False),
    Field("vocab_size", ("vocab_size",), PositiveInt),
    Field(
        "target_size",
        ("target_hidden_size",),
        PositiveInt,
        lambda s, v: v["hidden_size"],
        encode=lambda value, written: None if written.network.source == written.network.hidden_size else value,
    ),
    Field("draft", ("draft_vocab_size",), PositiveInt, lambda s, v: s.rows("lm_head.weight") or v["vocab_size"]),
    Field(
        "reads",
        (*_IDS, *_OUTPUT_IDS),
        list[int],
        lambda s, v: [],
        dict.fromkeys(_OUTPUT_IDS, 1),
        encode=lambda value, written: written.network.inputs_read(written.decoder.num_hidden_layers),
    ),
    Field("states", read=lambda s, v: len(v["reads"]) or 3),
    Field("layers", ("num_hidden_layers",), PositiveInt, 1),
    Field("head", read=lambda s, v: v["draft"] * (_is_eagle4(s) or "lm_head.weight" in s.tensors)),
    Field("embedding", read=lambda s, v: v["vocab_size"] * (EMBEDDING in s.tensors)),
    ROPE,
    *(Field(name, (name, f"eagle_config.{name}"), Annotated[Any, AfterValidator(bool)], False) for name in SWITCHES),
    Field("mask_token_id", ("mask_token_id", "ptd_token_id", "pard_token"), NonNegativeInt, needed=_is_parallel),
    Field("window", read=_window_of_all),
    Field(
        "head_rank",
        read=lambda s, v: s.rows(f"{_CANDIDATES}_down_proj.weight") or 1,  # if missing, a later check names it
        needed=_is_eagle4,
    ),
    Field("candidates", ("num_candidates", "candidate_head.num_candidates"), read=_candidates, needed=_is_eagle4),
)

# DFlash, JetSpec, DSpark

_CAUSAL = ("causal_head", "causal", "is_causal")


def _sliding(source: Source, values: Values) -> list[int]:
    """Layers with a sliding window."""
    layers = values["layers"]
    kinds = source.fields.get("layer_types") or [_FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {_SLIDING, _FULL}:
        raise UserError(
            f"{source.where}/config.json: layer_types must be {layers} of {_SLIDING} and {_FULL}: got {kinds!r}"
        )
    return [number for number, kind in enumerate(kinds) if kind == _SLIDING]


def _causal(source: Source, values: Values) -> list[int]:
    """Layers that are causal inside a block: all, none, or sliding-window layers. The default follows the training code
    (vllm-project/speculators, z-lab/dflash, deepseek-ai/DeepSpec, transformers)."""
    if (name := next((name for name in _CAUSAL if source.fields.get(name) is not None), None)) is not None:
        return list(range(values["layers"])) if source.flag(name, False) else []
    plain = "dflash2" if "speculators_model_type" in source.config else "dspark"
    non_causal = source.named(plain) or source.named("museglimmer")
    return [] if source.flag("sliding_window_non_causal", non_causal) else values["sliding"]


def _nested_dspark(source: Source) -> bool:
    """Whether this is a DSpark drafter of speculators, whose defaults differ from flat configurations."""
    return source.named("dspark") and "speculators_model_type" in source.config


def _nested_dflash2(source: Source) -> bool:
    return source.named("dflash2") and "speculators_model_type" in source.config


def _is_xpress(source: Source) -> bool:
    return source.named("xpress")


def _confidence(source: Source, values: Values) -> str:
    nested = _nested_dspark(source)
    if not source.flag("enable_confidence_head", nested or bool(source.fields.get("confidence_head_alpha"))):
        return "none"
    return "markov" if source.flag("confidence_head_with_markov", values["markov_rank"] > 0) else "state"


def _has_markov(source: Source, values: Values) -> bool:
    return values["markov_rank"] > 0


_DFLASH_FIELDS = (
    *LAYER,
    *NO_BIAS,
    *(Field("", (name,), UNSET, False) for name in ("fc_layernorm", "use_swa", "shift_label")),
    Field("", ("attention_mode",), Literal["gqa"], "gqa"),
    Field("", ("projector_type",), Literal["dflash", "dspark"], "dflash"),
    Field("layers", ("num_hidden_layers",), PositiveInt),
    ROPE,
    VOCABULARY,
    Field("block_size", ("block_size",), PositiveInt),
    Field("mask_token_id", ("mask_token_id", "dflash_config.mask_token_id"), NonNegativeInt),
    Field(
        "target_layer_ids",
        ("target_layer_ids", "aux_hidden_state_layer_ids", "dflash_config.target_layer_ids"),
        list[int],
        shifts={"aux_hidden_state_layer_ids": -1},  # layers whose inputs are read
    ),
    Field(
        "sliding",
        ("layer_types",),
        read=_sliding,
        encode=lambda value, written: [_SLIDING if n in value else _FULL for n in range(written.network.layers)],
    ),
    Field(
        "window",
        ("sliding_window",),
        PositiveInt,
        needed=lambda s, v: bool(v["sliding"]),
        encode=lambda value, written: value or None,
    ),
    Field("causal", ("sliding_window_non_causal", *_CAUSAL), read=_causal, encode=lambda value, written: not value),
    Field("own", ("draft_vocab_size",), PositiveInt | None, lambda s, v: s.rows("lm_head.weight") or None),
    Field(
        "head",
        ("draft_vocab_size",),
        read=lambda s, v: (v["own"] or 0) * ("lm_head.weight" in s.tensors),
        encode=lambda value, written: value or written.decoder.vocab_size,
    ),
    Field("draft", read=lambda s, v: v["head"]),
    Field("embedding", read=lambda s, v: s.rows(EMBEDDING)),
    Field("from_anchor", ("sample_from_anchor", "query_zero_predicts_next"), bool, lambda s, v: s.named("dspark")),
    Field(
        "markov_rank",
        ("markov_rank", "xpress_rank"),
        NonNegativeInt,
        lambda s, v: 256 * (_nested_dspark(s) or _is_xpress(s)),
    ),
    *(
        Field(name, (name, f"dflash_config.{name}"), Annotated[int, Ge(least)], default)
        for name, least, default in (
            ("conv_kernel_size", 0, lambda s, v: 2 * _nested_dflash2(s)),
            ("conv_group_size", 1, 16),
            ("selector_rank", 0, lambda s, v: 256 * _nested_dflash2(s)),
            ("selector_top_k", 1, 16),
        )
    ),
    Field(
        "", ("vocab_size",), PositiveInt, needed=lambda s, v: bool(v["head"] or v["markov_rank"] or v["selector_rank"])
    ),
    Field("selector_tokens", read=lambda s, v: v["vocab_size"], needed=lambda s, v: v["selector_rank"] > 0),
    Field(
        "markov_type",
        ("markov_head_type",),
        Literal["vanilla", "gated", "rnn"],
        "vanilla",
        needed=lambda s, v: v["markov_rank"] > 0 and not _is_xpress(s),
    ),
    Field("markov_type", read=lambda s, v: "xpress" if _is_xpress(s) else OWN),
    Field("refiner_ratio", ("xpress_mlp_ratio",), PositiveInt, 2),
    Field("", ("num_jacobi_passes",)),  # for chains only
    Field("markov_inputs", read=lambda s, v: v["vocab_size"], needed=_has_markov),
    Field("markov_outputs", read=lambda s, v: v["head"] or v["vocab_size"], needed=_has_markov),
    Field("confidence", ("enable_confidence_head", "confidence_head_with_markov"), read=_confidence),
)

# Medusa, Hydra

HEAD_VOCABULARY = Annotated[int, Interval(ge=1, le=2**24)] | None
_HEAD_SIZES = ("hidden_size", "truncated_vocab_size", "max_paths", "topk", "num_lookahead_tokens")  # in the tensors
_PREFIX = "prefix_embeding_layer"  # sic
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


def _medusa_names(source: Source) -> Names:
    return _VLLM if source.has("blocks.") else _ORIGINAL


def _hydra_names(source: Source) -> Names:
    return _PREFIX_MLP if source.fields.get("head_arch") == "prefix-mlp" else _MLP


def _take_token_map(source: Source) -> None:
    """Read the draft vocabulary of vLLM's layout, and select its rows from full-size output layers."""
    source.tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in source.tensors.items()}
    vocab = source.check("vocab_size", HEAD_VOCABULARY, source.fields.get("vocab_size"))
    source.draft_ids = ids = take_draft_ids(source.tensors, vocab or 0, Path(source.where), "token_map")
    for name in source.tensors if ids is not None else ():
        if name.startswith("lm_heads.") and rows_of(source.tensors, name) == vocab:
            source.tensors[name] = source.tensors[name][ids]


def _head_count(source: Source, values: Values) -> int:
    first = values["names"]["heads.#.#.linear"][0].partition("{0}")[0]
    found = (re.match(re.escape(first) + r"(\d{1,4})\.", name) for name in source.tensors)
    return max([values["num_heads"], *(int(match[1]) + 1 for match in found if match)])


def _head_rows(source: Source, values: Values, *ours: str) -> int:
    """Rows of the heads' parameters with these names; {} is the head's number."""
    parameters = [name.format(head) for name in ours for head in range(values["heads"])]
    parts = published_names(parameters, values["names"], layers=values["layers"])
    return source.rows(*(name for some in parts.values() for name in some))


def _own_rows(source: Source, values: Values) -> int:
    """Rows of each head's own output layer; 0 if heads use the target's."""
    rows, hydra = _head_rows(source, values, "outputs.{}.weight"), "heads.#.#.residual" in values["names"]
    if not hydra and (not rows or values["original_lm_head"]):
        return 0
    return max(rows, 1) if source.draft_ids is None else len(source.draft_ids)


def _prefix_layer(source: Source, values: Values) -> dict[str, Any]:
    """Shape of Hydra's decoder layer, from its tensors; the head size is the largest that fits, up to 128."""
    if values["names"] is not _PREFIX_MLP:
        return {}
    parts = ("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    names = ([f"{_PREFIX}.layers.0.{one}.weight" for one in some] for some in parts)
    queries, keys, mlp = (max(2, source.rows(*some)) for some in names)
    queries += -queries % keys  # a missing or misshapen tensor raises later
    size = gcd(keys, 128)
    return asdict(RotaryShape(values["hidden_size"], queries // size, keys // size, size, mlp))


def _heads(names: Callable[[Source], Names], **more: Any) -> Any:
    """A row of ``LAYOUTS`` for heads on the target's last state."""
    linears = [f"heads.{{}}.{layer}.linear.weight" for layer in range(64)]
    row: dict[str, Any] = {
        "names": {},
        "fields": (
            Field("names", read=lambda s, v: names(s)),
            Field("num_heads", ("num_heads",), Annotated[int, Interval(ge=1, le=64)], 1),
            Field("num_layers", ("num_layers",), Annotated[int, Interval(ge=1, le=64)], 1),
            Field("num_hidden_layers", ("num_hidden_layers",), Annotated[int, Interval(ge=1, le=64)], 1),
            Field("layers", read=lambda s, v: max(v["num_layers"], v["num_hidden_layers"])),
            Field("vocab_size", ("vocab_size",), HEAD_VOCABULARY, None),
            Field("fc_bias", ("fc_bias",), bool, False),
            Field("original_lm_head", ("original_lm_head",), bool, False),
            Field("", ("logit_scale",), Annotated[float, Interval(ge=1, le=1)], 1.0),
            Field("", ("head_arch",), Literal["mlp", "prefix-mlp"], "mlp"),
            Field("grounded", ("grounded_heads",), bool, False),
            Field("", ("hidden_state_offset",), Literal[0], 0),
            Field("", _HEAD_SIZES),
            Field("heads", read=_head_count),
            Field("hidden_size", read=lambda s, v: _head_rows(s, v, *linears[: v["layers"]])),
            Field("bias", read=lambda s, v: v["fc_bias"] or v["names"] is not _VLLM),
            Field("head", read=_own_rows),
            Field("head_bias", read=lambda s, v: "heads.#.#.residual" in v["names"]),
            Field("prefix", read=_prefix_layer),
        ),
        "copies": ("input_embed_fn.weight", f"{_PREFIX}.embed_tokens.weight"),
        "shared": ("lm_head.weight", "lm_heads.0.weight"),
        "prepare": _take_token_map,
    }
    return Layout(**{**row, **more})


# the table


def _is_kangaroo(config: Mapping[str, Any], classes: list[str], names: set[str]) -> bool:
    others = any(name.startswith(("fc.", "layers.0.mlp.")) for name in names)
    return not others and any(f"{part}.weight" in names for part in _QKV)


def _is_eagle3(config: Mapping[str, Any], classes: list[str], names: set[str]) -> bool:
    return bool(names & {"d2t", "t2d", "mask_hidden"}) or any(
        name.startswith("midlayer.") or "hidden_norm" in name for name in names
    )


_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_DFLASH_CLASSES = ("dflash", "dspark", "xpress", "museglimmerassistant")

LAYOUTS: Mapping[str, Layout] = {  # in order of precedence
    "dflash": Layout(
        "a DFlash drafter",
        lambda config, classes, names: (
            "dflash_config" in config or any(part in name for part in _DFLASH_CLASSES for name in classes)
        ),
        {
            **layer_names("layers.#.", "layers.{0}.", q="self_attn.q_proj", **_HEAD_NORMS),
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
        },
        _DFLASH_FIELDS,
        prefixes={"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
        nested=("transformer_layer_config", "dflash_config"),
    ),
    "medusa": _heads(
        _medusa_names,
        title="Medusa heads",
        recognises=lambda config, classes, names: "medusa_num_heads" in config or config.get("model_type") == "medusa",
        prefix="medusa_",
    ),
    "hydra": _heads(
        _hydra_names,
        title="Hydra heads",
        recognises=lambda config, classes, names: "hydra_num_heads" in config or config.get("model_type") == "hydra",
        prefix="hydra_",
    ),
    "eagle3": Layout(
        "an EAGLE-3 head",
        _is_eagle3,
        layer_names("layers.#.", "layers.{0}.", embed_norm="input_layernorm", hidden_norm="hidden_norm"),
        _EAGLE3_FIELDS,
        prefixes={"layers.0.": "midlayer."},
        nested=("transformer_layer_config",),
    ),
    "vispec": _eagle(
        title="a ViSpec drafter",
        recognises=lambda config, classes, names: any(name.startswith(("imadpt.", "img_fc.")) for name in names),
        names={
            **_EAGLE_NAMES,
            "adaptor.queries": ("imadpt.q",),
            "adaptor.key": ("imadpt.k_proj",),
            "adaptor.value": ("imadpt.v_proj",),
            "adaptor.out": ("imadpt.o_proj",),
        },
    ),
    "kangaroo": Layout(
        "a Kangaroo adapter",
        _is_kangaroo,
        layer_names("layers.#.", "layers.0."),
        (
            *LAYER,
            Field("mlp", read=lambda s, v: 0),
            Field("", ("num_hidden_layers",), Literal[1], 1),
            Field("", ROPES),
            VOCABULARY,
        ),
    ),
    "eagle": _eagle(
        title="an MSD or EAGLE-1/2 drafter",
        recognises=lambda config, classes, names: (
            _is_eagle(config, classes, names) and config.get("model_type") in _TEXT_MODELS
        ),
    ),
    "msd": _eagle(
        title="an MSD or EAGLE-1/2 drafter",
        recognises=_is_eagle,
        required=(EMBEDDING,),
        whole=lambda source: source.config.get("model_type") == "qwen2_vl",  # complete; others lack the first norm
    ),
}
REFUSED = {
    "domino": "a Domino drafter, whose tokens pass through a recurrent cell",
    "lilicorr": "a LiLiCorr drafter, whose candidates pass through a transformer of their own",
}
_USE_INSTEAD = "use an MSD or EAGLE checkpoint of this target, or train a drafter with mmspec train"


def _class_names(config: Mapping[str, Any], *more: Any) -> list[str]:
    named = [*(config.get("architectures") or []), config.get("speculators_model_type"), *more]
    return [str(name).lower() for name in named if name]


def layout_of(config: Mapping[str, Any], names: set[str]) -> str | None:
    """Identify a layout by configuration and tensor names: a key of ``LAYOUTS`` or ``REFUSED``, or None if unknown."""
    classes = _class_names(config)
    refused = (other for other in REFUSED if any(other in name for name in classes))
    known = (name for name, layout in LAYOUTS.items() if layout.recognises(config, classes, names))
    return next(refused, None) or next(known, None)


def recognise(folder: Path) -> str | None:
    """Identify the layout of a folder without ``mmspec_drafter``, see ``layout_of``; None if unknown.

    Raises:
        UserError: the weights cannot be read.
    """
    config = read_config(folder)
    if config is None or "mmspec_drafter" in config:
        return None
    return layout_of(config, {name for file in weight_files(folder) for name in tensor_names(file)})


def recogniser(*layouts: str) -> Callable[[Path], bool]:
    """Predicate for folders with one of these layouts; for ``DrafterSpec.recognises``."""
    return lambda folder: recognise(folder) in layouts


# reading

INERT = re.compile(
    "|".join(GenerationConfig().to_dict())
    + r"""
    # origin and tokens
    | _?name_or_path | base_model_name.* | architectures | auto_map | modal_type | .*(model_type|version)
    | (torch_)?dtype | torchscript | use_bfloat16 | _?attn_impl\w* | .*token_(ids?|index) | id2label | label2id
    # training and use
    | .*dropout.* | initializer_.* | pretraining_tp | embed_requires_grad | (max|num)_anchors | confidence_head_alpha
    | .*loss_.* | (un)?freeze_.* | tune_.* | gradient_checkpointing\w* | (use_)?return_dict | use_cache
    | output_(attentions|hidden_states) | problem_type | chunk_size_feed_forward | is_(encoder_)?decoder
    | speculators_config | parallel_draft_step | runtime_block_size
    # what tensors show, and what only targets have
    | max_(position_embeddings|window_layers|sequence_length|seq_len) | num_target_layers | target_hidden_size
    | (use_)?sliding_window | layer_types | tie_\w*embeddings? | has_lm_head | num_eagle_features | next_layer_regular
    | ((attention|mlp|qkv|fc|conv|lm_head|(add_swa_)?attention_sink)_)?bias
    | use_(aux_hidden_state|input_layernorm_in_first_layer|last_layernorm)
    | ((use_)?mm|image|video|vision|audio|mtp|moe|mamba|linear_(num|key|value|conv))_.* | .*expert.* | text_config
    | attn_output_gate | output_gate_type | full_attention_interval | decoder_sparse_step | mlp_only_layers
    | norm_topk_prob
    # rotary positions, of which each kind reads its own
    | (rope_)?type | rope_theta | (attention_)?factor | beta_(fast|slow) | mscale\w* | truncate | finetuned | mrope_\w+
    | original_max_position_embeddings | (low|high)_freq_factor
    """,
    re.VERBOSE,
)
"""Fields of published configurations that do not affect the network's outputs."""


def read(folder: Path, layout: str, kind: type[Any], network: Callable[[Any], nn.Module]) -> Published:
    """Read a published drafter; arguments as for ``convert``.

    Raises:
        UserError: the files cannot be read, or have another layout.
    """
    config, tensors = read_json(folder / "config.json"), dict[str, Tensor]()
    for file in weight_files(folder):
        tensors |= load_weights(file, LAYOUTS[layout].copies)
    found = layout_of(config, set(tensors))
    if found in REFUSED:
        raise UserError(f"{folder}: expected {LAYOUTS[layout].title}, received {REFUSED[found]}: {_USE_INSTEAD}")
    if found is None:
        received = ", ".join(sorted(tensors)[:4]) or "no weights"
        raise UserError(f"{folder}: expected the tensors of {LAYOUTS[layout].title}, received {received}")
    if found not in (layout, *LAYOUTS[layout].like):
        raise UserError(
            f"{folder}: expected {LAYOUTS[layout].title}, received {LAYOUTS[found].title}: use {found}:{folder}"
        )
    return convert(config, tensors, layout, kind, network, str(folder))


def convert(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layout: str,
    kind: type[Any],
    network: Callable[[Any], nn.Module],
    where: str,
) -> Published:
    """Validate a published drafter and convert it to a network of this package.

    Args:
        config: contents of ``config.json``.
        tensors: published tensors; may be on the meta device.
        layout: key of ``LAYOUTS``.
        kind: configuration class to convert to.
        network: network class to convert to.
        where: name of the checkpoint in messages.

    Raises:
        UserError: the network is not supported, or a tensor is missing, unexpected or does not match ``config.json``.
    """
    row = LAYOUTS[layout]
    check_fields(config, row, where)
    source = Source(config, tensors, row, where)
    values: Values = {}
    for one in row.fields:
        if (value := one.value(source, values)) is not OWN and one.ours:
            values[one.ours] = value
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    ours: Any = read_options(
        kind, {name: value for name, value in values.items() if name in known}, f"{where}/config.json"
    )
    shape: LayerShape = getattr(ours, "layer", ours)
    if isinstance(shape, RotaryShape):
        rotary_of(shape)  # raises
    if not values.get("halves", True):
        _pair_halves(source.tensors, shape.head_dim)
    names = values.get("names", row.names)
    prefixes = row.prefixes if any(source.has(after) for after in row.prefixes.values()) else {}
    state = parameters(network, ours)
    parts = published_names(state, names, prefixes, values.get("layers", 1))
    shapes, optional = _further(source, row, values, ours)
    check_tensors(source.tensors, shapes_of(state, parts, shape) | shapes, f"layout {layout}", where, optional)
    vocab, draft = values.get("vocab_size") or values.get("head") or None, values.get("draft")
    if draft:
        source.draft_ids = draft_tokens(source.tensors, draft, vocab or 0, where)
    return ours, stack(source.tensors, parts), source.draft_ids, _verifier(config, ours, vocab)


def check_fields(config: Mapping[str, Any], row: Layout, where: str) -> None:
    """Check that no ignored field of ``config.json`` may affect outputs; values 0, 1, false and empty are accepted.

    Raises:
        UserError: a field is neither read by the layout nor listed in ``INERT``.
    """
    paths = [name.split(".") for one in row.fields for name in one.names]
    known = {part for path in paths for part in path}
    inside = {*row.nested, *ROPES, *(path[0] for path in paths if len(path) > 1)}

    def unread(config: Mapping[str, Any]) -> Iterable[str]:
        for name, value in config.items():
            bare, neutral = name.removeprefix(row.prefix), not value or (value == 1 and value is not True)
            if bare in inside and isinstance(value, Mapping):
                yield from unread(value)
            elif not (bare in known or INERT.fullmatch(name) or neutral):
                yield f"{name} {value!r:.60}"

    if found := list(unread(config)):
        raise UserError(
            f"{where}/config.json: expected {row.title} whose fields are known, received {', '.join(found)}: remove "
            "fields that its network does not use"
        )


def _pair_halves(tensors: dict[str, Tensor], size: int) -> None:
    """Permute query and key features of heads of ``size`` from adjacent pairing to half pairing for rotary positions;
    attention scores stay the same."""
    order = torch.arange(size).view(-1, 2).t().flatten()
    for name, tensor in tensors.items():
        if re.search(r"\.self_attn\.[qk]_(proj|norm)\.(weight|bias)$", name) and len(tensor) % size == 0:
            tensors[name] = tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)


def _further(source: Source, row: Layout, values: Values, ours: Any) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of tensors that are not parameters, and names of optional tensors."""
    vocab, draft = values.get("vocab_size"), values.get("draft")
    shared = row.shared if values.get("original_lm_head") else ()
    copies = {*row.required, *({*row.copies, *shared} & source.tensors.keys())}
    shapes: dict[str, tuple[int, ...]] = {
        name: ((vocab if name == EMBEDDING else source.rows(name)) or 0, ours.hidden_size) for name in copies
    }
    if draft:
        shapes |= {"d2t": (draft,), "t2d": (vocab or 0,)}
    return shapes, {"t2d"} if draft != vocab else {"d2t", "t2d"}


def _verifier(config: Mapping[str, Any], ours: Any, vocab: int | None) -> dict[str, Any]:
    named = (config.get("speculators_config") or {}).get("verifier") or {}
    return {
        "name_or_path": str(named.get("name_or_path") or config.get("base_model_name_or_path") or ""),
        "architectures": named.get("architectures") or [],
        "model_type": config.get("target_model_type"),
        "hidden_size": getattr(ours, "source", ours.hidden_size),
        "vocab_size": vocab,
    }


def check_target(verifier: Mapping[str, Any], target: Any) -> None:
    """Check that a target matches the known properties of a published drafter's target; raises ``UserError`` if not.

    A target may have more tokens than the drafter, like transformers' LLaVA-1.5 (32064, drafter 32000), but fewer than
    twice as many, which would be another tokenizer.

    Args:
        verifier: ``hidden_size``, ``vocab_size``, and if known ``name_or_path``, ``architectures`` and ``model_type``.
    """
    width, vocab, here = verifier["hidden_size"], verifier["vocab_size"], target.config
    model, expected = type(target.model).__name__, [f"hidden size {width}" + (f" and {vocab} tokens" if vocab else "")]
    types = {here.model_type, target.model.config.model_type}
    received = [f"hidden size {here.hidden_size} and {here.vocab_size} tokens"]
    fits = width == here.hidden_size and (vocab is None or here.vocab_size / 2 < vocab <= here.vocab_size)
    if (kind := verifier.get("model_type")) and kind not in types:
        fits, expected = False, [*expected, f"of type {kind}"]
        received = [*received, f"of type {target.model.config.model_type}"]
    if (classes := verifier.get("architectures")) and model not in classes:
        fits, expected = False, [*expected, f"of class {', '.join(classes)}"]
    if not fits:
        name = verifier.get("name_or_path") or "a target"
        raise UserError(
            f"the drafter was trained for {name} of {', '.join(expected)}: got {model} with {', '.join(received)}"
        )


def draft_tokens(tensors: Mapping[str, Tensor], draft: int, vocab: int, where: str) -> Tensor | None:
    """Target token of each draft token, from ``d2t``; None for the identity."""
    if "d2t" not in tensors or tensors["d2t"].device.type == "meta":
        return None
    ids = torch.arange(draft) + tensors["d2t"].long()
    if bool(((ids < 0) | (ids >= vocab)).any()) or len(ids.unique()) < draft:
        raise UserError(f"{where}: i + d2t[i] must be distinct tokens below {vocab}")
    if "t2d" in tensors:
        marked = tensors["t2d"].bool()
        if int(marked.sum()) != draft or not bool(marked[ids].all()):
            raise UserError(f"{where}: t2d must mark exactly the tokens i + d2t[i]: it marks {int(marked.sum())}")
    return None if draft == vocab and bool((tensors["d2t"] == 0).all()) else ids


def parameters(kind: Callable[[Any], nn.Module], config: Any) -> dict[str, Tensor]:
    """Parameters of a network of class ``kind``, on the meta device."""
    with torch.device("meta"):
        return kind(config).state_dict()


def stack(tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Stack published tensors into parameters."""
    return {
        name: torch.cat([tensors[one] for one in some]) if len(some) > 1 else tensors[some[0]]
        for name, some in parts.items()
    }


def unstack(state: Mapping[str, Tensor], parts: Mapping[str, Sequence[str]], layer: LayerShape) -> dict[str, Tensor]:
    """Split parameters into published tensors, the inverse of ``stack``.

    Args:
        layer: layer shape, to split three parts into queries, keys and values; two parts have the same size.
    """
    inner, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    found: dict[str, Tensor] = {}
    for ours, some in parts.items():
        rows = [inner, keys, keys] if len(some) == 3 else [len(state[ours]) // len(some)] * len(some)
        found |= zip(some, (part.clone() for part in state[ours].split(rows)), strict=True)
    return found


def shapes_of(
    state: Mapping[str, Tensor], parts: Mapping[str, Sequence[str]], layer: LayerShape
) -> dict[str, tuple[int, ...]]:
    """Shapes of the published tensors; arguments as for ``unstack``."""
    return {name: tuple(tensor.shape) for name, tensor in unstack(state, parts, layer).items()}


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
    where: str,
    optional: Collection[str] = (),
) -> None:
    """Check that there are exactly the tensors of a published layout.

    Args:
        what: name of the layout in messages.
        optional: tensors that may be missing.

    Raises:
        UserError: a tensor is missing, unknown, or has the wrong shape or dtype: ``d2t`` and ``t2d`` are integer or
            boolean, all others floating point.
    """
    harmless = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}  # of old releases of transformers
    missing = sorted(shapes.keys() - tensors.keys() - set(optional))
    unknown = sorted(tensors.keys() - shapes.keys() - harmless)
    if missing or unknown:
        found = [f"{what} {', '.join(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        raise UserError(f"{where}: expected exactly the tensors of {what}, received {'; '.join(found)}")
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor, integers = tensors[name], name in ("d2t", "t2d")
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{where}: {name} must be {shapes[name]} by config.json: got {tuple(tensor.shape)}")
        floating = tensor.is_floating_point() and tensor.element_size() > 1  # float8 is meaningless without its scales
        if floating == integers:
            wanted = "an integer or boolean" if integers else "a floating point"
            raise UserError(f"{where}: {name} must be {wanted} tensor: got {tensor.dtype}")


def rows_of(tensors: Mapping[str, Tensor], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors and tensors[name].dim() == 2 else None


# writing


@dataclass(frozen=True)
class Format:
    """Output format for another engine.

    Attributes:
        check: raises ``UserError`` if the format cannot describe a network's configuration.
        fields: fields of ``config.json``, in order: published names of the layout's fields, or a name with its value or
            a function of ``Written``; dots denote nested objects.
        prefixes, names: tensor prefixes and names, see ``Layout``; ``names`` default to the layout's.
        file: name of the weights file.
    """

    check: Callable[[Any], None]
    fields: tuple[str | tuple[str, Any], ...]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    file: str = "model.safetensors"


def _layer_fields(model_type: str, at: str = "", rope: bool = True) -> tuple[str | tuple[str, Any], ...]:
    """Decoder layer fields of a transformers configuration, in a nested object ``at``."""
    limit = lambda written: getattr(written.decoder, "max_position_embeddings", None) or OMITTED  # noqa: E731, absent with ALiBi
    found: tuple[str | tuple[str, Any], ...] = (
        *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
        *(("max_position_embeddings", limit), ("model_type", model_type)),
        *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
        *(("rope_parameters",) if rope else ()),
        *(("tie_word_embeddings", False), ("vocab_size", lambda written: written.decoder.vocab_size)),
    )
    if model_type == "qwen3":
        found += (
            "layer_types",
            "sliding_window",
            ("use_sliding_window", lambda written: bool(written.network.sliding)),
        )
    return tuple(f"{at}{one}" if isinstance(one, str) else (f"{at}{one[0]}", one[1]) for one in found)


def _speculators_fields(algorithm: Callable[[Any], str]) -> tuple[tuple[str, Any], ...]:
    """Fields common to all drafters in the format of vllm-project/speculators; ``algorithm`` names a network's type."""

    def settings(written: Written) -> dict[str, Any]:
        target, proposal = written.target, {"accept_tolerance": 0.0, "proposal_type": "greedy"}
        return {
            "algorithm": algorithm(written.network),
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "speculative_tokens": written.tokens, "verifier_accept_k": 1}],
            "verifier": {"architectures": target.architectures or [], "name_or_path": target.name_or_path},
        }

    return (
        ("speculators_config", settings),
        ("speculators_model_type", lambda written: algorithm(written.network)),
        ("tie_word_embeddings", False),
    )


def _check_head(layout: str) -> Callable[[Any], None]:
    """Check that an EAGLE-3 head can be written in a format."""

    def check(network: Any) -> None:
        if not network.head:
            raise UserError(f"format {layout} requires a head with an output layer of its own: it uses the target's")
        if network.outputs:
            raise UserError(
                f"format {layout} names layers whose inputs are read: the head reads outputs {network.reads}"
            )
        if network.window or network.candidates:
            received = "a sliding window" if network.window else "a low-rank output layer"
            raise UserError(f"format {layout} requires a head of EAGLE-3: the head has {received}")
        switches = [name for name in SWITCHES if getattr(network, name)]
        if layout == "eagle" and (switches or network.layers > 1 or network.mask_token_id is not None):
            received = ", ".join(switches) or (f"{network.layers} layers" if network.layers > 1 else "mask_hidden")
            raise UserError(f"format eagle requires one layer without further norms: the head has {received}")

    return check


def _check_eagle(network: Any) -> None:
    further = ("decoupled", "reads", "norm_output", "confidence", "input_norm", "qkv_bias")
    own = [name for name in (*further, "visual_states", "latents", "hide_visual") if getattr(network, name, False)]
    if own := [*own, *(["slots"] if network.slots > 1 else [])]:
        raise UserError(f"format eagle requires a layer of EAGLE-1: the drafter has {', '.join(own)}")


def _check_medusa(network: Any) -> None:
    if not network.head:
        raise UserError("formats of Medusa require output layers of the heads' own: they use the target's")


def _check_biased(network: Any) -> None:
    _check_medusa(network)
    if not network.bias:
        raise UserError("format medusa requires heads with biases: they have none")


def _check_z_lab(network: Any) -> None:
    _check_dflash2("z-lab", network)
    if network.head or network.embedding:
        raise UserError("format z-lab requires the target's output layer and embedding: the drafter has its own")
    if network.dspark or network.from_anchor:
        raise UserError("format z-lab requires a drafter without the heads and positions of DSpark: use speculators")
    if network.causal not in ([], network.sliding, list(range(network.layers))):
        raise UserError(
            f"format z-lab requires all layers to be causal, or none, or those with a window: got {network.causal}"
        )


def _check_dflash2(layout: str, network: Any) -> None:
    if bool(network.conv_kernel_size) != bool(network.selector_rank):
        has = "convolutions" if network.conv_kernel_size else "a selector"
        raise UserError(f"format {layout} requires convolutions and a selector, or neither: the drafter has {has} only")


def _check_blocks(network: Any) -> None:
    _check_dflash2("speculators", network)
    if _dflash_kind(network) == "xpress" and network.confidence != "none":
        raise UserError("format speculators requires an XPress drafter without a confidence head")
    if network.causal not in ([], network.sliding):
        raise UserError(f"format speculators requires layers with a window to be causal, or none: got {network.causal}")


def _if(condition: Callable[[Any], Any], value: Callable[[Any], Any]) -> Callable[[Written], Any]:
    """A value that is only written if a network's configuration meets ``condition``."""
    return lambda written: value(written.network) if condition(written.network) else OMITTED


def _is_causal(network: Any) -> bool:
    return len(network.causal) == network.layers


def _dflash_kind(network: Any) -> str:
    if network.dspark:
        return "xpress" if network.markov_type == "xpress" else "dspark"
    return "dflash2" if network.selector_rank else "dflash"


_DFLASH_WRITTEN = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "xpress": "XPressSpeculator",
}
"""Kinds of DFlash drafters and their classes."""


def _of(kind: str, at: str = "", **values: str | Callable[[Any], Any]) -> tuple[tuple[str, Any], ...]:
    """Fields of only one kind, in a nested object ``at``; values are configuration fields or functions."""
    read = {name: attrgetter(value) if isinstance(value, str) else value for name, value in values.items()}
    return tuple((f"{at}{name}", _if(lambda network: _dflash_kind(network) == kind, one)) for name, one in read.items())


_DFLASH2 = {name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}


def _rope_scaling(written: Written) -> dict[str, Any] | None:
    rope = {name: value for name, value in _written_rope(written).items() if name != "rope_theta"}
    return rope if rope["rope_type"] != "default" or "mrope_section" in rope else None


_NESTED = "transformer_layer_config."
_FLAT_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
_EAGLE_1 = Format(  # SafeAILab/EAGLE, for vLLM
    _check_eagle,
    (("architectures", ["LlamaForCausalLM"]), *_layer_fields("llama", rope=False), "rope_theta"),
)
FORMATS: Mapping[str, Mapping[str, Format]] = {
    "eagle3": {
        "speculators": Format(  # for vLLM
            _check_head("speculators"),
            (
                ("architectures", lambda w: ["PEagleDraftModel" if w.network.parallel else "Eagle3DraftModel"]),
                ("mask_token_id", _if(lambda network: network.parallel, lambda network: network.mask_token_id)),
                "eagle_aux_hidden_state_layer_ids",
                ("embed_requires_grad", False),
                *SWITCHES,  # even when false: vLLM and speculators have different defaults for the first
                *_speculators_fields(lambda network: "peagle" if network.parallel else "eagle3"),
                "target_hidden_size",
                *_layer_fields("llama", _NESTED),
                ("draft_vocab_size", lambda written: written.network.head),
            ),
        ),
        "eagle": Format(  # SafeAILab/EAGLE, for SGLang, without the switches of other projects
            _check_head("eagle"),
            (
                ("architectures", ["LlamaForCausalLMEagle3"]),
                *_layer_fields("llama", rope=False),
                ("target_hidden_size", _if(lambda one: one.source != one.hidden_size, lambda one: one.source)),
                ("rope_theta", lambda written: _written_rope(written)["rope_theta"]),
                ("rope_scaling", _rope_scaling),
                ("target_model_type", lambda written: written.target.model_type),
                *(("eagle_config.use_aux_hidden_state", True), _FLAT_IDS),
                ("draft_vocab_size", lambda written: written.network.head),
            ),
            {"layers.0.": "midlayer."},
        ),
    },
    "eagle": {"eagle": _EAGLE_1},
    "msd": {"eagle": _EAGLE_1},
    "medusa": {
        "vllm": Format(
            _check_medusa,
            (
                ("architectures", ["MedusaModel"]),
                ("model_type", "medusa"),
                *(("num_heads", lambda w: w.network.heads), ("num_hidden_layers", lambda w: w.network.layers)),
                ("hidden_size", lambda written: written.network.hidden_size),
                ("medusa_fc_bias", lambda written: written.network.bias),
                ("truncated_vocab_size", lambda written: written.network.head),
                ("vocab_size", lambda written: written.decoder.vocab_size),
            ),
            names=_VLLM,
        ),
        "medusa": Format(  # FasterDecoding/Medusa
            _check_biased,
            (
                ("base_model_name_or_path", lambda written: written.target.name_or_path),
                ("medusa_num_heads", lambda written: written.network.heads),
                ("medusa_num_layers", lambda written: written.network.layers),
            ),
            names=_ORIGINAL,
            file="medusa_lm_head.safetensors",
        ),
    },
    "dflash": {
        "z-lab": Format(
            _check_z_lab,
            (
                ("architectures", lambda w: [_DFLASH_WRITTEN[_dflash_kind(w.network)]]),
                *_layer_fields("qwen3"),
                *_of("dflash2", "dflash_config.", **_DFLASH2),
                *("block_size", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"),
                ("dflash_config.causal_head", _if(_is_causal, lambda network: True)),
                ("is_causal", _if(lambda one: one.causal != one.sliding, lambda network: bool(network.causal))),
                ("num_target_layers", lambda written: written.decoder.num_hidden_layers),
                ("rope_theta", lambda written: _written_rope(written)["rope_theta"]),
            ),
        ),
        "speculators": Format(
            _check_blocks,
            (
                ("architectures", lambda w: [_DFLASH_WRITTEN[_dflash_kind(w.network)]]),
                *_of("dflash2", **_DFLASH2),
                *_of("xpress", xpress_rank="markov_rank", xpress_mlp_ratio="refiner_ratio"),
                *("aux_hidden_state_layer_ids", "block_size", "draft_vocab_size"),
                *_of("dspark", confidence_head_with_markov=lambda network: network.confidence == "markov"),
                *_of("dspark", enable_confidence_head=lambda network: network.confidence != "none"),
                *_of("dspark", markov_head_type="markov_type", markov_rank="markov_rank"),
                *("mask_token_id", "sample_from_anchor", "sliding_window_non_causal"),
                *_speculators_fields(_dflash_kind),
                *_layer_fields("qwen3", _NESTED),
            ),
        ),
    },
}


def write(drafter: Any, target: Any, folder: Path, name: str, tokens: int = 3) -> None:
    """Write a drafter for another engine. There, a drafter without its own output layer drafts the full vocabulary.

    Args:
        drafter: a ``TrainedDrafter`` with a layout in ``FORMATS``. The ``speculators`` format was verified with the
            classes of speculators, ``z-lab`` with no other program.
        target: transformers configuration of the target, with ``name_or_path``.
        name: name of the format.
        tokens: default number of draft tokens per step in vLLM; the block's for DFlash.

    Raises:
        UserError: the drafter was trained for another target, or the format cannot describe it.
    """
    network, decoder, row = drafter.network.config, target.get_text_config(), LAYOUTS[drafter.layout]
    known = {"hidden_size": getattr(network, "source", network.hidden_size)}
    _check_written_target({**known, **(drafter.verifier or drafter.published or {})}, target)
    form = FORMATS[drafter.layout][name]
    form.check(network)
    if hasattr(network, "features"):
        network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    if (corrected := getattr(network, "markov_outputs", 0)) not in (0, network.head or decoder.vocab_size):
        raise UserError(
            f"format {name} requires an output layer of its own for the {corrected} tokens of a Markov head: the "
            "drafter uses the target's"
        )
    state = drafter.network.state_dict()
    parts = published_names(state, form.names or row.names, form.prefixes, getattr(network, "layers", 1))
    tensors = unstack(state, parts, getattr(network, "layer", network))
    dtype = str(next(iter(tensors.values())).dtype)
    if drafter.draft_ids is not None and form.file != "model.safetensors":
        raise UserError(f"format {name} requires output layers of all the target's tokens: got a draft vocabulary")
    if drafter.draft_ids is not None and drafter.layout == "medusa":
        tensors["token_map"] = drafter.draft_ids.cpu()
    elif drafter.draft_ids is not None and network.head:
        ids = drafter.draft_ids.cpu()
        marked = torch.zeros(decoder.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    config = _written_config(form, row, Written(network, target, getattr(network, "drafts", tokens)))
    config["dtype"] = dtype.removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / form.file) as part:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part, {"format": "pt"})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _written_config(form: Format, row: Layout, written: Written) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for one in form.fields:
        path, value = (one, None) if isinstance(one, str) else one
        if isinstance(one, str):
            name = path.removeprefix(_NESTED)
            value = next(known for known in reversed(row.fields) if name in known.names).written(name, written)
        elif callable(value):
            value = value(written)
        if value is not OMITTED:
            *inside, name = path.split(".")
            at = config
            for part in inside:
                at = at.setdefault(part, {})
            at[name] = value
    return config


def _check_written_target(source: Mapping[str, Any], target: Any) -> None:
    """Check that ``target`` is the target that the drafter was trained for; raises ``UserError`` if not.

    Args:
        source: known properties of the drafter's target, see ``check_target``.
        target: transformers configuration.
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
