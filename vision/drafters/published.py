"""Published drafter checkpoints: strict reading, without running their code.

Layouts are recognised by ``config.json`` and tensor names:

- ``msd``: MSD drafters (arXiv 2505.14260), such as those for LLaVA-1.5 and Qwen2-VL;
- ``eagle``: EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858);
- ``vispec``: ViSpec drafters (arXiv 2509.15235), EAGLE with an image adaptor;
- ``eagle3``: EAGLE-3 heads (arXiv 2503.01840), read by ``published_eagle3``;
- those in ``REFUSED``, which are not supported.

MSD and EAGLE checkpoints have the same tensors and do not record how visual positions were fed in training. Folders
whose ``config.json`` is of a text model are read as EAGLE, others as MSD; ``eagle:FOLDER`` and ``msd:FOLDER`` override
this.

Both project ``[embedding of the next token ; hidden state]``, use Llama's rotary positions 0, 1, 2, ... (Qwen2-VL's
three position axes are equal there) and contain a copy of the target's embedding, of which only the number of rows, the
drafter's vocabulary size, is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmspec.drafters.checkpoint import read_json
from mmspec.errors import UserError
from mmspec.vision.drafters.network import MSDConfig
from mmspec.vision.drafters.weight_files import load_weights, tensor_names, weight_files

_EMBEDDING = "embed_tokens.weight"
_INPUT_NORM = "layers.0.input_layernorm.weight"
_QKV = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
# Our parameters, and the published ones that each of them stacks.
_PARTS = {
    "fc.weight": ["fc.weight"],
    "fc.bias": ["fc.bias"],
    "qkv.weight": [f"{name}.weight" for name in _QKV],
    "qkv.bias": [f"{name}.bias" for name in _QKV],
    "out.weight": ["layers.0.self_attn.o_proj.weight"],
    "gate_up.weight": ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"],
    "down.weight": ["layers.0.mlp.down_proj.weight"],
    "input_norm.weight": [_INPUT_NORM],
    "post_norm.weight": ["layers.0.post_attention_layernorm.weight"],
}
_IMAGE_PARTS = {
    "adaptor.queries": ["imadpt.q"],
    "adaptor.key.weight": ["imadpt.k_proj.weight"],
    "adaptor.key.bias": ["imadpt.k_proj.bias"],
    "adaptor.value.weight": ["imadpt.v_proj.weight"],
    "adaptor.value.bias": ["imadpt.v_proj.bias"],
    "adaptor.out.weight": ["imadpt.o_proj.weight"],
    "img_fc.weight": ["img_fc.weight"],
    "img_fc.bias": ["img_fc.bias"],
}
_KNOWN = {name for parts in _PARTS.values() for name in parts}
# Rotary frequencies saved by old releases of transformers; redundant with the configuration.
_HARMLESS = {"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"}
_USE_INSTEAD = "use an MSD or EAGLE checkpoint of this target, or train a drafter with mmspec train"
REFUSED = {
    "dflash": "a DFlash drafter, which denoises a block of tokens at once",
    "dspark": "a DSpark drafter, which drafts a block of tokens at once",
    "peagle": "a P-EAGLE drafter, which drafts several tokens in parallel from mask tokens",
}
_TEXT_MODELS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()


def recognise(folder: Path) -> str | None:
    """Recognise a published layout by ``config.json`` and tensor names.

    Returns:
        ``"msd"``, ``"eagle"``, ``"vispec"``, ``"eagle3"``, a key of ``REFUSED`` or None.

    Raises:
        UserError: the weights cannot be read.
    """
    try:
        config = read_json(folder / "config.json")
    except UserError:
        return None
    if "mmspec_drafter" in config:
        return None
    return layout_of(config, {name for file in weight_files(folder) for name in tensor_names(file)})


def read_published(folder: Path, decoupled: bool | None = None) -> tuple[MSDConfig, dict[str, Tensor], dict[str, Any]]:
    """Read a published drafter.

    Args:
        decoupled: whether visual positions take the raw visual feature; None follows the layout.

    Returns:
        The network's configuration; its tensors under the names of ``MSDNetwork`` or ``ViSpecNetwork``, in their
        original dtype; and settings: ``layout``, ``vocab_size`` of the drafter, ``verifier`` for ``check_target``.

    Raises:
        UserError: a damaged or unsupported checkpoint, or a tensor that is missing, unexpected or does not match
            ``config.json``.
    """
    config = read_json(folder / "config.json")
    tensors = read_tensors(folder, shapes_only={_EMBEDDING})
    layout = layout_of(config, set(tensors))
    refuse(layout, folder)
    if layout == "eagle3":
        raise UserError(
            f"{folder}: expected an MSD or EAGLE-1/2 drafter, received an EAGLE-3 head: use eagle3:{folder}"
        )
    if layout is None:
        received = ", ".join(sorted(tensors)[:4]) or "no weights"
        raise UserError(f"{folder}: expected the tensors of an MSD or EAGLE drafter, received {received}")
    if decoupled is not None:
        layout = "msd" if decoupled else "eagle"
    return convert(config, tensors, layout, str(folder))


def read_tensors(folder: Path, shapes_only: Collection[str] = ()) -> dict[str, Tensor]:
    """All tensors of a folder's weight files; see ``load_weights``."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= load_weights(file, shapes_only)
    return tensors


