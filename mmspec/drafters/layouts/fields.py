"""Fields of published ``config.json`` files: checked reading, and what families share in reading and writing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor
from transformers import GenerationConfig

from mmspec.drafters.layouts.tensors import Names, rows_of
from mmspec.errors import UserError
from mmspec.validation import check, condition

REQUIRED = object()
"""Marks a field without a default."""

_UNSET = Annotated[Any, condition("unset or false", lambda value: not value)]
_ROPES = ("rope_parameters", "rope_scaling", "rope_theta")
_LAYER = {
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
"""Fields of a ``LayerShape``, and their names in configurations of transformers."""

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


class Source:
    """A published checkpoint, of which a layout reads the fields.

    Args:
        prefix: optional prefix of field names.
        nested: nested objects of ``config.json``, whose fields override top-level fields.

    Attributes:
        fields: flattened contents of ``config.json``: nested objects merged, prefixes removed.
        halves: whether rotary positions rotate the halves of a head, not adjacent features together.
    """

    halves = True

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, nested: tuple[str, ...], where: str
    ) -> None:
        self.config, self.tensors, self.where = config, dict(tensors), where
        self._prefix, self._known, self._inside = prefix, {*_ROPES}, {*nested, *_ROPES}
        self.fields = {name.removeprefix(prefix): value for name, value in config.items()}
        for name in nested:
            inside = config.get(name) or {}
            if not isinstance(inside, Mapping):
                raise UserError(f"{where}/config.json: {name} must be an object: got {inside!r}")
            self.fields |= inside

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of these fields that is set, and its value; the value is None if no field is set.

        A dot denotes a field of a nested object.
        """
        self.ignore(*names)
        for name in names:
            value: Any = self.fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None and value != []:
                return name, value
        return names[0], None

    def get(self, *names: str, kind: Any = Any, default: Any = REQUIRED) -> Any:
        """Validated value of the first of these fields that is set, otherwise the default."""
        name, value = self.first(*names)
        return default if value is None and default is not REQUIRED else self.check(name, kind, value)

    def count(self, *names: str, default: Any = REQUIRED) -> Any:
        """A field with a positive whole number."""
        return self.get(*names, kind=PositiveInt, default=default)

    def vocabulary(self, name: str = "vocab_size", default: Any = None) -> int | None:
        return self.get(name, kind=Annotated[int, Interval(ge=1, le=2**24)], default=default)

    def flag(self, *names: str, default: bool) -> bool:
        return self.get(*names, kind=bool, default=default)

    def refuse(self, *names: str) -> None:
        """Require that fields are unset or false."""
        for name in names:
            self.get(name, kind=_UNSET, default=None)

    def ignore(self, *names: str) -> None:
        """Mark fields as read."""
        for name in names:
            *inside, last = name.split(".")
            self._inside.update(inside)
            self._known |= {*inside, last}

    def layer_ids(self, *names: str, default: Any = REQUIRED, shifted: Collection[str], by: int) -> list[int]:
        """A list of layers; those under ``shifted`` names are shifted by ``by``."""
        name, found = self.first(*names)[0], self.get(*names, kind=list[int], default=default)
        return [layer + by for layer in found] if name in shifted else found

    def layer(self) -> dict[str, Any]:
        """Fields of a ``LayerShape``."""
        width, heads = self.count("hidden_size"), self.count("num_attention_heads")
        self.get("hidden_act", kind=Literal["silu"], default="silu")
        self.halves = self.flag("rope_is_neox_style", "is_neox_style", default=True)
        return {
            "hidden_size": width,
            "heads": heads,
            "kv_heads": self.count("num_key_value_heads", default=heads),
            "head_dim": self.get("head_dim", default=width // heads),
            "mlp": self.count("intermediate_size"),
            "norm_eps": self.get("rms_norm_eps", kind=PositiveFloat, default=None),
        }

    def rope(self) -> dict[str, Any]:
        """Rotary parameters, as transformers' ``rope_parameters``."""
        rope: dict[str, Any] = {}
        config = self.fields
        for key in ("rope_scaling", "rope_parameters"):
            rope |= config[key] if isinstance(config.get(key), dict) else {}
        kind = rope.pop("type", None)
        kind = rope.pop("rope_type", None) or kind or "default"
        given = (
            config.get("rope_theta"),
            rope.get("rope_theta"),
            1e6 if config.get("model_type") == "qwen2_vl" else 1e4,
        )
        theta = self.check("rope_theta", PositiveFloat, next(theta for theta in given if theta is not None))
        if kind not in ("default", "mrope") and config.get("max_position_embeddings"):
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        return {**rope, "rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}

    def check(self, name: str, kind: Any, value: Any) -> Any:
        return check(f"{self.where}/config.json: {name}", kind, value)

    def check_all_read(self, title: str) -> None:
        """Check that no ignored field may affect outputs; values 0, 1, false and empty are accepted.

        Raises:
            UserError: a field was not read and is not listed in ``INERT``.
        """

        def unread(config: Mapping[str, Any]) -> Iterable[str]:
            for name, value in config.items():
                bare, neutral = name.removeprefix(self._prefix), not value or (value == 1 and value is not True)
                if bare in self._inside and isinstance(value, Mapping):
                    yield from unread(value)
                elif not (bare in self._known or INERT.fullmatch(name) or neutral):
                    yield f"{name} {value!r:.60}"

        if found := list(unread(self.config)):
            raise UserError(
                f"{self.where}/config.json: expected {title} whose fields are known, received {', '.join(found)}: "
                "remove fields that its network does not use"
            )

    def rows(self, *names: str) -> int:
        """Maximum number of rows of the named tensors; 0 if all are absent."""
        return max((rows_of(self.tensors, name) or 0 for name in names), default=0)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.tensors)

    def named(self, part: str) -> bool:
        """Whether the name of a class or algorithm contains ``part``."""
        return any(part in name for name in class_names(self.config, self.fields.get("projector_type")))


@dataclass
class Reading:
    """Content of a checkpoint, read by its layout.

    Attributes:
        network: fields of the network's configuration; None is the field's default.
        vocab: vocabulary of the target, if known.
        draft: rows of ``d2t``; 0 for layouts without this tensor.
        draft_ids: target token of each draft token, (n,) int64, of layouts without ``d2t``.
        prefixes: replacement tensor prefixes, for checkpoints with such tensors.
        copies: unused copies of the target's tensors, besides the layout's; ``required`` copies must be present.
    """

    network: dict[str, Any]
    names: Names
    vocab: int | None
    draft: int = 0
    draft_ids: Tensor | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


@dataclass
class Writing:
    """A drafter in the format of another engine: ``config.json``, tensor names and prefixes, and the weights file."""

    config: dict[str, Any]
    names: Names
    prefixes: Mapping[str, str] = field(default_factory=dict)
    file: str = "model.safetensors"


def class_names(config: Mapping[str, Any], *more: Any) -> list[str]:
    """Lower-case names of a configuration's classes and algorithm."""
    named = [*(config.get("architectures") or []), config.get("speculators_model_type"), *more]
    return [str(name).lower() for name in named if name]


def written_layer(network: Any, target: Any, model_type: str) -> dict[str, Any]:
    """Decoder layer fields of a transformers configuration, without rotary positions.

    Args:
        target: transformers configuration of the target.
    """
    decoder = target.get_text_config()
    limit = getattr(decoder, "max_position_embeddings", None)  # absent with ALiBi
    return {
        **{theirs: getattr(network, ours) for ours, theirs in _LAYER.items()},
        **({"max_position_embeddings": limit} if limit else {}),
        "model_type": model_type,
        "num_hidden_layers": getattr(network, "layers", 1),
        "vocab_size": decoder.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def written_speculators(algorithm: str, target: Any, tokens: int) -> dict[str, Any]:
    """Fields common to all drafters in the format of vllm-project/speculators."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy"}
    return {
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "speculative_tokens": tokens, "verifier_accept_k": 1}],
            "verifier": {"architectures": target.architectures or [], "name_or_path": target.name_or_path},
        },
        "speculators_model_type": algorithm,
        "tie_word_embeddings": False,
    }
