"""Published drafter checkpoints: which layout a folder has, and what their configurations have in common.

Checkpoints are read strictly, without running their code. Layouts are recognised by ``config.json`` and tensor names:

- ``msd``: MSD drafters (arXiv 2505.14260), such as those for LLaVA-1.5 and Qwen2-VL;
- ``eagle``: EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858);
- ``vispec``: ViSpec drafters (arXiv 2509.15235), EAGLE with an image adaptor;
- ``eagle3``: EAGLE-3, EAGLE-4 and P-EAGLE heads (arXiv 2503.01840, 2602.01469);
- ``dflash``: DFlash, JetSpec and DSpark drafters (arXiv 2602.06036, 2606.18394, 2607.05147);
- ``medusa``, ``hydra``: Medusa and Hydra heads (arXiv 2401.10774, 2402.05109);
- ``kangaroo``: Kangaroo adapters (arXiv 2404.18911);
- those in ``REFUSED``, which are not supported.

MSD and EAGLE checkpoints have the same tensors and do not record how visual positions were fed in training. Folders
whose ``config.json`` is of a text model are read as EAGLE, others as MSD; ``eagle:FOLDER`` and ``msd:FOLDER`` override
this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmspec.checks import POSITIVE, Checked, choice, option, required, settable, whole
from mmspec.drafters.checkpoint import load_weights, read_config, tensor_names, weight_files
from mmspec.errors import UserError
from mmspec.files import read_json

Published = tuple[Any, dict[str, Tensor], Tensor | None, dict[str, Any]]
"""What is read of a published drafter: the network's configuration, its tensors in their original dtype, the target's
token of each row of its output layer, (n,) int64 (None is the identity), and its target, for ``check_target``."""

EMBEDDING = "embed_tokens.weight"
INPUT_NORM = "layers.0.input_layernorm.weight"
LAYER = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
    "input_norm": ["input_layernorm"],
    "post_norm": ["post_attention_layernorm"],
}
"""Modules of a decoder layer, and the published ones that each of them stacks."""

QKV = [f"layers.0.{name}" for name in LAYER["qkv"]]
EAGLE_PARTS = {f"{ours}.weight": [f"layers.0.{name}.weight" for name in some] for ours, some in LAYER.items()}
EAGLE_PARTS |= {"qkv.bias": [f"{name}.bias" for name in QKV], "fc.weight": ["fc.weight"], "fc.bias": ["fc.bias"]}
"""Parameters of an EAGLE network, and the published ones that each of them stacks; MSD checkpoints have the same."""

# Rotary frequencies saved by old releases of transformers; redundant with the configuration.
HARMLESS = {"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"}
_EAGLE_TENSORS = {EMBEDDING, *HARMLESS, *(name for parts in EAGLE_PARTS.values() for name in parts)}
_USE_INSTEAD = "use an MSD or EAGLE checkpoint of this target, or train a drafter with mmspec train"
REFUSED = {"domino": "a Domino drafter, whose tokens pass through a recurrent cell"}
_TEXT_MODELS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()

_DFLASH = ("dflash", "dspark", "museglimmerassistant")
"""In the names of classes of DFlash drafters."""


def recognise(folder: Path) -> str | None:
    """Recognise a published layout by ``config.json`` and tensor names.

    Returns:
        ``"msd"``, ``"eagle"``, ``"vispec"``, ``"eagle3"``, ``"dflash"``, ``"medusa"``, ``"hydra"``, ``"kangaroo"``, a
        key of ``REFUSED`` or None.

    Raises:
        UserError: the weights cannot be read.
    """
    config = read_config(folder)
    if config is None or "mmspec_drafter" in config:
        return None
    return layout_of(config, {name for file in weight_files(folder) for name in tensor_names(file)})


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


def check_target(verifier: Mapping[str, Any], target: Any) -> None:
    """Check that a target is that of a published drafter, as far as this is known; raises ``UserError`` if not.

    A target may have more tokens than the drafter, as transformers' LLaVA-1.5 (32064, drafter 32000), but not twice as
    many: that is another tokenizer.

    Args:
        verifier: ``hidden_size``, ``vocab_size``, and if known ``name_or_path``, ``architectures`` and ``model_type``.
    """
    width, vocab, here = verifier["hidden_size"], verifier["vocab_size"], target.config
    model, expected = type(target.model).__name__, [f"hidden size {width}" + (f" and {vocab} tokens" if vocab else "")]
    types = {here.model_type, target.model.config.model_type}
    received = [f"hidden size {here.hidden_size} and {here.vocab_size} tokens"]
    fits = width == here.hidden_size and (vocab is None or here.vocab_size / 2 < vocab <= here.vocab_size)
    if (kind := verifier.get("model_type")) and kind not in types:
        fits, expected, received = (
            False,
            [*expected, f"of type {kind}"],
            [*received, f"of type {target.model.config.model_type}"],
        )
    if (classes := verifier.get("architectures")) and model not in classes:
        fits, expected = False, [*expected, f"of class {', '.join(classes)}"]
    if not fits:
        name = verifier.get("name_or_path") or "a target"
        raise UserError(
            f"the drafter was trained for {name} of {', '.join(expected)}: got {model} with {', '.join(received)}"
        )


def read_layout(folder: Path, layout: str, expected: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a published drafter.

    Args:
        layout: the drafter's, see ``recognise``.
        expected: the same, in the message for another one.

    Raises:
        UserError: the files cannot be read, or are of another layout.
    """
    config, tensors = read_json(folder / "config.json"), read_tensors(folder)
    received = layout_of(config, set(tensors))
    refuse(received, folder)
    if received != layout:
        raise UserError(f"{folder}: expected {expected}, received {', '.join(sorted(tensors)[:4])}")
    return config, tensors


