"""Network of EAGLE, MSD and FLASH (arXiv 2401.15077, 2505.14260, 2505.12728): one decoder layer between an input
projection and the target's head.

It predicts the target's next hidden state, and with several slots the following ones. Embedding, final norm and head
are the target's and not part of it.

Published EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858), and layouts that extend theirs.

They project ``[embedding of the next token ; hidden state]``, use Llama's rotary positions 0, 1, 2, ... (Qwen2-VL's
three position axes are equal there) and contain a copy of the target's embedding, of which only the number of rows, the
drafter's vocabulary size, is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.checks import whole
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.hidden_state.layer import Attend, DecoderLayer, Norm, Rotation
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
from mmspec.files import read_json


class Cell(nn.Module):
    """Recurrent cell between the slots of a pass: a carried state, (..., hidden), is updated by each drafted token and
    predicts the next hidden state."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first = nn.Linear(2 * width, width)
        self.into = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width, bias=False)
        if config.rank:
            self.narrow = nn.Linear(width, config.rank, bias=False)
            self.head = nn.Linear(config.rank, config.head)
        else:
            self.guess = nn.Linear(width, width)
        # LayerNorm is one kernel; RMSNorm is several on a CPU, half of the cell's time.
        self.norm = nn.LayerNorm(width, config.norm_eps)

    def begin(self, output: Tensor) -> Tensor:
        """Initial carried state from the layer's output: (..., 2 * hidden) -> (..., hidden)."""
        return self.norm(self.first(output))

    def forward(self, embeds: Tensor, carried: Tensor) -> Tensor:
        """Carried state of the next slot, given the embeddings of tokens drafted from ``carried``."""
        return self.carry(self.into(torch.cat([embeds, carried], dim=-1)), carried)

    def carry(self, read: Tensor, carried: Tensor) -> Tensor:
        """``forward`` with the output of ``into``."""
        return self.norm(carried + self.out(F.silu(read)))

    def scores(self, carried: Tensor) -> Tensor:
        """Logits of the draft vocabulary by the low-rank output layer: (..., hidden) -> (..., head)."""
        return self.head(self.narrow(carried))


class EagleNetwork(DecoderLayer):
    """See the module."""

    fc: nn.Linear

    def __init__(self, config: EagleConfig) -> None:
        width = config.hidden_size
        fc = nn.Linear(2 * width, width)
        super().__init__(config, width, qkv_bias=config.qkv_bias, input_norm=config.input_norm, fc=fc)
        self.config = config
        if config.slots > 1:
            self.cell = Cell(config)
        if config.reads:
            self.read_norms = nn.ModuleList(Norm(width, config.norm_eps) for _ in config.reads)
            self.read = nn.Linear(len(config.reads) * width, width, bias=False)
        if config.norm_output:
            self.norm = Norm(width, config.norm_eps)
        if config.confidence:
            self.confidence = nn.Linear(width, 1)

    @property
    def layers(self) -> list[DecoderLayer]:
        return [self]

    def states(self, read: Tensor) -> Tensor:
        """Hidden states that entries take, (..., hidden), from the target's last ones and those of
        ``EagleConfig.reads``, concatenated."""
        if not self.config.reads:
            return read
        last, *layers = read.split(self.config.hidden_size, dim=-1)
        normed = [norm(layer) for norm, layer in zip(self.read_norms, layers, strict=True)]
        return last + self.read(torch.cat(normed, dim=-1))

    def combine(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Layer inputs: the next token's embedding fused with the previous hidden state.

        Args:
            embeds: (batch, nodes, hidden) input embeddings of the target, one position ahead of ``hidden``.
            hidden: (batch, nodes, hidden) last hidden states, of the target or predicted.
        """
        return self.fc(torch.cat([embeds, hidden], dim=-1))

    def begin(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Split the layer's output into predictions and the first slots' carried states (empty for one slot)."""
        width = self.config.hidden_size
        predicted = self.normed(output[..., :width])
        return predicted, self.cell.begin(output) if self.config.slots > 1 else output[..., width:]

    def guess(self, carried: Tensor) -> Tensor:
        """Prediction of a slot after the first from its carried state, (..., hidden) each."""
        return self.normed(self.cell.guess(carried))

    def normed(self, predicted: Tensor) -> Tensor:
        """``predicted`` by ``norm_output``."""
        return self.norm(predicted) if self.config.norm_output else predicted

    def coverage(self, predicted: Tensor, carried: Tensor) -> Tensor:
        """Logit of the target's probability of a node's children together, (..., 1); see ``begin``."""
        return self.confidence(carried if self.config.slots > 1 else predicted)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Predict the next hidden states.

        Args:
            x: (batch, nodes, hidden) from ``combine``.
            rotation: cosines and sines from ``Rotary``, broadcastable to (batch, nodes, heads, head_dim).
            attend: see ``DecoderLayer.attention``.

        Returns:
            (batch, nodes, hidden), or with several slots the input of ``begin``, (batch, nodes, 2 * hidden).
        """
        x = x + self.attention(self.input_norm(x), rotation, attend)
        guess = x + self.mlp(x)
        return guess if self.config.slots == 1 else torch.cat([guess, x], dim=-1)


@dataclass(frozen=True)
class Layout:
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
    config: type[EagleConfig]
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


def read_published(folder: Path, layout: Layout) -> Published:
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


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: Layout, source: str) -> Published:
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


def _network(
    common: PublishedConfig, config: Mapping[str, Any], names: Any, layout: Layout, source: str
) -> EagleConfig:
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
