"""Decoder layer and rotary positions of hidden-state drafters, independent of the KV cache; layers in fast kernels.

In the C++ kernels, one call runs all decoder layers, or grows a tree with a recurrent cell. With static shapes, fused
GPU kernels run decoder layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmspec import ops
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.plan import StepPlan
from mmspec.core.target import Target
from mmspec.core.tree import TokenTree
from mmspec.drafters.spec import LayerShape
from mmspec.errors import explained
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, LANES, BlockLinear, place_together
from mmspec.quantisation.linear import GROUP, PackedLinear
from mmspec.targets.packing import linear_of
from mmspec.targets.recognise import is_hooked
from mmspec.targets.static_forward import (
    AttentionMetadata,
    Buffers,
    FusedLayer,
    FusedNorm,
    JoinedLinear,
    cache_states,
    run_layers,
)
from mmspec.targets.transformers_target import TransformersTarget

Attend = Callable[..., Tensor]
Rotation = tuple[Tensor, Tensor]


class Norm(nn.RMSNorm):
    """RMSNorm that computes in float32 under autocast."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dtype == self.weight.dtype else x.float())


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
        self, shape: LayerShape, width: int, *, qkv_bias: bool = False, input_norm: bool = False, **before: nn.Module
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
    def parts(self) -> FusedLayer:
        """The layer's modules for fast kernels."""
        both = {"attention": self.input_norm, "mlp": self.post_norm}
        norms = {name: FusedNorm(norm, norm.eps) for name, norm in both.items() if isinstance(norm, Norm)}
        return FusedLayer(self.qkv, self.out, self.gate_up, self.down, norms, self.shape.head_dim**-0.5)

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
    """Gather entries, (batch, taken) int64 or None for all: (batch, entries, hidden) -> (batch, taken, hidden)."""
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
            self.over_x = type(layer)(weight) if isinstance(layer, PackedLinear) else linear_of(weight, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenLinear:
        return self  # forked drafters share weights

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
    """Rotary positions, and for M-RoPE the position axis of each frequency, (head_dim / 2,) int64. Raises
    ``UserError``: scaling parameters are missing or invalid."""
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


class Native:
    """Weights in the C++ kernels, as process-local pointers. Copies of a drafter share them; unpickling calls the
    constructor again with the same arguments."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class NativeLayers(Native):
    """Native decoder layers. They write bfloat16 keys and values to caches that no other implementation may use.
    ``kind``: format of the weights, see ``BLOCKS``."""

    def __init__(self, layers: Sequence[FusedLayer], shape: LayerShape, kind: str) -> None:
        super().__init__(layers, shape, kind)
        self._shape = shape
        groups = [(_products(layer), [layer.out], [layer.gate_up], [layer.down]) for layer in layers]
        self._linears = [[_linear(parts, kind) for parts in group] for group in groups]
        place_together(chain(*self._linears))
        parts: list[Any] = []
        for place, (layer, linears) in enumerate(zip(layers, self._linears, strict=True)):
            qkv, out, gate_up, down = (linear.native for linear in linears)
            first = layer.norms.get("attention")
            parts.append(
                cpu.sublayer_weights(
                    *("attention", [qkv], out),
                    *(_gain(layer, attention=1), _gain(layer, query=shape.heads, key=shape.kv_heads)),
                    heads=shape.heads,
                    groups=shape.kv_heads,
                    head_dim=shape.head_dim,
                    rotated=shape.head_dim,
                    attention_scale=layer.scale,
                    parts=1 if first is None else first.module.weight.numel() // first.module.weight.shape[-1],
                    normed_residual=layer.normed_residual,
                    place=place,
                    ends_layer=layer is layers[-1],  # for ``middle``
                )
            )
            parts.append(cpu.sublayer_weights("mlp", [gate_up], down, _gain(layer, mlp=1), ends_layer=True))
        self._weights = cpu.sublayers(parts)

    @staticmethod
    def takes(shape: LayerShape) -> bool:
        """Whether the kernels support layers of a shape."""
        widths = shape.hidden_size, shape.mlp, shape.heads * shape.head_dim
        return shape.head_dim in cpu.HEAD_DIMS and all(width and width % GROUP == 0 for width in widths)

    def __call__(
        self, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache, middle: bool = False
    ) -> Tensor:
        """Run the layers on new entries and write them to the cache; arguments as for ``hidden_state.run``.

        Returns:
            The last layer's outputs, (batch, nodes, hidden) or, with ``middle``, (batch, nodes, 2 * hidden).
        """
        storage, start = self._storage(cache, x)
        mask = allowed if allowed is None or allowed.stride(3) == 1 else allowed.contiguous()
        states = cpu.decode_sublayers(
            self._weights, x.float().contiguous(), _rotations(rotation, x), mask, storage, start
        )
        return (torch.cat([states[-1], states[-2]], dim=-1) if middle else states[-1]).to(x.dtype)

    def write(self, x: Tensor, rotation: Rotation, cache: TreeCache) -> None:
        """Write the layers' keys and values of states, (batch, nodes, hidden), to the cache."""
        storage, start = self._storage(cache, x)
        cpu.write_keys_values(self._weights, x.float().contiguous(), _rotations(rotation, x), storage, start)

    def _storage(self, cache: TreeCache, x: Tensor) -> tuple[Tensor, int]:
        like = x.new_empty(self._shape.kv_heads, 0, self._shape.head_dim, dtype=torch.bfloat16)
        start = cache.get_seq_length()
        rows, nodes, _ = x.shape
        return cache.kv.shared(cache.attending, rows, nodes, like, start), start


def _rotations(rotation: Rotation, x: Tensor) -> Tensor:
    """Rotation for ``cpu.decode_sublayers``, (1, batch, nodes, 2, head_dim / 2) float32."""
    cos, sin = rotation
    half = cos.shape[-1] // 2
    turns = torch.stack([cos[..., 0, :half], sin[..., 0, half:]], dim=-2).float()
    return turns.expand(1, *x.shape[:2], -1, -1).contiguous()


def _linear(parts: Sequence[Any], kind: str) -> BlockLinear:
    """One layer of the concatenated outputs of several."""
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).float()
    return BLOCKS[kind](torch.cat([part.weight.detach() for part in parts]), bias)