def refuse(layout: str | None, folder: Path) -> None:
    """Raise ``UserError`` for a layout that is known and not supported."""
    if layout in REFUSED:
        raise UserError(f"{folder}: expected an MSD or EAGLE drafter, received {REFUSED[layout]}: {_USE_INSTEAD}")


def convert(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str, source: str
) -> tuple[MSDConfig, dict[str, Tensor], dict[str, Any]]:
    """Validate published tensors and convert them to ``MSDNetwork``'s.

    Args:
        config: contents of ``config.json``.
        layout: ``"msd"``, ``"eagle"`` or ``"vispec"``.
        source: name of the checkpoint in error messages.

    Returns, raises: as ``read_published``.
    """
    network = _network(config, tensors.keys(), layout, source)
    shapes = _shapes(network) | (_image_shapes(network) if layout == "vispec" else {})
    for name in ("fc", "img_fc"):  # EAGLE heads of Llama-3 have no bias
        if config.get("bias") is False and f"{name}.bias" not in tensors and f"{name}.weight" in tensors:
            tensors = {**tensors, f"{name}.bias": tensors[f"{name}.weight"].new_zeros(network.hidden_size)}
    # A mismatch of configuration and embedding is found by the shape check.
    rows = tensors[_EMBEDDING].shape[0] if _EMBEDDING in tensors and tensors[_EMBEDDING].dim() else None
    vocab = whole_number(config, "vocab_size", rows, source)
    shapes[_EMBEDDING] = (vocab, network.hidden_size)
    optional = set() if layout == "msd" else {_EMBEDDING}
    _check(tensors, shapes, optional, layout, source)
    ours = {
        name: torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
        for name, parts in (_PARTS | _IMAGE_PARTS).items()
        if parts[0] in shapes
    }
    verifier = {"name_or_path": "", "hidden_size": network.hidden_size, "vocab_size": vocab}
    return network, ours, {"layout": layout, "vocab_size": vocab, "verifier": verifier}


def check_target(verifier: Mapping[str, Any], target: Any) -> None:
    """Check that a target is that of a published drafter, as far as this is known; raises ``UserError`` if not.

    A target may have more tokens than the drafter, as transformers' LLaVA-1.5 (32064, drafter 32000), but not twice as
    many: that is another tokenizer.

    Args:
        verifier: ``hidden_size``, ``vocab_size``, and if known ``name_or_path``, ``architectures`` and ``model_type``.
        target: the target.
    """
    width, vocab, here = verifier["hidden_size"], verifier["vocab_size"], target.config
    model, made = type(target.model).__name__, [f"hidden size {width} and {vocab} tokens"]
    types = {here.model_type, target.model.config.model_type}
    found = [f"hidden size {here.hidden_size} and {here.vocab_size} tokens"]
    fits = width == here.hidden_size and here.vocab_size / 2 < vocab <= here.vocab_size
    if (kind := verifier.get("model_type")) and kind not in types:
        fits, made, found = False, [*made, f"of type {kind}"], [*found, f"of type {target.model.config.model_type}"]
    if (classes := verifier.get("architectures")) and model not in classes:
        fits, made = False, [*made, f"of class {', '.join(classes)}"]
    if not fits:
        name = verifier.get("name_or_path") or "a target"
        raise UserError(f"the drafter was trained for {name} of {', '.join(made)}: got {model} with {', '.join(found)}")


def layout_of(config: Mapping[str, Any], names: set[str]) -> str | None:
    """Layout of a published drafter, see ``recognise``, by its configuration and tensor names."""
    classes = [*(config.get("architectures") or []), config.get("speculators_model_type") or ""]
    for other in REFUSED:
        if any(str(name).lower().startswith(other) for name in classes):
            return other
    if any(name.startswith("midlayer.") or "hidden_norm" in name for name in names) or names & {"d2t", "t2d"}:
        return "eagle3"
    if any(name.startswith(("imadpt.", "img_fc.")) for name in names):
        return "vispec"
    if "fc.weight" not in names and not (names & _KNOWN and names <= _KNOWN | _HARMLESS | {_EMBEDDING}):
        return None
    return "eagle" if config.get("model_type") in _TEXT_MODELS else "msd"


