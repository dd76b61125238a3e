"""Published DFlash, JetSpec and DSpark checkpoints (arXiv 2602.06036, 2606.18394, 2607.05147): strict reading, without
running their code.

Three layouts of one network, also with ``markov_head`` and ``confidence_head``:

- ``z-lab``: ``fc``, ``hidden_norm``, ``layers.*`` and ``norm``, in a flat configuration, with ``dflash_config`` or
  without (deepseek-ai/DeepSpec);
- ``transformers``: ``encoder.fc`` and ``encoder.output_norm_enc`` in their place (``MuseGlimmerAssistantModel``);
- ``speculators``: a nested ``transformer_layer_config``, output layer and embedding of its own if it has them, and
  ``d2t``, the offsets of its draft vocabulary.

``target_layer_ids`` are layers whose outputs are read, ``aux_hidden_state_layer_ids`` of speculators those whose inputs
are. ``causal_head`` of JetSpec is ``causal`` or ``is_causal`` in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.checks import FLAG, choice, whole
from mmspec.drafters.dflash.config import DFlashConfig
from mmspec.drafters.dflash.network import DFlashNetwork
from mmspec.drafters.published import (
    PublishedConfig,
    check_tensors,
    draft_tokens,
    named_verifier,
    read_layout,
    rope_parameters,
    rows_of,
    stack,
)
from mmspec.errors import UserError

_UNSUPPORTED = (
    "attention_bias",
    "mlp_bias",
    "fc_layernorm",
    "use_swa",
    "shift_label",
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_AFFINE = ("weight", "bias")
_CAUSAL = ("causal_head", "causal", "is_causal")
_ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}

Published = tuple[DFlashConfig, dict[str, Tensor], Tensor | None, dict[str, Any]]
Parts = dict[str, list[tuple[str, int]]]


def read_published(folder: Path) -> Published:
    """Read a published DFlash drafter; see ``convert``."""
    return convert(*read_layout(folder, "dflash", "a DFlash drafter"), str(folder))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> Published:
    """Validate published tensors and convert them to those of a ``DFlashNetwork``.

    Args:
        config: contents of ``config.json``.
        tensors: the published ones; may be on the meta device.
        source: name of the checkpoint in error messages.

    Returns:
        The network's configuration, its tensors in their original dtype, the target's token of each row of its output
        layer, (n,) int64 (None is the identity), and its target, for ``published.check_target``.

    Raises:
        UserError: an unsupported network, or a tensor that is missing, unexpected or does not match ``config.json``.
    """
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    common = PublishedConfig.read(layer, f"{source}/config.json", others=True)
    vocab = common.vocab_size
    network = _network(common, config, layer, tensors, vocab, source)
    parts = published_parts(network, renamed=any(name.startswith("encoder.") for name in tensors))
    with torch.device("meta"):
        expected = DFlashNetwork(network).state_dict()
    shapes = {name: (rows, *expected[ours].shape[1:]) for ours, found in parts.items() for name, rows in found}
    draft, vocabularies = network.head, {"d2t", "t2d"}
    if draft:
        shapes |= {"d2t": (draft,), "t2d": (vocab or 0,)}
    optional = vocabularies if draft == vocab else {"t2d"}
    check_tensors(tensors, shapes, "a DFlash drafter", source, optional, vocabularies)
    ours = stack(tensors, {name: [one for one, _ in found] for name, found in parts.items()})
    verifier = {**named_verifier(config), "hidden_size": network.hidden_size, "vocab_size": vocab}
    return network, ours, draft_tokens(tensors, draft, vocab or 0, source), verifier


def published_parts(network: DFlashConfig, renamed: bool = False) -> Parts:
    """Our parameters, and the published ones that each of them stacks, with their rows.

    Args:
        renamed: under the names of transformers.
    """
    width, inner, keys = network.hidden_size, network.heads * network.head_dim, network.kv_heads * network.head_dim
    parts: Parts = {name: [(_ENCODER[name] if renamed else name, width)] for name in _ENCODER}
    parts["norm.weight"] = [("norm.weight", width)]
    if network.head:
        parts["lm_head.weight"] = [("lm_head.weight", network.head)]
    if network.embedding:
        parts["embed_tokens.weight"] = [("embed_tokens.weight", network.embedding)]
    if network.markov_rank:
        parts["markov_embed.weight"] = [("markov_head.markov_w1.weight", network.markov_inputs)]
        parts["markov_out.weight"] = [("markov_head.markov_w2.weight", network.markov_outputs)]
    if network.markov_type == "gated":
        parts |= {f"markov_gate.{one}": [(f"markov_head.gate_proj.{one}", network.markov_rank)] for one in _AFFINE}
    if network.markov_type == "rnn":
        rows = 3 * network.markov_rank
        parts |= {f"markov_cell.{one}": [(f"markov_head.joint_proj.{one}", rows)] for one in _AFFINE}
    if network.confidence != "none":
        parts |= {f"confidence.{one}": [(f"confidence_head.proj.{one}", 1)] for one in _AFFINE}
    for number in range(network.layers):
        at = f"layers.{number}"
        layer: Parts = {
            "input_norm": [("input_layernorm", width)],
            "q": [("self_attn.q_proj", inner)],
            "kv": [("self_attn.k_proj", keys), ("self_attn.v_proj", keys)],
            "q_norm": [("self_attn.q_norm", network.head_dim)],
            "k_norm": [("self_attn.k_norm", network.head_dim)],
            "out": [("self_attn.o_proj", width)],
            "post_norm": [("post_attention_layernorm", width)],
            "gate_up": [("mlp.gate_proj", network.mlp), ("mlp.up_proj", network.mlp)],
            "down": [("mlp.down_proj", width)],
        }
        parts |= {
            f"{at}.{ours}.weight": [(f"{at}.{name}.weight", rows) for name, rows in found]
            for ours, found in layer.items()
        }
    return parts


def _network(
    common: PublishedConfig,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vocab: int | None,
    source: str,
) -> DFlashConfig:
    own = config.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise UserError(f"{source}/config.json: dflash_config must be an object: got {own!r}")
    settings = {**layer, **own}
    for name in _UNSUPPORTED:
        if settings.get(name):
            raise UserError(f"{source}/config.json: expected a DFlash drafter without {name}, received {name}")
    layers = _number(layer, "num_hidden_layers", source)
    sliding = _sliding(layer, layers, source)
    own_head = "lm_head.weight" in tensors
    head = (common.draft_vocab_size or rows_of(tensors, "lm_head.weight") or 0) if own_head else 0
    heads = _heads(config, settings, vocab, head, source)
    if (head or heads.get("markov_rank")) and vocab is None:
        raise UserError(f"{source}/config.json: vocab_size must be a positive integer: got None")
    ours = {
        **common.shape(),
        "rope": rope_parameters(layer, source),
        "block_size": _number(settings, "block_size", source),
        "mask_token_id": _number(settings, "mask_token_id", source, 0),
        "target_layer_ids": _layer_ids(settings, source),
        "layers": layers,
        "sliding": sliding,
        "window": _number(layer, "sliding_window", source) if sliding else 0,
        "causal": _causal(settings, layers, sliding, source),
        "head": head,
        "embedding": rows_of(tensors, "embed_tokens.weight") or 0,
        **heads,
    }
    return DFlashConfig.read(ours, f"{source}/config.json")


def _number(settings: Mapping[str, Any], name: str, source: str, low: int = 1) -> int:
    value: int = whole(low).check(f"{source}/config.json: {name}", settings.get(name))
    return value


def _layer_ids(settings: Mapping[str, Any], source: str) -> list[int]:
    """Layers whose outputs are read."""
    name, earlier = "target_layer_ids", 0
    if settings.get(name) is None and "aux_hidden_state_layer_ids" in settings:
        name, earlier = "aux_hidden_state_layer_ids", 1
    ids = settings.get(name)
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise UserError(f"{source}/config.json: {name} must be a list of layers: got {ids!r}")
    if not ids or min(ids) < earlier:
        raise UserError(f"{source}/config.json: {name} must name layers from {earlier} on: got {ids}")
    return [layer - earlier for layer in ids]


def _sliding(layer: Mapping[str, Any], layers: int, source: str) -> list[int]:
    """Layers with a sliding window."""
    kinds = layer.get("layer_types") or [_FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {_SLIDING, _FULL}:
        raise UserError(f"{source}/config.json: layer_types must be {layers} of {_SLIDING} and {_FULL}: got {kinds!r}")
    sliding = [number for number, kind in enumerate(kinds) if kind == _SLIDING]
    return sliding


def _causal(settings: Mapping[str, Any], layers: int, sliding: list[int], source: str) -> list[int]:
    """Layers that are causal inside a block: all, none, or in speculators those with a window."""
    if (name := next((name for name in _CAUSAL if settings.get(name) is not None), None)) is not None:
        return list(range(layers)) if _flag(settings, name, False, source) else []
    return [] if _flag(settings, "sliding_window_non_causal", True, source) else sliding


def _heads(
    config: Mapping[str, Any], settings: Mapping[str, Any], vocab: int | None, head: int, source: str
) -> dict[str, Any]:
    """Fields of DSpark's heads; speculators has other defaults than the flat configurations."""
    named = [*(config.get("architectures") or []), config.get("speculators_model_type"), settings.get("projector_type")]
    dspark = any("dspark" in str(name).lower() for name in named)
    nested = dspark and "speculators_model_type" in config
    fields: dict[str, Any] = {"from_anchor": _flag(settings, "sample_from_anchor", dspark, source)}
    rank = _number({"markov_rank": 256 if nested else 0, **settings}, "markov_rank", source, 0)
    if rank:
        kind = settings.get("markov_head_type") or "vanilla"
        kinds = choice("vanilla", "gated", "rnn")
        fields["markov_type"] = kinds.check(f"{source}/config.json: markov_head_type", kind)
        fields |= {"markov_rank": rank, "markov_inputs": vocab or 0, "markov_outputs": head or vocab or 0}
    alpha = settings.get("confidence_head_alpha")
    if _flag(settings, "enable_confidence_head", nested or bool(alpha), source):
        both = _flag(settings, "confidence_head_with_markov", nested, source)
        fields["confidence"] = "markov" if both else "state"
    return fields


def _flag(settings: Mapping[str, Any], name: str, default: bool, source: str) -> bool:
    value = default if settings.get(name) is None else settings[name]
    checked: bool = FLAG.check(f"{source}/config.json: {name}", value)
    return checked
