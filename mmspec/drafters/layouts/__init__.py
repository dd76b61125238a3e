"""Published drafter checkpoint layouts: recognition, reading and writing.

``LAYOUTS`` lists the layouts, ``FORMATS`` the output formats for other engines; a module per family has the functions
that read and write ``config.json``. Reading is strict and runs no code of the checkpoint.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmspec.drafters.checkpoint import (
    check_same_target,
    check_tensors,
    load_weights,
    read_config,
    tensor_names,
    weight_files,
)
from mmspec.drafters.layer import rotary_of
from mmspec.drafters.layouts import families, gguf
from mmspec.drafters.layouts.fields import (
    EMBEDDING,
    Reading,
    Source,
    Writing,
    class_names,
    draft_tokens,
    pair_halves,
    published_names,
    shapes_of,
    stack,
    unstack,
)
from mmspec.drafters.spec import LayerShape
from mmspec.errors import UserError
from mmspec.files import atomic, read_json, write_text
from mmspec.targets.gguf_file import opened
from mmspec.validation import read as read_options

Published = tuple[Any, dict[str, Tensor], Tensor | None, dict[str, Any]]
"""Result of reading a published drafter: network configuration, tensors in their original dtype, draft vocabulary, (n,)
int64 (None is the target's), and the target, for ``check_verifier``."""


class Layout(NamedTuple):
    """A published layout.

    Attributes:
        read: reads fields and tensor names of a checkpoint.
        like: other layouts that can be read as this layout.
        copies: unused copies of the target's tensors, which need not be loaded.
        nested, prefix: see ``Source``.
    """

    title: str
    read: Callable[[Source], Reading]
    like: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    prefix: str = ""


_EAGLE, _MSD, _LAYER = ("eagle", "msd", "vispec"), "an MSD or EAGLE-1/2 drafter", "transformer_layer_config"
LAYOUTS = {
    "dflash": Layout("a DFlash drafter", families.read_dflash, nested=(_LAYER, "dflash_config")),
    "medusa": Layout("Medusa heads", families.read_medusa, copies=families.COPIES, prefix="medusa_"),
    "hydra": Layout("Hydra heads", families.read_hydra, copies=families.COPIES, prefix="hydra_"),
    "eagle3": Layout("an EAGLE-3 head", families.read_eagle3, nested=(_LAYER,)),
    "vispec": Layout("a ViSpec drafter", families.read_vispec, _EAGLE, (EMBEDDING,)),
    "kangaroo": Layout("a Kangaroo adapter", families.read_kangaroo),
    "eagle": Layout(_MSD, families.read_eagle, _EAGLE, (EMBEDDING,)),
    "msd": Layout(_MSD, families.read_msd, _EAGLE, (EMBEDDING,)),
}

FORMATS: Mapping[str, Mapping[str, Callable[[Any, Any, int], Writing]]] = {
    "eagle3": {"speculators": families.write_eagle3_speculators, "eagle": families.write_eagle3},
    "eagle": {"eagle": families.write_eagle},
    "msd": {"eagle": families.write_eagle},
    "medusa": {"vllm": families.write_vllm, "medusa": families.write_medusa},
    "dflash": {"z-lab": families.write_z_lab, "speculators": families.write_dflash_speculators},
}
"""Output formats by layout: functions of a network's configuration, the target's transformers configuration and the
number of draft tokens per step, which raise ``UserError`` if the format cannot describe the network."""

REFUSED = {
    "domino": "a Domino drafter, whose tokens pass through a recurrent cell",
    "lilicorr": "a LiLiCorr drafter, whose candidates pass through a transformer of their own",
}
_USE_INSTEAD = "use an MSD or EAGLE checkpoint of this target, or train a drafter with mmspec train"


_TEXT_MODELS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()


def layout_of(config: Mapping[str, Any], names: set[str]) -> str | None:
    """Identify a layout by configuration and tensor names: a key of ``LAYOUTS`` or ``REFUSED``, or None if unknown."""
    classes, model_type = " ".join(class_names(config)), config.get("model_type")
    for refused in REFUSED:
        if refused in classes:
            return refused
    if "dflash_config" in config or any(
        part in classes for part in ("dflash", "dspark", "xpress", "museglimmerassistant")
    ):
        return "dflash"
    for heads in ("medusa", "hydra"):
        if f"{heads}_num_heads" in config or model_type == heads:
            return heads
    if names & {"d2t", "t2d", "mask_hidden"} or any(
        name.startswith("midlayer.") or "hidden_norm" in name for name in names
    ):
        return "eagle3"
    if any(name.startswith(("imadpt.", "img_fc.")) for name in names):
        return "vispec"
    if families.is_kangaroo(names):
        return "kangaroo"
    if families.is_eagle(names):
        return "eagle" if model_type in _TEXT_MODELS else "msd"
    return None


def recognise(folder: Path) -> str | None:
    """Layout of a folder without ``mmspec_drafter``, see ``layout_of``, or of a GGUF file; None if unknown."""
    if stored := opened(folder):
        return name if (name := stored.architecture()) in gguf.ARCHITECTURES else None
    config = read_config(folder)
    if config is None or "mmspec_drafter" in config:
        return None
    return layout_of(config, {name for file in weight_files(folder) for name in tensor_names(file)})


def read(folder: Path, drafter: Any) -> Published:
    """Read a published drafter of class ``drafter``, see ``convert``; ``folder`` may be a GGUF file."""
    row = LAYOUTS[drafter.name]
    if stored := opened(folder):
        config, tensors = gguf.read(stored)
    else:
        config, tensors = read_json(folder / "config.json"), {}
        for file in weight_files(folder):
            tensors |= load_weights(file, row.copies)
    found = layout_of(config, set(tensors))
    if found in REFUSED:
        raise UserError(f"{folder}: expected {row.title}, received {REFUSED[found]}: {_USE_INSTEAD}")
    if found is None:
        received = ", ".join(sorted(tensors)[:4]) or "no weights"
        raise UserError(f"{folder}: expected the tensors of {row.title}, received {received}")
    if found not in (drafter.name, *row.like):
        raise UserError(f"{folder}: expected {row.title}, received {LAYOUTS[found].title}: use {found}:{folder}")
    return convert(config, tensors, drafter, str(folder))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], drafter: Any, where: str) -> Published:
    """Validate a published drafter and convert it to a network of this package.

    Args:
        tensors: published tensors; may be on the meta device.
        drafter: a subclass of ``TrainedDrafter`` with a name in ``LAYOUTS``.

    Raises:
        UserError: the network is not supported, or a tensor is missing, unexpected or does not match ``config.json``.
    """
    row, kind = LAYOUTS[drafter.name], drafter.config_class
    source = Source(config, tensors, row.prefix, row.nested, where)
    found = row.read(source)
    source.check_all_read(row.title)
    known = kind.__dataclass_fields__
    settings = {name: value for name, value in found.network.items() if name in known and value is not None}
    ours: Any = read_options(kind, settings, f"{where}/config.json")
    shape: LayerShape = getattr(ours, "layer", ours)
    rotary_of(shape)  # raises
    tensors = source.tensors if source.halves else pair_halves(source.tensors, shape.head_dim)
    prefixes = found.prefixes if any(source.has(after) for after in found.prefixes.values()) else {}
    with torch.device("meta"):
        state = drafter.network_class(ours).state_dict()
    parts = published_names(state, found.names, prefixes, getattr(ours, "layers", 1))
    shapes, optional = _unused_tensors(source, found, row, ours.hidden_size)
    check_tensors(tensors, shapes_of(state, parts, shape) | shapes, f"layout {drafter.name}", where, optional)
    draft_ids = draft_tokens(tensors, found.draft, found.vocab or 0, where) if found.draft else found.draft_ids
    return ours, stack(tensors, parts), draft_ids, _verifier(config, ours, found.vocab)