def _network(config: Mapping[str, Any], names: Any, layout: str, source: str) -> MSDConfig:
    """Network configuration from ``config.json``; norm and biases also from tensor names, as files may lack them."""

    shape = layer_shape(config, source)
    layers = whole_number(config, "num_hidden_layers", 1, source)
    rope = rope_parameters(config, source)
    if layers != 1 or rope["rope_type"] != "default":
        raise UserError(
            f"{source}/config.json: expected one layer with plain rotary positions, received {layers} with rope "
            f"scaling {rope['rope_type']!r}"
        )
    # MSD's Qwen2-VL drafters are full Qwen2-VL layers; all others lack the first norm.
    qwen = layout == "msd" and config.get("model_type") == "qwen2_vl"
    ours = {
        **shape,
        "rope_theta": rope["rope_theta"],
        "input_norm": qwen or _INPUT_NORM in names,
        "qkv_bias": qwen or bool(config.get("qkv_bias")) or any(part in names for part in _PARTS["qkv.bias"]),
        "decoupled": layout != "eagle",
    }
    return MSDConfig.read(ours, f"{source}/config.json")


def layer_shape(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of ``LayerShape`` in a published configuration, but for the rotary positions.

    Raises:
        UserError: a value is missing or out of range, or not one of Llama's layers.
    """
    width, heads = (whole_number(config, key, None, source) for key in ("hidden_size", "num_attention_heads"))
    kv_heads = whole_number(config, "num_key_value_heads", heads, source)
    head_dim = whole_number(config, "head_dim", width // heads, source)
    activation = config.get("hidden_act") or "silu"
    if activation != "silu" or heads % kv_heads or head_dim % 2:
        raise UserError(
            f"{source}/config.json: expected silu, kv_heads that divide heads and an even head_dim, received "
            f"{activation}, {kv_heads} for {heads} and {head_dim}"
        )
    return {
        "hidden_size": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp": whole_number(config, "intermediate_size", None, source),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6, float, source),
    }


def rope_parameters(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Rotary positions of a published configuration, in the form of transformers' ``rope_parameters``."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= config[key] if isinstance(config.get(key), dict) else {}
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    usual = rope.get("rope_theta", 1e6 if config.get("model_type") == "qwen2_vl" else 10000.0)
    theta = _number(config, "rope_theta", usual, float, source)
    if kind not in ("default", "mrope") and config.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {**rope, "rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}


def whole_number(config: Mapping[str, Any], key: str, default: int | None, source: str) -> int:
    """A positive integer of a configuration; null selects the default."""
    value: int = _number(config, key, default, int, source)
    return value


def _number(
    config: Mapping[str, Any], key: str, default: float | None, kind: type[int] | type[float], source: str
) -> Any:
    """A positive number; null selects the default."""
    value: Any = default if config.get(key) is None else config[key]
    if not isinstance(value, int | kind) or isinstance(value, bool) or value <= 0:
        expected = "integer" if kind is int else "number"
        raise UserError(f"{source}/config.json: {key} must be a positive {expected}: got {value!r}")
    return kind(value)


def _shapes(network: MSDConfig) -> dict[str, tuple[int, ...]]:
    """Expected shapes of the published tensors, without the embedding."""
    width, inner, keys = network.hidden_size, network.heads * network.head_dim, network.kv_heads * network.head_dim
    layer = "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 2 * width),
        "fc.bias": (width,),
        **{f"{name}.weight": (rows, width) for name, rows in zip(_QKV, (inner, keys, keys), strict=True)},
        f"{layer}self_attn.o_proj.weight": (width, inner),
        f"{layer}mlp.gate_proj.weight": (network.mlp, width),
        f"{layer}mlp.up_proj.weight": (network.mlp, width),
        f"{layer}mlp.down_proj.weight": (width, network.mlp),
        f"{layer}post_attention_layernorm.weight": (width,),
    }
    if network.input_norm:
        shapes[_INPUT_NORM] = (width,)
    if network.qkv_bias:
        shapes |= {f"{name}.bias": (rows,) for name, rows in zip(_QKV, (inner, keys, keys), strict=True)}
    return shapes


def _image_shapes(network: MSDConfig) -> dict[str, tuple[int, ...]]:
    """Expected shapes of the published tensors of a ViSpec drafter's image adaptor."""
    width = network.hidden_size
    biases = ("imadpt.k_proj.bias", "imadpt.v_proj.bias") if network.qkv_bias else ()
    return {
        "imadpt.q": (2, network.heads, width // network.heads),
        **{f"imadpt.{part}_proj.weight": (width, width) for part in "kvo"},
        **dict.fromkeys(biases, (width,)),
        "img_fc.weight": (width, 2 * width),
        "img_fc.bias": (width,),
    }


def _check(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], optional: set[str], layout: str, source: str
) -> None:
    missing = sorted(shapes.keys() - tensors.keys() - optional)
    unknown = sorted(tensors.keys() - shapes.keys() - _HARMLESS)
    if missing or unknown:
        found = [f"{what} {', '.join(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        raise UserError(f"{source}: expected exactly the tensors of layout {layout}, received {'; '.join(found)}")
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{source}: {name} must be {shapes[name]} by config.json: got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise UserError(f"{source}: {name} must be a floating point tensor: got {tensor.dtype}")
