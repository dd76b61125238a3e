"""Network of Medusa (arXiv 2401.10774, section 2.1.1) and Hydra (arXiv 2402.05109, section 3).

Heads read the target's last hidden state, after its final norm, at the last token but one: that which predicted the
last token. Head i predicts the (i+1)-th token after the last one. Each is a chain of residual layers ``x + silu(W x)``
and an output layer. Hydra's heads read the embeddings of the tokens in between beside the state, and their first layers
project the residual, too. In Hydra++, the states pass a decoder layer with attention to all earlier ones first.

Published Medusa and Hydra heads (arXiv 2401.10774, 2402.05109): strict reading, without running their code.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.checks import FLAG, Checked, choice, option, settable, whole, within
from mmspec.drafters.checkpoint import take_draft_ids
from mmspec.drafters.hidden_state.layer import Attend, LlamaLayer, Norm, Rotation
from mmspec.drafters.medusa import MedusaConfig
from mmspec.drafters.parts import check_tensors, parameters, rows_of, shapes_of, stack
from mmspec.drafters.published import EAGLE_PARTS, Published, read_layout
from mmspec.drafters.shape import RotaryShape


class ResidualLayer(nn.Module):
    """``x + silu(linear(x))``; a projection of x where the input is wider."""

    def __init__(self, read: int, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(read, width, bias=bias)
        self.residual = nn.Linear(read, width) if read != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


class MedusaNetwork(nn.Module):
    """See the module.

    Attributes:
        heads: from what a head reads, (..., reads), to the state of its output layer, (..., hidden).
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layers: Any = nn.ModuleList([LlamaLayer(config.layer)] if config.prefix else [])
        if config.prefix:
            self.norm = Norm(width, config.layer.norm_eps)
        self.heads: Any = nn.ModuleList()
        for number in range(config.heads):
            reads = [width * (number + 2 if config.grounded else 1)] + [width] * (config.layers - 1)
            self.heads.append(nn.Sequential(*(ResidualLayer(read, width, config.bias) for read in reads)))
        self.outputs: Any = nn.ModuleList(
            nn.Linear(width, config.head, bias=config.head_bias) for _ in range(config.heads if config.head else 0)
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The target's states after the decoder layer, if there is one, (batch, nodes, hidden)."""
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return x

    def state(self, output: Tensor) -> Tensor:
        """What heads read, from the output of ``forward``."""
        return self.norm(output) if self.config.prefix else output

    def scores(self, first: int, states: Sequence[Tensor], head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of the states of the heads from ``first`` on, one after another: (..., n, hidden) each -> (..., all n,
        draft tokens).

        Args:
            head: the target's output layer.
        """
        if not self.config.head:
            return head(torch.cat(list(states), dim=-2))
        own = self.outputs[first : first + len(states)]
        return torch.cat([output(state) for output, state in zip(own, states, strict=True)], dim=-2)

    def take_shape(self, shape: RotaryShape) -> None:
        """Set the shape of the decoder layer, of which its weights only have products."""
        self.config = replace(self.config, prefix=asdict(shape))
        self.layers[0].shape = shape

    @torch.no_grad()
    def start(self, head: Tensor) -> None:
        """Initialise heads and decoder layer as the identity of the state, and output layers.

        Args:
            head: (draft tokens, hidden), weight of the target's output layer.
        """
        for layer in self.layers:
            layer.out.weight.zero_()
            layer.down.weight.zero_()
        for layer in (layer for chain in self.heads for layer in chain):
            for parameter in layer.parameters():
                parameter.zero_()
            if isinstance(layer.residual, nn.Linear):
                layer.residual.weight.fill_diagonal_(1.0)
        for output in self.outputs:
            output.weight.copy_(head)
            if output.bias is not None:
                output.bias.zero_()


_WHAT = {"medusa": "Medusa heads", "hydra": "Hydra heads"}
_AT = "prefix_embeding_layer"  # as files spell it
_LAYER = {f"layers.0.{ours}": [f"{_AT}.{one}" for one in some] for ours, some in EAGLE_PARTS.items()}
_LAYER["norm.weight"] = [f"{_AT}.norm.weight"]
_COPIES = ("input_embed_fn.weight", f"{_AT}.embed_tokens.weight")
_SHARED = ("lm_head.weight", "lm_heads.0.weight")  # the target's output layer


class _Names(NamedTuple):
    """Published names of a residual layer, its projection and an output layer; ``odd`` is 2 * layer + 1."""

    linear: str
    residual: str
    output: str

    def of(self, ours: str, layers: int) -> str:
        """The published name of a parameter of heads with ``layers`` layers."""
        kind, head, *rest, leaf = ours.split(".")
        if kind == "outputs":
            return f"{self.output.format(head=head, layers=layers)}.{leaf}"
        template = self.linear if rest[1] == "linear" else self.residual
        return f"{template.format(head=head, layer=rest[0], odd=2 * int(rest[0]) + 1)}.{leaf}"


_ORIGINAL = _Names("{head}.{layer}.linear", "", "{head}.{layers}")
_VLLM = _Names("blocks.{head}.layers.{layer}", "", "lm_heads.{head}")
_MLP = _Names("hydra_mlp.{head}.{layer}.linear", "hydra_mlp.{head}.{layer}.res_connection", "hydra_lm_head.{head}")
_PREFIX = _Names("hydra_mlp.{head}.{odd}.linear", "hydra_mlp.{head}.{odd}.res_connection", "hydra_lm_head.{head}.1")


@dataclass(frozen=True)
class _Settings(Checked):
    """Fields of ``config.json``, without ``medusa_`` or ``hydra_`` before them."""

    num_heads: int = option(1, whole(1, 64))
    num_layers: int = option(1, whole(1, 64))
    num_hidden_layers: int = option(1, whole(1, 64))
    vocab_size: int | None = option(None, settable(whole(1, 2**24)))
    fc_bias: bool = option(False, FLAG)
    original_lm_head: bool = option(False, FLAG)
    logit_scale: float = option(1.0, within(1, 1))
    head_arch: str = option("mlp", choice("mlp", "prefix-mlp"))
    grounded_heads: bool = option(False, FLAG)
    hidden_state_offset: int = option(0, whole(0, 0))


def read_published(folder: Path, layout: str) -> Published:
    """Read published heads; see ``convert``."""
    return convert(*read_layout(folder, layout, _WHAT[layout]), layout, folder)


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str, folder: Path) -> Published:
    """Validate published tensors and convert them to those of a ``MedusaNetwork``.

    Args:
        config: contents of ``config.json``.
        layout: ``"medusa"`` or ``"hydra"``.
        folder: of the checkpoint, for error messages.

    Returns:
        See ``Published``; ``prefix`` of the configuration has the right sizes and is otherwise known from the target
        only.

    Raises:
        UserError: an unsupported network, or a tensor that is missing, unexpected or does not match ``config.json``.
    """
    plain = {name.removeprefix(f"{layout}_"): value for name, value in config.items()}
    settings = _Settings.read(plain, f"{folder}/config.json", others=True)
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    draft_ids = take_draft_ids(tensors, settings.vocab_size or 0, folder, "token_map")
    if draft_ids is not None:  # output layers may have a row of every token
        whole_rows = [name for name in tensors if rows_of(tensors, name) == settings.vocab_size]
        tensors |= {name: tensors[name][draft_ids] for name in whole_rows if name.startswith("lm_heads.")}
    names = _VLLM if any(name.startswith("blocks.") for name in tensors) else _ORIGINAL
    if layout == "hydra":
        names = _PREFIX if settings.head_arch == "prefix-mlp" else _MLP
    network = _network(settings, tensors, names, folder, draft_ids)
    state = parameters(MedusaNetwork, network)
    parts = {ours: _LAYER.get(ours) or [names.of(ours, network.layers)] for ours in state}
    shapes = shapes_of(state, parts, network.layer)
    copies = {*_COPIES, *(_SHARED if settings.original_lm_head else ())} & tensors.keys()
    shapes |= {name: (rows_of(tensors, name) or 0, network.hidden_size) for name in copies}
    check_tensors(tensors, shapes, _WHAT[layout], str(folder))
    named, vocab = config.get("base_model_name_or_path"), settings.vocab_size or network.head or None
    verifier = {"name_or_path": str(named or ""), "hidden_size": network.hidden_size, "vocab_size": vocab}
    return network, stack(tensors, parts), draft_ids, verifier


def _network(
    settings: _Settings, tensors: Mapping[str, Tensor], names: _Names, folder: Path, draft_ids: Tensor | None
) -> MedusaConfig:
    pattern = re.escape(names.linear.partition("{head}")[0]) + r"(\d{1,4})\."
    found = (re.match(pattern, name) for name in tensors)
    heads = range(max([settings.num_heads, *(int(match[1]) + 1 for match in found if match)]))
    layers = max(settings.num_layers, settings.num_hidden_layers)
    linears = (f"heads.{head}.{layer}.linear.weight" for head in heads for layer in range(layers))
    width = _rows(tensors, (names.of(name, layers) for name in linears))
    rows = _rows(tensors, (names.of(f"outputs.{head}.weight", layers) for head in heads))
    hydra = names in (_MLP, _PREFIX)
    own = hydra or (rows > 0 and not settings.original_lm_head)
    ours = {
        "hidden_size": width,
        "heads": len(heads),
        "layers": layers,
        "bias": settings.fc_bias or names is not _VLLM,
        "grounded": settings.grounded_heads,
        "head": own * (max(rows, 1) if draft_ids is None else len(draft_ids)),
        "head_bias": hydra,
        "prefix": asdict(_layer(tensors, width)) if names is _PREFIX else {},
    }
    return MedusaConfig.read(ours, str(folder))


def _layer(tensors: Mapping[str, Tensor], width: int) -> RotaryShape:
    """A decoder layer's shape by its tensors: heads have the greatest size that fits, up to 128."""
    parts = ("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    names = ([f"{_AT}.layers.0.{one}.weight" for one in some] for some in parts)
    queries, keys, mlp = (max(2, _rows(tensors, some)) for some in names)
    queries += -queries % keys  # where a tensor is missing or misshapen, which is an error later
    size = gcd(keys, 128)
    return RotaryShape(width, queries // size, keys // size, size, mlp)


def _rows(tensors: Mapping[str, Tensor], names: Iterable[str]) -> int:
    """Rows that tensors of these names have, the most if they differ; 0 without any."""
    return max(rows_of(tensors, name) or 0 for name in names)
