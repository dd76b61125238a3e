"""Published Medusa and Hydra heads (arXiv 2401.10774, 2402.05109): strict reading, without running their code.

Layouts of Medusa:

- FasterDecoding/Medusa: ``{head}.{layer}.linear`` and, after a head's layers, its output layer ``{head}.{layers}``;
  without output layers, heads share the target's (text-generation-inference);
- vLLM: ``blocks.{head}.layers.{layer}``, with a bias if ``medusa_fc_bias``, ``lm_heads.{head}`` and, for a draft
  vocabulary, its tokens in ``token_map``; with ``original_lm_head``, one copy of the target's output layer.

Hydra (zankner/Hydra): ``hydra_mlp.{head}.{layer}``, with ``res_connection`` in the first layer, and
``hydra_lm_head.{head}``; with ``hydra_head_arch`` ``prefix-mlp``, each dropout counts as a layer, and
``prefix_embeding_layer`` is a decoder of one layer.

Files may have more heads than their configuration says. Copies of the target's embedding are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from statistics import mode
from typing import Any

import torch
from torch import Tensor

from mmspec.checks import FLAG, Checked, choice, option, settable, whole, within
from mmspec.drafters.medusa.config import MedusaConfig
from mmspec.drafters.medusa.network import MedusaNetwork
from mmspec.drafters.published import EAGLE_PARTS, check_tensors, layer_shapes, read_layout, rows_of, stack
from mmspec.drafters.shape import RotaryShape
from mmspec.errors import UserError

Published = tuple[MedusaConfig, dict[str, Tensor], Tensor | None, dict[str, Any]]

_WHAT = {"medusa": "Medusa heads", "hydra": "Hydra heads"}
_AT = "prefix_embeding_layer"  # as files spell it
_LAYER = {f"layers.0.{ours}": [f"{_AT}.{one}" for one in some] for ours, some in EAGLE_PARTS.items()}
_LAYER["norm.weight"] = [f"{_AT}.norm.weight"]
_COPIES = ("input_embed_fn.weight", f"{_AT}.embed_tokens.weight")
_SHARED = ("lm_head.weight", "lm_heads.0.weight")  # the target's output layer


@dataclass(frozen=True)
class _Names:
    """Published names of a residual layer, its projection and an output layer; ``odd`` is 2 * layer + 1."""

    linear: str
    residual: str
    output: str


_ORIGINAL = _Names("{head}.{layer}.linear", "", "{head}.{layers}")
_VLLM = _Names("blocks.{head}.layers.{layer}", "", "lm_heads.{head}")
_MLP = _Names("hydra_mlp.{head}.{layer}.linear", "hydra_mlp.{head}.{layer}.res_connection", "hydra_lm_head.{head}")
_PREFIX = _Names("hydra_mlp.{head}.{odd}.linear", "hydra_mlp.{head}.{odd}.res_connection", "hydra_lm_head.{head}.1")


@dataclass(frozen=True)
class _Settings(Checked):
    """Fields of ``config.json``, without ``medusa_`` or ``hydra_`` before them."""

    num_heads: int = option(1, whole(1, 64))
    num_layers: int | None = option(None, settable(whole(1, 64)))
    num_hidden_layers: int | None = option(None, settable(whole(1, 64)))
    vocab_size: int | None = option(None, settable(whole(1, 2**24)))
    fc_bias: bool = option(False, FLAG)
    original_lm_head: bool = option(False, FLAG)
    logit_scale: float = option(1.0, within(1, 1))
    head_arch: str = option("mlp", choice("mlp", "prefix-mlp"))
    grounded_heads: bool = option(False, FLAG)
    hidden_state_offset: int = option(0, whole(0, 0))

    @property
    def layers(self) -> int:
        """Residual layers per head."""
        return self.num_layers or self.num_hidden_layers or 1


def read_published(folder: Path, layout: str) -> Published:
    """Read published heads; see ``convert``."""
    return convert(*read_layout(folder, layout, _WHAT[layout]), layout, str(folder))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str, source: str) -> Published:
    """Validate published tensors and convert them to those of a ``MedusaNetwork``.

    Args:
        config: contents of ``config.json``.
        tensors: the published ones.
        layout: ``"medusa"`` or ``"hydra"``.
        source: name of the checkpoint in error messages.

    Returns:
        The network's configuration, whose ``prefix`` has the right sizes and is otherwise known from the target only,
        its tensors in their original dtype, the target's token of each row of the output layers, (n,) int64 (None is
        the identity), and its target, for ``published.check_target``.

    Raises:
        UserError: an unsupported network, or a tensor that is missing, unexpected or does not match ``config.json``.
    """
    plain = {name.removeprefix(f"{layout}_"): value for name, value in config.items()}
    settings = _Settings.read(plain, f"{source}/config.json", others=True)
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    draft_ids = _take_token_map(tensors, settings, source)
    names = _VLLM if any(name.startswith("blocks.") for name in tensors) else _ORIGINAL
    if layout == "hydra":
        names = _PREFIX if settings.head_arch == "prefix-mlp" else _MLP
    network = _network(settings, tensors, names, layout, source, draft_ids)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in MedusaNetwork(network).state_dict().items()}
    parts = {ours: _LAYER.get(ours) or [_name(ours, names, network.layers)] for ours in expected}
    shapes = {some[0]: expected[ours] for ours, some in parts.items()}
    if network.prefix:
        shapes |= layer_shapes(network.layer, f"{_AT}.layers.0", network.hidden_size)
    copies = {*_COPIES, *(_SHARED if settings.original_lm_head else ())} & tensors.keys()
    shapes |= {name: (rows_of(tensors, name) or 0, network.hidden_size) for name in copies}
    check_tensors(tensors, shapes, _WHAT[layout], source)
    verifier = {
        "name_or_path": str(config.get("base_model_name_or_path") or ""),
        "hidden_size": network.hidden_size,
        "vocab_size": settings.vocab_size or network.head or None,
    }
    return network, stack(tensors, parts), draft_ids, verifier


def _take_token_map(tensors: dict[str, Tensor], settings: _Settings, source: str) -> Tensor | None:
    """Pop the tokens of a draft vocabulary, and keep the rows that output layers have of them."""
    if (ids := tensors.pop("token_map", None)) is None:
        return None
    vocab = whole(1).check(f"{source}/config.json: vocab_size", settings.vocab_size)
    whole_numbers = ids.ndim == 1 and not ids.is_floating_point() and ids.dtype != torch.bool
    if not whole_numbers or bool(((ids < 0) | (ids >= vocab)).any()) or len(ids.unique()) < len(ids):
        raise UserError(f"{source}: token_map must be a 1D integer tensor of distinct tokens below {vocab}")
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and len(tensor) == vocab:
            tensors[name] = tensor[ids.long()]
    return ids.long()


def _network(
    settings: _Settings,
    tensors: Mapping[str, Tensor],
    names: _Names,
    layout: str,
    source: str,
    draft_ids: Tensor | None,
) -> MedusaConfig:
    pattern = re.escape(names.linear.partition("{head}")[0]) + r"(\d{1,4})\."
    heads = {int(match[1]) + 1 for name in tensors if (match := re.match(pattern, name))}
    count = max({settings.num_heads} | heads)
    linears = [f"heads.{head}.{layer}.linear.weight" for head in range(count) for layer in range(settings.layers)]
    outputs = [f"outputs.{head}.weight" for head in range(count)]
    widths, rows = (
        [found for ours in some if (found := rows_of(tensors, _name(ours, names, settings.layers)))]
        for some in (linears, outputs)
    )
    if not widths:
        raise UserError(f"{source}: expected the tensors of {_WHAT[layout]}, received none of their layers")
    own = layout == "hydra" or bool(rows and not settings.original_lm_head)
    ours = {
        "hidden_size": (width := mode(widths)),
        "heads": count,
        "layers": settings.layers,
        "bias": settings.fc_bias or names is not _VLLM,
        "grounded": settings.grounded_heads,
        "head": 0 if not own else max(rows, default=1) if draft_ids is None else len(draft_ids),
        "head_bias": layout == "hydra",
        "prefix": asdict(_layer(tensors, width)) if names is _PREFIX else {},
    }
    return MedusaConfig.read(ours, source)


def _layer(tensors: Mapping[str, Tensor], width: int) -> RotaryShape:
    """A decoder layer's shape by its tensors: heads have the greatest size that fits, up to 128."""
    read = {name.removeprefix(f"{_AT}.layers.0."): tensor for name, tensor in tensors.items() if tensor.ndim == 2}
    queries, keys, mlp = (
        max((len(read[name]) for name in some if name in read), default=2)
        for some in (
            ("self_attn.q_proj.weight",),
            ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        )
    )
    queries += -queries % keys  # where a tensor is missing or misshapen, which is an error later
    size = gcd(keys, 128)
    return RotaryShape(width, queries // size, keys // size, size, mlp)


def _name(ours: str, names: _Names, layers: int) -> str:
    """The published name of a parameter of a head."""
    kind, head, *rest, leaf = ours.split(".")
    if kind == "outputs":
        return f"{names.output.format(head=head, layers=layers)}.{leaf}"
    layer, part = rest
    template = names.linear if part == "linear" else names.residual
    return f"{template.format(head=head, layer=layer, odd=2 * int(layer) + 1)}.{leaf}"
