"""Medusa and Hydra drafters (arXiv 2401.10774, 2402.05109) for any target: text, vision-language and hybrid models.

Medusa's heads are independent: the tree consists of the paths with the highest product of probabilities (see
``grow_slots``), instead of the papers' fixed trees. In Hydra, the children of a node depend on its path, so the tree
grows level by level, one head per level.

Entry j of a row is the target's state at token j. Only Hydra++ has a KV cache, at token-count positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec import ops
from mmspec.core.plan import StepPlan
from mmspec.core.target import Target
from mmspec.core.tree import TokenTree
from mmspec.drafters.growth import grow_slots, grow_tree
from mmspec.drafters.hidden_state import HiddenStateDrafter
from mmspec.drafters.layer import Attend, LlamaLayer, Norm, Rotation, rotary_of, take
from mmspec.drafters.spec import DrafterSpec, RotaryShape
from mmspec.errors import UserError
from mmspec.validation import option, options, read


@options(kw_only=True)
class MedusaConfig:
    """Configuration of a ``MedusaNetwork``.

    Attributes:
        heads: number of heads; head i, from 0, drafts the (i+1)-th token after the last token.
        bias: whether residual layers have a bias.
        grounded: whether a head reads the embeddings of previously drafted tokens (Hydra, arXiv 2402.05109).
        head: rows of each head's output layer, the draft vocabulary; 0 is the target's output layer.
        head_bias: whether the heads' output layers have a bias.
        prefix: ``RotaryShape`` fields of a decoder layer before the heads (Hydra++); empty without this layer.
    """

    hidden_size: int = option(..., ge=1, le=2**16)
    heads: int = option(..., ge=1, le=64)
    layers: int = option(1, ge=1, le=64)
    bias: bool = True
    grounded: bool = False
    head: int = option(0, ge=0, le=2**24)
    head_bias: bool = False
    prefix: dict = option(dict)

    def __post_init__(self) -> None:
        if self.layer.hidden_size != self.hidden_size:
            raise UserError(f"prefix must have hidden_size {self.hidden_size}: got {self.layer.hidden_size}")

    @property
    def layer(self) -> RotaryShape:
        """Shape of the decoder layer; a minimal placeholder without this layer."""
        least = {"hidden_size": self.hidden_size, "heads": 1, "kv_heads": 1, "head_dim": 2, "mlp": 1}
        return read(RotaryShape, self.prefix or least, "prefix")


class ResidualLayer(nn.Module):
    """``x + silu(linear(x))``; x is projected if the input is wider than the output."""

    def __init__(self, read: int, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(read, width, bias=bias)
        self.residual = nn.Linear(read, width) if read != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


class MedusaNetwork(nn.Module):
    """Network of Medusa (arXiv 2401.10774, section 2.1.1) and Hydra (arXiv 2402.05109, section 3).

    Heads read the target's last hidden state, after its final norm, at the second-to-last token, i.e. the state that
    predicted the last token. Head i predicts the (i+1)-th token after the last token, with a chain of residual layers
    ``x + silu(W x)`` and an output layer. Hydra's heads also read the embeddings of the tokens in between, and their
    first layers also project the residual. In Hydra++, the states first go through a causal decoder layer.

    Attributes:
        heads: modules that map head inputs, (..., reads), to inputs of the output layers, (..., hidden).
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
        """Apply the decoder layer, if present, to the target's states, (batch, nodes, hidden)."""
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return x

    def state(self, output: Tensor) -> Tensor:
        """Inputs of the heads, from the output of ``forward``."""
        return self.norm(output) if self.config.prefix else output

    def scores(self, first: int, states: Sequence[Tensor], head: Callable[[Tensor], Tensor]) -> Tensor:
        """Concatenated logits of heads from ``first`` on: states (..., n, hidden) each -> (..., n, draft tokens)."""
        if not self.config.head:
            return head(torch.cat(list(states), dim=-2))
        own = self.outputs[first : first + len(states)]
        return torch.cat([output(state) for output, state in zip(own, states, strict=True)], dim=-2)

    def take_shape(self, shape: RotaryShape) -> None:
        """Set the shape of the decoder layer; its weights only determine products of sizes."""
        self.config = replace(self.config, prefix=asdict(shape))
        self.layers[0].shape = shape

    @torch.no_grad()
    def start(self, head: Tensor) -> None:
        """Initialise heads and decoder layer as the identity, and output layers as copies of the target's. ``head``:
        (draft tokens, hidden), weight of the target's output layer."""
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