def _products(layer: FusedLayer) -> Sequence[Any]:
    """The linear layers that compute queries, keys and values."""
    return layer.qkv.parts if isinstance(layer.qkv, JoinedLinear) else [layer.qkv]


def _gain(layer: FusedLayer, **counts: int) -> cpu.Gain | None:
    """Concatenated gains of a layer's norms, each repeated a number of times; None without them."""
    norms = [(layer.norms[name], count) for name, count in counts.items() if name in layer.norms]
    gains = [norm.module.weight.detach().float().flatten().repeat(count) for norm, count in norms]
    return (torch.cat(gains), norms[0][0].eps) if norms else None


class NativeCell(Native):
    """Recurrent cell in the C++ kernels, which grow a tree in one call.

    Args:
        table: table of the cell's input layer, see ``TokenLinear``.
        layers: the input layer's part for states, ``cell.out``, the layer before the head, and the head.
    """

    def __init__(self, norm: nn.LayerNorm, table: Tensor, layers: Sequence[BlockLinear]) -> None:
        super().__init__(norm, table, layers)
        self._table = table.float().contiguous()
        self._norm = copy.deepcopy(norm).float()
        self._weights = cpu.cell_weights([layer.native for layer in layers], self._table, self._norm)

    @classmethod
    def of(cls, network: Any, cell_input: TokenLinear, head: Any) -> NativeCell | None:
        """Native form of a network's cell; None if the kernels are not in use or do not support its layers.

        Args:
            cell_input: ``network.cell.into`` as a ``TokenLinear``.
            head: output layer, from predicted states to draft logits.
        """
        cell, config = network.cell, network.config
        if cell_input.table is None or config.norm_output or config.confidence or config.hidden_size % LANES:
            return None
        if not cpu_library.in_use(torch.empty(0, dtype=torch.float32, device=cell_input.table.device)):
            return None
        own = (cell.narrow, cell.head) if config.rank else (cell.guess, getattr(head, "linear", None))
        layers = [layer for layer in map(BlockLinear.of, (cell_input.over_x, cell.out, *own)) if layer is not None]
        return cls(cell.norm, cell_input.table, layers) if len(layers) == 4 else None

    def __call__(
        self,
        token: Tensor,
        carried: Tensor,
        first: tuple[Tensor, Tensor],
        draft_ids: Tensor | None,
        width: int,
        depth: int,
        plan: StepPlan,
        nodes: int,
    ) -> TokenTree:
        """Grow a tree of at most ``nodes`` draft tokens; other arguments as for ``grow_tree``.

        Args:
            carried: (batch, hidden), states that predicted the first level.
            draft_ids: (n,) int64, draft vocabulary; None is the target's.
            width: nodes extended per level.
        """
        tokens, log_probs = first
        (tokens, parents, log_probs), levels = cpu.draft_cells(
            *(self._weights, carried.float(), (tokens, log_probs.float()), token, draft_ids),
            *(width, depth, plan.least_gain, min(nodes, plan.nodes)),
        )
        tree = TokenTree(tokens, parents, log_probs=log_probs, check=False)
        tree.levels = levels
        return tree


