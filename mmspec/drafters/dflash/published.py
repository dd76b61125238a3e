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

from torch import Tensor

from mmspec.checks import FLAG, choice, whole
from mmspec.drafters.dflash import DFlashConfig
from mmspec.drafters.dflash.network import DFlashNetwork
from mmspec.drafters.hidden_state.layer import rotary_of
from mmspec.drafters.parts import check_tensors, parameters, rows_of, shapes_of, stack
from mmspec.drafters.published import (
    LAYER,
    Published,
    PublishedConfig,
    draft_tokens,
    named_verifier,
    read_layout,
    rope_parameters,
)
from mmspec.errors import UserError

_UNSUPPORTED = ("attention_bias", "mlp_bias", "fc_layernorm", "use_swa", "shift_label")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_CAUSAL = ("causal_head", "causal", "is_causal")
_ENCODER = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
_NAMES = {
    "markov_embed": "markov_head.markov_w1",
    "markov_out": "markov_head.markov_w2",
    "markov_gate": "markov_head.gate_proj",
    "markov_cell": "markov_head.joint_proj",
    "confidence": "confidence_head.proj",
}
_LAYER = {
    **LAYER,
    "q": ["self_attn.q_proj"],
    "kv": ["self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
}


def read_published(folder: Path) -> Published:
    """Read a published DFlash drafter; see ``convert``."""
    return convert(*read_layout(folder, "dflash", "a DFlash drafter"), str(folder))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> Published:
    """Validate published tensors and convert them to those of a ``DFlashNetwork``.

    Args:
        config: contents of ``config.json``.
        tensors: the published ones; may be on the meta device.
        source: name of the checkpoint in error messages.

    Raises:
        UserError: an unsupported network, or a tensor that is missing, unexpected or does not match ``config.json``.
    """
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    common = PublishedConfig.read(layer, f"{source}/config.json", others=True)
    vocab = common.vocab_size
    network = _network(common, config, layer, tensors, vocab, source)
    rotary_of(network)  # raises
    parts = published_parts(network, renamed=any(name.startswith("encoder.") for name in tensors))
    shapes = shapes_of(parameters(DFlashNetwork, network), parts, network)
    draft, vocabularies = network.head, {"d2t", "t2d"}
    if draft:
        shapes |= {"d2t": (draft,), "t2d": (vocab or 0,)}
    optional = vocabularies if draft == vocab else {"t2d"}
    check_tensors(tensors, shapes, "a DFlash drafter", source, optional, vocabularies)
    verifier = {**named_verifier(config), "hidden_size": network.hidden_size, "vocab_size": vocab}
    return network, stack(tensors, parts), draft_tokens(tensors, draft, vocab or 0, source), verifier


def published_parts(network: DFlashConfig, renamed: bool = False) -> dict[str, list[str]]:
    """Our parameters, and the published ones that each of them stacks.

    Args:
        renamed: under the names of transformers.
    """
    names = _NAMES | (_ENCODER if renamed else {})
    parts: dict[str, list[str]] = {}
    for name in parameters(DFlashNetwork, network):
        module, _, leaf = name.rpartition(".")
        layer, _, own = module.rpartition(".")
        found = [f"{layer}.{one}" for one in _LAYER[own]] if layer else [names.get(module, module)]
        parts[name] = [f"{one}.{leaf}" for one in found]
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
    return whole(low).check(f"{source}/config.json: {name}", settings.get(name))


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
    return [number for number, kind in enumerate(kinds) if kind == _SLIDING]


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
    return FLAG.check(f"{source}/config.json: {name}", value)