class Medusa(HiddenStateDrafter):
    """Medusa drafter; trees have at most a level per head."""

    name: ClassVar[str] = "medusa"

    config_class = MedusaConfig
    network_class = MedusaNetwork

    @staticmethod
    def shape_of(network: MedusaNetwork) -> RotaryShape:
        return network.config.layer

    def place(self, target: Target, probe: Tensor) -> None:
        if "model_type" in (self.verifier or {}) and self.network.config.prefix:  # of a published checkpoint
            self._take_shape(target)
        super().place(target, probe)

    def _take_shape(self, target: Any) -> None:
        """Copy the decoder layer's shape from the target, as published files do not contain it."""
        own, rope = self.network.config.layer, getattr(target.config, "rope_parameters", None) or {}
        plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
        shape = RotaryShape.like(target.config, mlp=own.mlp, rope=plain)
        expected, received = ([one.heads * one.head_dim, one.kv_heads * one.head_dim] for one in (own, shape))
        if expected != received:
            raise UserError(f"the drafter has queries and keys of widths {expected}: the target has {received}")
        self.network.take_shape(shape)
        self._rotary, self._axis = rotary_of(shape)

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        own = self.network.config.head
        self.keep_to(own or (self.verifier or {}).get("vocab_size"), target)
        return target.head if own else self.target_head(target)

    def reserve(self, width: int) -> None:
        self.cache.reserve_nodes(width)
        self._rotary.reserve(max(map(len, self._history)) + self.position_slack + width, self.sample_embedding)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        config, nodes = self.network.config, min(self.total_tokens, plan.nodes)
        deepest = max(1, min(self.depth, config.heads, plan.depth, nodes))
        state = self._state(len(token))
        tokens, log_probs = self._ranked(0, [head(state) for head in self.network.heads[:deepest]])
        return grow_slots(token, tokens, log_probs, plan, self.total_tokens)

    def _state(self, batch: int) -> Tensor:
        """Inputs of the heads, (batch, 1, hidden)."""
        return self.network.state(self._output.data[:batch, None])

    def _ranked(self, first: int, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Top-k target tokens and their log probabilities, (batch, all nodes, top_k); arguments as for
        ``MedusaNetwork.scores``."""
        tokens, log_probs = ops.top_log_probs(self.network.scores(first, states, self._scores), self.top_k)
        return self.target_tokens(tokens), log_probs


class Hydra(Medusa):
    """Hydra drafter; arguments as for ``Medusa``."""

    name: ClassVar[str] = "hydra"

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        heads = self.network.heads
        if not self.network.config.grounded:
            return super().grow(token, plan)
        read, levels = self._state(len(token)), count()  # (batch, nodes, any): inputs of the next head

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal read
            embeds, level = self.target.embed(beam).to(read.dtype), next(levels)
            read = torch.cat([take(read, origin), embeds], dim=-1)
            return self._ranked(level, [heads[level](read)])

        deepest = min(self.depth, len(heads))
        return grow_tree(token, None, extend, plan, self.top_k, depth=deepest, nodes=self.total_tokens)


MEDUSA = DrafterSpec(
    "medusa",
    "Medusa",
    "heads on the target's last state, one per token ahead, verified as a tree (arXiv 2401.10774)",
    Medusa,
    weights="required",
    train="medusa",
)
HYDRA = DrafterSpec(
    "hydra",
    "Hydra",
    "Medusa's heads, which also read the tokens drafted before (arXiv 2402.05109)",
    Hydra,
    weights="required",
    train="medusa --grounded",
)