class FusedLayers:
    """Fused decoder layers over a static-shape cache; ``NativeLayers`` is the counterpart for dynamic shapes."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers, self._keys_values = layers, [_products(layer)[-1] for layer in layers]

    @classmethod
    def of(cls, layers: Sequence[Any], shape: LayerShape) -> FusedLayers | None:
        """Fuse a network's layers; None if they have no MLP or packed weights."""
        parts: list[FusedLayer] = [layer.parts for layer in layers] if shape.mlp else []
        dense = all(type(one) is nn.Linear for part in parts for one in _products(part))
        return cls(parts) if parts and dense else None

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        metadata: Sequence[AttentionMetadata],
        cache: TreeCache,
        middle: bool = False,
        last: Norm | None = None,
    ) -> Tensor:
        """Run the layers on new entries and write them to the cache.

        Args:
            x: (batch, nodes, any), inputs.
            rotation: cosines and sines, (batch, nodes or 1, 1, head_dim) each.
            metadata: attention metadata of each layer.
            last: norm to apply to the last layer's outputs.

        Returns:
            The last layer's outputs, (batch, nodes, hidden) or, with ``middle``, (batch, nodes, 2 * hidden).
        """
        turns, buffers = [_turns(rotation)] * len(self._layers), self._buffers(cache, len(x))
        add = not middle and last is None
        (*_, residual), y = run_layers(self._layers, x, turns, buffers, metadata, add)
        if last is not None:
            return FusedNorm(last, last.eps)(y, residual, None)[1]
        return y if add else torch.cat([residual + y, residual], dim=-1)

    def write(self, x: Tensor, rotation: Rotation, metadata: AttentionMetadata, cache: TreeCache) -> None:
        """Write keys and values of states, (batch, nodes, hidden), for layers with separate query projections."""
        turns = _turns(rotation)
        for layer, product, buffers in zip(self._layers, self._keys_values, self._buffers(cache, len(x)), strict=True):
            cache_states(layer, product(x), turns, buffers, metadata)

    def _buffers(self, cache: TreeCache, rows: int) -> list[Buffers]:
        return [[states[:rows] for states in cache.kv.states(place)] for place in range(len(self._layers))]


def _turns(rotation: Rotation) -> Rotation:
    cos, sin = rotation
    return cos.squeeze(2), sin.squeeze(2)
