"""Published EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858), and layouts that extend theirs.

They project ``[embedding of the next token ; hidden state]``, use Llama's rotary positions 0, 1, 2, ... (Qwen2-VL's
three position axes are equal there) and contain a copy of the target's embedding, of which only the number of rows, the
drafter's vocabulary size, is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from mmspec.checks import whole
from mmspec.drafters.checkpoint import read_json
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.eagle.network import EagleNetwork
from mmspec.drafters.parts import check_tensors, parameters, shapes_of, stack
from mmspec.drafters.published import (
    EAGLE_PARTS,
    EMBEDDING,
    INPUT_NORM,
    QKV,
    Published,
    PublishedConfig,
    layout_of,
    read_tensors,
    refuse,
    rope_parameters,
)
from mmspec.errors import UserError

C = TypeVar("C", bound=EagleConfig)


@dataclass(frozen=True)
class Layout(Generic[C]):
    """What a published layout adds to that of EAGLE heads.

    Attributes:
        name: in error messages.
        config: class of the network's configuration.
        settings: further fields of it, given the contents of ``config.json``.
        network: class of the network.
        parts: further parameters of it, and the published ones that each of them stacks.
        embedding: whether the copy of the target's embedding is required.
    """

    name: str
    config: type[C]
    network: type[EagleNetwork]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    parts: Mapping[str, list[str]] = field(default_factory=dict)
    embedding: bool = False


EAGLE = Layout("eagle", EagleConfig, EagleNetwork)
_OTHER = {
    "dflash": "a DFlash drafter",
    "eagle3": "an EAGLE-3 head",
    "hydra": "Hydra heads",
    "kangaroo": "a Kangaroo adapter",
    "medusa": "Medusa heads",
}


def read_published(folder: Path, layout: Layout[Any]) -> Published:
    """Read a published drafter; see ``convert``.

    Raises:
        UserError: a damaged or unsupported checkpoint, too.
    """
    config = read_json(folder / "config.json")
    tensors = read_tensors(folder, shapes_only={EMBEDDING})
    found = layout_of(config, set(tensors))
    refuse(found, folder)
    if found in _OTHER:
        raise UserError(
            f"{folder}: expected an MSD or EAGLE-1/2 drafter, received {_OTHER[found]}: use {found}:{folder}"
        )
    if found is None:
        received = ", ".join(sorted(tensors)[:4]) or "no weights"
        raise UserError(f"{folder}: expected the tensors of an MSD or EAGLE drafter, received {received}")
    return convert(config, tensors, layout, str(folder))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: Layout[Any], source: str) -> Published:
    """Validate published tensors and convert them to those of an ``EagleNetwork``.

    Args:
        config: contents of ``config.json``.
        source: name of the checkpoint in error messages.

    Raises:
        UserError: an unsupported network, or a tensor that is missing, unexpected or does not match ``config.json``.
    """
    common = PublishedConfig.read(config, f"{source}/config.json", others=True)
    network = _network(common, config, tensors.keys(), layout, source)
    state, known = parameters(layout.network, network), {**EAGLE_PARTS, **layout.parts}
    parts = {name: known[name] for name in state}
    shapes = shapes_of(state, parts, network)
    for name in ("fc", "img_fc"):  # EAGLE heads of Llama-3 have no bias
        if config.get("bias") is False and f"{name}.bias" not in tensors and f"{name}.weight" in tensors:
            tensors = {**tensors, f"{name}.bias": tensors[f"{name}.weight"].new_zeros(network.hidden_size)}
    # A mismatch of configuration and embedding is found by the shape check.
    rows = tensors[EMBEDDING].shape[0] if EMBEDDING in tensors and tensors[EMBEDDING].dim() else None
    vocab = whole(1).check(f"{source}/config.json: vocab_size", common.vocab_size or rows)
    shapes[EMBEDDING] = (vocab, network.hidden_size)
    check_tensors(tensors, shapes, f"layout {layout.name}", source, () if layout.embedding else {EMBEDDING})
    verifier = {"name_or_path": "", "hidden_size": network.hidden_size, "vocab_size": vocab}
    return network, stack(tensors, parts), None, verifier


def _network(common: PublishedConfig, config: Mapping[str, Any], names: Any, layout: Layout[C], source: str) -> C:
    """Network configuration from ``config.json``; norm and biases also from tensor names, as files may lack them."""
    layers = common.num_hidden_layers
    rope = rope_parameters(config, source)
    if layers != 1 or rope["rope_type"] != "default":
        raise UserError(
            f"{source}/config.json: expected one layer with plain rotary positions, received {layers} with rope "
            f"scaling {rope['rope_type']!r}"
        )
    ours = {
        **common.shape(),
        "rope_theta": rope["rope_theta"],
        "input_norm": INPUT_NORM in names,
        "qkv_bias": bool(config.get("qkv_bias")) or any(f"{name}.bias" in names for name in QKV),
        **layout.settings(config),
    }
    return layout.config.read(ours, f"{source}/config.json")
