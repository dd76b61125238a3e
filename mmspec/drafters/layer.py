"""Decoder layer and rotary positions of hidden-state drafters, independent of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmspec import ops
from mmspec.core.target import Target
from mmspec.drafters.spec import LayerShape
from mmspec.errors import explained
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.recognise import is_hooked
from mmspec.targets.transformers_target import TransformersTarget

Attend = Callable[..., Tensor]
Rotation = tuple[Tensor, Tensor]


class Norm(nn.RMSNorm):
    """RMSNorm that computes in float32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dtype == self.weight.dtype else x.float())


@dataclass(frozen=True)
class LayerParts:
    """The modules of a pre-norm decoder layer.

    Attributes:
        qkv: linear layers whose concatenated outputs are queries, keys and values.
        attention_norms: norms of the input parts, in order; the last part is the residual. Empty without norms.
        head_norms: norms of queries and keys; empty without norms.
        normed_residual: the residual is the normed input.
    """

    qkv: Sequence[nn.Module]
    out: nn.Module
    gate_up: nn.Module
    down: nn.Module
    mlp_norm: Norm
    attention_norms: Sequence[Norm] = ()
    head_norms: Sequence[Norm] = ()
    normed_residual: bool = False


class DecoderLayer(nn.Module):
    """Attention and, unless its size is 0, gated MLP. Parameters are (out, in); ``qkv`` stacks queries, keys and
    values, ``gate_up`` gate and up.

    Args:
        width: input size of the QKV projection.
        qkv_bias: bias on queries, keys and values.
        input_norm: apply RMSNorm to the inputs.
        before: modules registered before the layer's own, for the order of parameters.
    """

    def __init__(
        self,
        shape: LayerShape,
        width: int,
        *,
        qkv_bias: bool = False,
        input_norm: bool = False,
        **before: nn.Module,
    ) -> None:
        super().__init__()
        self.shape = shape
        for name, module in before.items():
            self.add_module(name, module)
        inner, hidden = shape.heads * shape.head_dim, shape.hidden_size
        self.qkv = nn.Linear(width, inner + 2 * shape.kv_heads * shape.head_dim, bias=qkv_bias)
        self.out = nn.Linear(inner, hidden, bias=False)
        if shape.mlp:
            self.gate_up = nn.Linear(hidden, 2 * shape.mlp, bias=False)
            self.down = nn.Linear(shape.mlp, hidden, bias=False)
        self.input_norm = Norm(width, shape.norm_eps) if input_norm else nn.Identity()
        if shape.mlp:
            self.post_norm = Norm(hidden, shape.norm_eps)

    def attention(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Output of the attention: (batch, nodes, width) -> (batch, nodes, hidden).

        Args:
            rotation: cosines and sines from ``Rotary``, broadcastable to (batch, nodes, heads, head_dim).
            attend: attention over queries, keys, values, (batch, heads or kv_heads, nodes, head_dim), cache and mask.
        """
        shape = self.shape
        batch, nodes, _ = x.shape
        turned = shape.heads + shape.kv_heads
        qkv = self.qkv(x).view(batch, nodes, turned + shape.kv_heads, shape.head_dim)
        qk = rotate(qkv[:, :, :turned], rotation)
        q, k = qk[:, :, : shape.heads].transpose(1, 2), qk[:, :, shape.heads :].transpose(1, 2)
        read = attend(q, k, qkv[:, :, turned:].transpose(1, 2))
        return self.out(read.transpose(1, 2).flatten(2))

    @property
    def parts(self) -> LayerParts:
        norms = [self.input_norm] if isinstance(self.input_norm, Norm) else []
        return LayerParts([self.qkv], self.out, self.gate_up, self.down, self.post_norm, norms)

    def mlp(self, x: Tensor) -> Tensor:
        """Output of the pre-norm MLP, (..., hidden)."""
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LlamaLayer(DecoderLayer):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, shape.hidden_size, input_norm=True)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """(batch, nodes, hidden) -> (batch, nodes, hidden); arguments as for ``attention``."""
        x = x + self.attention(self.input_norm(x), rotation, attend)
        return x + self.mlp(x) if self.shape.mlp else x


_MAX_RATIO = 4  # maximum draft vocabulary of a table, as a multiple of the hidden size, to limit memory


def take(x: Tensor, order: Tensor | None) -> Tensor:
    """Gather entries by index, (batch, taken) int64 or None for all: (batch, entries, hidden) -> (batch, taken,
    hidden)."""
    return x if order is None else x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


@dataclass(frozen=True)
class NodeInputs:
    """Concatenates embeddings of drafted tokens with the states that predicted them.

    Attributes:
        table: module with the embedding matrix as ``weight``; None if ``embed`` is not a plain lookup.
        draft_ids: (n,) int64, draft vocabulary; None is the target's.
    """

    embed: Callable[[Tensor], Tensor]
    table: nn.Embedding | None
    draft_ids: Tensor | None

    @classmethod
    def of(cls, target: Target, draft_ids: Tensor | None) -> NodeInputs:
        table = target.embedding if isinstance(target, TransformersTarget) else None
        return cls(target.embed, table if type(table) is nn.Embedding and not is_hooked(table) else None, draft_ids)

    def __call__(self, tokens: Tensor, states: Tensor, origin: Tensor | None) -> Tensor:
        """(batch, nodes, hidden + any).

        Args:
            tokens: (batch, nodes) int64, draft-vocabulary indices.
            states: (batch, entries, any).
            origin: (batch, nodes) int64, entry of each node; None is the identity.
        """
        weight = None if self.table is None else self.table.weight.detach()
        if origin is not None and weight is not None and (weight.dtype, weight.device) == (states.dtype, states.device):
            return ops.node_inputs(weight, tokens, states, origin, self.draft_ids)
        tokens = tokens if self.draft_ids is None else self.draft_ids[tokens]
        return torch.cat([self.embed(tokens).to(states.dtype), take(states, origin)], dim=-1)


class TokenLinear:
    """Linear layer over ``NodeInputs``, with a precomputed table of embedding products for a small draft vocabulary.

    Attributes:
        table: (draft tokens, out), products with embeddings, plus bias; None for a large vocabulary.
        over_x: the layer's part that multiplies states; used with ``table``.
    """

    def __init__(self, layer: nn.Linear | PackedLinear, inputs: NodeInputs) -> None:
        self._layer, self._inputs, draft_ids = layer, inputs, inputs.draft_ids
        self.table: Tensor | None = None
        self.over_x: nn.Linear | PackedLinear = layer
        width = layer.weight.shape[1] // 2
        if draft_ids is not None and len(draft_ids) <= _MAX_RATIO * width:
            self.table = F.linear(inputs.embed(draft_ids), layer.weight[:, :width], layer.bias)
            weight = layer.weight[:, width:]
            # Keep the memory layout of the layer's weight.
            by_row = layer.weight.stride(1) == 1
            weight = weight.contiguous() if by_row else weight.t().contiguous().t()
            if isinstance(layer, PackedLinear):
                self.over_x = type(layer)(weight)
            else:
                self.over_x = nn.Linear(width, len(weight), bias=False, device="meta")
                self.over_x.weight = nn.Parameter(weight, requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenLinear:
        # forked drafters share weights
        return self

    def __call__(self, tokens: Tensor, x: Tensor, origin: Tensor | None) -> Tensor:
        """(batch, nodes, out); arguments as for ``NodeInputs``."""
        return self.split(tokens, x, origin)[0]

    def split(self, tokens: Tensor, x: Tensor, origin: Tensor | None) -> tuple[Tensor, Tensor]:
        """Like ``__call__``, and also return a copy of each node's states, (batch, nodes, any)."""
        if self.table is not None:
            taken = take(x, origin)
            return self.over_x(taken) + F.embedding(tokens, self.table), taken
        inputs = self._inputs(tokens, x, origin)
        return self._layer(inputs), inputs[..., -x.shape[-1] :]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) with Llama's half pairing: (batch, nodes, heads, head_dim)."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotary_frequencies(head_dim: int, theta: float) -> Tensor:
    """Unscaled rotary frequencies, (head_dim / 2,) float32."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


class Rotary:
    """Table of cosines and signed sines by position, computed in float32 and grown on demand.

    Args:
        frequencies: (head_dim / 2,) float32.
        scale: factor of cosines and sines (YaRN).
    """

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        self.frequencies, self.scale = frequencies, scale
        self._tables: Tensor | None = None  # (positions, 2, 1, head_dim)
        self.version = object()  # replaced whenever the tables are recomputed

    def reserve(self, length: int, like: Tensor) -> None:
        """Compute tables for positions below ``length``, in the dtype and on the device of ``like``."""
        have = self._tables
        if have is not None and len(have) >= length and (have.dtype, have.device) == (like.dtype, like.device):
            return
        length = 1 << (length - 1).bit_length()
        self.version = object()
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        angle = torch.outer(positions, self.frequencies.to(like.device))
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        # Folding the sign of the rotated half into the sine saves a negation per call.
        tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self._tables = torch.stack(tables, dim=1).to(like.dtype)[:, :, None]

    def __call__(self, positions: Tensor | slice) -> Rotation:
        """Rotation at positions, a slice or (...) int64: cosines and sines, (..., 1, head_dim) each."""
        assert self._tables is not None, "reserve comes first"
        cos, sin = self._tables[positions].unbind(-3)
        return cos, sin

    def by_axis(self, positions: Tensor, axis: Tensor) -> Rotation:
        """Rotation at positions with several axes (M-RoPE, arXiv 2409.12191).

        Args:
            positions: (axes, batch, nodes) int64.
            axis: (head_dim / 2,) int64, position axis of each frequency.

        Returns:
            (batch, nodes, 1, head_dim) each.
        """
        chosen = axis.to(positions.device).repeat(2).expand(*positions.shape[1:], 1, -1)[None]
        cos, sin = (table.gather(0, chosen)[0] for table in self(positions))
        return cos, sin


def rotary_of(config: LayerShape) -> tuple[Rotary, Tensor | None]:
    """Rotary positions, and for M-RoPE the position axis of each frequency, (head_dim / 2,) int64.

    Raises:
        UserError: scaling parameters are missing or invalid.
    """
    rope, axis = config.rope_parameters, None
    with explained(f"rotary positions must be valid: got {rope}", KeyError, TypeError, ValueError, AttributeError):
        frequencies, scale = rotary_frequencies(config.head_dim, float(rope["rope_theta"])), 1.0
        if rope["rope_type"] != "default":
            like = LlamaConfig(
                hidden_size=config.heads * config.head_dim,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                rope_parameters={k: v for k, v in rope.items() if not k.startswith("mrope")},
            )
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](like, torch.device("cpu"))
    if "mrope_section" in rope:
        axis = _axes(rope["mrope_section"], bool(rope.get("mrope_interleaved")))
    return Rotary(frequencies.float(), scale), axis


def _axes(sections: list[int], interleaved: bool) -> Tensor:
    """Position axis of each frequency: in consecutive sections (arXiv 2409.12191), or interleaved as in Qwen3-VL, where
    height and width take every third frequency, up to the size of their sections."""
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sections, dtype=torch.long))
    axis = torch.zeros(sum(sections), dtype=torch.long)
    for number in (1, 2):
        axis[number : 3 * sections[number] : 3] = number
    return axis