def layout_of(config: Mapping[str, Any], names: set[str]) -> str | None:
    """Layout of a published drafter, see ``recognise``, by its configuration and tensor names."""
    classes = [*(config.get("architectures") or []), config.get("speculators_model_type") or ""]
    for other in REFUSED:
        if any(other in str(name).lower() for name in classes):
            return other
    if "dflash_config" in config or any(part in str(name).lower() for part in _DFLASH for name in classes):
        return "dflash"
    for heads in ("medusa", "hydra"):
        if f"{heads}_num_heads" in config or config.get("model_type") == heads:
            return heads
    own = names & {"d2t", "t2d", "mask_hidden"}
    if own or any(name.startswith("midlayer.") or "hidden_norm" in name for name in names):
        return "eagle3"
    if any(name.startswith(("imadpt.", "img_fc.")) for name in names):
        return "vispec"
    attends, others = any(f"{part}.weight" in names for part in QKV), ("fc.", "layers.0.mlp.")
    if attends and not any(name.startswith(others) for name in names):
        return "kangaroo"
    own = names - {EMBEDDING, *HARMLESS}
    if "fc.weight" not in names and not (own and names <= _EAGLE_TENSORS):
        return None
    return "eagle" if config.get("model_type") in _TEXT_MODELS else "msd"


@dataclass(frozen=True)
class PublishedConfig(Checked):
    """What configurations of published drafters have in common, under transformers' names."""

    hidden_size: int = required(whole(1))
    num_attention_heads: int = required(whole(1))
    intermediate_size: int = required(whole(1))
    num_key_value_heads: int | None = option(None, settable(whole(1)))
    head_dim: int | None = option(None, settable(whole(1)))
    num_hidden_layers: int = option(1, whole(1))
    vocab_size: int | None = option(None, settable(whole(1)))
    draft_vocab_size: int | None = option(None, settable(whole(1)))
    target_hidden_size: int | None = option(None, settable(whole(1)))
    rms_norm_eps: float = option(1e-6, POSITIVE)
    hidden_act: str = option("silu", choice("silu"))

    def shape(self) -> dict[str, Any]:
        """Fields of ``LayerShape``, but for the rotary positions."""
        heads = self.num_attention_heads
        return {
            "hidden_size": self.hidden_size,
            "heads": heads,
            "kv_heads": self.num_key_value_heads or heads,
            "head_dim": self.head_dim or self.hidden_size // heads,
            "mlp": self.intermediate_size,
            "norm_eps": self.rms_norm_eps,
        }


def rope_parameters(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Rotary positions of a published configuration, in the form of transformers' ``rope_parameters``."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= config[key] if isinstance(config.get(key), dict) else {}
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    usual = rope.get("rope_theta", 1e6 if config.get("model_type") == "qwen2_vl" else 10000.0)
    theta = usual if config.get("rope_theta") is None else config["rope_theta"]
    theta = POSITIVE.check(f"{source}/config.json: rope_theta", theta)
    if kind not in ("default", "mrope") and config.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {**rope, "rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}


def named_verifier(config: Mapping[str, Any]) -> dict[str, Any]:
    named = (config.get("speculators_config") or {}).get("verifier") or {}
    return {
        "name_or_path": named.get("name_or_path") or "",
        "architectures": named.get("architectures") or [],
        "model_type": config.get("target_model_type"),
    }


def draft_tokens(tensors: Mapping[str, Tensor], draft: int, vocab: int, source: str) -> Tensor | None:
    """The target's token of each draft token; None if it is its own number."""
    if "d2t" not in tensors or tensors["d2t"].device.type == "meta":
        return None
    ids = torch.arange(draft) + tensors["d2t"].long()
    if bool(((ids < 0) | (ids >= vocab)).any()) or len(ids.unique()) < draft:
        raise UserError(f"{source}: i + d2t[i] must be distinct tokens below {vocab}")
    if "t2d" in tensors:
        marked = tensors["t2d"].bool()
        if int(marked.sum()) != draft or not bool(marked[ids].all()):
            raise UserError(f"{source}: t2d must mark exactly the tokens i + d2t[i]: it marks {int(marked.sum())}")
    return None if draft == vocab and bool((tensors["d2t"] == 0).all()) else ids