def _unused_tensors(
    source: Source, found: Reading, row: Layout, width: int
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of tensors that are not parameters, and names of optional tensors."""
    copies = {*row.copies, *found.copies} & source.tensors.keys() | {*found.required}
    vocab = found.vocab or 0
    shapes: dict[str, tuple[int, ...]] = {
        name: (vocab if name == EMBEDDING else source.rows(name), width) for name in copies
    }
    if found.draft:
        shapes |= {"d2t": (found.draft,), "t2d": (vocab,)}
    return shapes, {"t2d"} if found.draft != vocab else {"d2t", "t2d"}


def _verifier(config: Mapping[str, Any], ours: Any, vocab: int | None) -> dict[str, Any]:
    named = (config.get("speculators_config") or {}).get("verifier") or {}
    return {
        "name_or_path": str(named.get("name_or_path") or config.get("base_model_name_or_path") or ""),
        "architectures": named.get("architectures") or [],
        "model_type": config.get("target_model_type"),
        "hidden_size": getattr(ours, "source", ours.hidden_size),
        "vocab_size": vocab,
    }


def write(drafter: Any, target: Any, folder: Path, name: str, tokens: int = 3) -> None:
    """Write a drafter for another engine. There, a drafter without its own output layer drafts the full vocabulary.

    Args:
        drafter: a ``TrainedDrafter`` with a name in ``FORMATS``. The ``speculators`` format was verified with the
            classes of speculators, ``z-lab`` with no other program.
        target: transformers configuration of the target, with ``name_or_path``.
        tokens: default number of draft tokens per step in vLLM; the block's for DFlash.

    Raises:
        UserError: the drafter was trained for another target, or the format cannot describe it.
    """
    network, decoder = drafter.network.config, target.get_text_config()
    known = {"hidden_size": getattr(network, "source", network.hidden_size)}
    received = {name: getattr(target, name) for name in ("name_or_path", "architectures")}
    received |= {name: getattr(decoder, name) for name in ("hidden_size", "vocab_size")}
    check_same_target(known | (drafter.verifier or {}), received)
    form = FORMATS[drafter.name][name](network, target, tokens)
    if hasattr(network, "features"):
        network.features(decoder.num_hidden_layers)  # raises if the target has too few layers
    if (corrected := getattr(network, "markov_outputs", 0)) not in (0, network.head or decoder.vocab_size):
        raise UserError(
            f"format {name} requires an output layer of its own for the {corrected} tokens of a Markov head: the "
            "drafter uses the target's"
        )
    state = drafter.network.state_dict()
    parts = published_names(state, form.names, form.prefixes, getattr(network, "layers", 1))
    tensors = unstack(state, parts, getattr(network, "layer", network))
    dtype = str(next(iter(tensors.values())).dtype)
    if drafter.draft_ids is not None and form.file != "model.safetensors":
        raise UserError(f"format {name} requires output layers of all the target's tokens: got a draft vocabulary")
    if drafter.draft_ids is not None and drafter.name == "medusa":
        tensors["token_map"] = drafter.draft_ids.cpu()
    elif drafter.draft_ids is not None and network.head:
        ids = drafter.draft_ids.cpu()
        marked = torch.zeros(decoder.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    config = {**form.config, "dtype": dtype.removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / form.file) as part:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part, {"format": "pt"})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
