"""Drafter networks in fast kernels.

In the C++ kernels, one call runs all decoder layers, or grows a tree with a recurrent cell. With static shapes, fused
GPU kernels run decoder layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from mmspec.cache.tree_cache import TreeCache
from mmspec.core.plan import StepPlan
from mmspec.core.tree import TokenTree
from mmspec.drafters.layer import LayerParts, Norm, Rotation, TokenLinear
from mmspec.drafters.spec import LayerShape
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, LANES, BlockLinear, place_together
from mmspec.quantisation.linear import GROUP
from mmspec.targets.static_forward import (
    AttentionMetadata,
    Buffers,
    FusedLayer,
    FusedNorm,
    JoinedLinear,
    Linear,
    cache_states,
    run_layers,
)


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

    Args:
        kind: format of the weights, see ``BLOCKS``.
    """

    def __init__(self, layers: Sequence[LayerParts], shape: LayerShape, kind: str) -> None:
        super().__init__(layers, shape, kind)
        self._shape = shape
        self._linears = [linear for layer in layers for linear in _linears(layer, shape, kind)]
        self._norms = [_norms(layer, shape) for layer in layers]
        place_together(self._linears)
        native = [linear.native for linear in self._linears]
        self._weights = cpu.decoder_weights(
            [
                cpu.layer_weights(
                    native[4 * place : 4 * place + 4],
                    self._norms[place],
                    *(shape.heads, shape.kv_heads, shape.head_dim),
                    parts=max(1, len(layer.attention_norms)),
                    normed_residual=layer.normed_residual,
                )
                for place, layer in enumerate(layers)
            ]
        )

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
        scale = self._shape.head_dim**-0.5
        between = x.new_empty(*x.shape[:2], self._shape.hidden_size, dtype=torch.float32) if middle else None
        states = cpu.decode(
            self._weights, x.float().contiguous(), _pairs(rotation, x), mask, scale, storage, start, between
        )[-1]
        return (states if between is None else torch.cat([states, between], dim=-1)).to(x.dtype)

    def write(self, x: Tensor, rotation: Rotation, cache: TreeCache) -> None:
        """Write the layers' keys and values of states, (batch, nodes, hidden), to the cache."""
        storage, start = self._storage(cache, x)
        cpu.write_keys_values(self._weights, x.float().contiguous(), _pairs(rotation, x), storage, start)

    def _storage(self, cache: TreeCache, x: Tensor) -> tuple[Tensor, int]:
        like = x.new_empty(self._shape.kv_heads, 0, self._shape.head_dim, dtype=torch.bfloat16)
        start = cache.get_seq_length()
        rows, nodes, _ = x.shape
        return cache.kv.shared(cache.attending, rows, nodes, like, start), start


def _pairs(rotation: Rotation, x: Tensor) -> Tensor:
    """Rotation for adjacent feature pairs, (batch, nodes, 1, head_dim / 2) complex64."""
    cos, sin = rotation
    half = cos.shape[-1] // 2
    turns = torch.complex(cos[..., :half].float(), sin[..., half:].float())
    return turns.expand(*x.shape[:2], -1, -1).contiguous()


def _linears(layer: LayerParts, shape: LayerShape, kind: str) -> list[BlockLinear]:
    weights = [_weight(part) for part in layer.qkv]
    biases = [part.bias for part in layer.qkv]
    whole = None if biases[0] is None else _neighbours(torch.cat(biases).float(), shape)  # type: ignore[arg-type]
    qkv = BLOCKS[kind](_neighbours(torch.cat(weights), shape), whole)
    return [qkv, *(BLOCKS[kind](_weight(part)) for part in (layer.out, layer.gate_up, layer.down))]


def _weight(layer: Any) -> Tensor:
    return layer.weight.detach()


def _neighbours(qkv: Tensor, shape: LayerShape) -> Tensor:
    """Permute rows of queries and keys so that rotated feature pairs are adjacent."""
    turned = (shape.heads + shape.kv_heads) * shape.head_dim
    order = torch.arange(turned).view(-1, 2, shape.head_dim // 2).transpose(1, 2).flatten()
    return torch.cat([qkv[:turned][order], qkv[turned:]])


def _norms(layer: LayerParts, shape: LayerShape) -> dict[str, tuple[Tensor, float]]:
    order = torch.arange(shape.head_dim).view(2, -1).t().flatten()
    gains = {"attention": [_weight(norm) for norm in layer.attention_norms], "mlp": [_weight(layer.mlp_norm)]}
    counts = zip(layer.head_norms, (shape.heads, shape.kv_heads), strict=False)
    gains["head"] = [_weight(norm)[order].expand(count, -1) for norm, count in counts]
    return {name: (torch.cat(parts).float(), shape.norm_eps) for name, parts in gains.items() if parts}


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

    def __init__(self, layers: Sequence[LayerParts], shape: LayerShape) -> None:
        self._layers = [_fused(layer, shape) for layer in layers]
        self._keys_values, self._eps = [layer.qkv[-1] for layer in layers], shape.norm_eps

    @classmethod
    def of(cls, layers: Sequence[Any], shape: LayerShape) -> FusedLayers | None:
        """Fuse a network's layers; None if they have no MLP or packed weights."""
        parts: list[LayerParts] = [layer.parts for layer in layers] if shape.mlp else []
        dense = all(type(one) is nn.Linear for part in parts for one in part.qkv)
        return cls(parts, shape) if parts and dense else None

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
            return FusedNorm(last, self._eps)(y, residual, None)[1]
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


def _fused(layer: LayerParts, shape: LayerShape) -> FusedLayer:
    norms: dict[str, Any] = {"mlp": layer.mlp_norm, **dict(zip(("query", "key"), layer.head_norms, strict=False))}
    if len(layer.attention_norms) == 1:
        (norms["attention"],) = layer.attention_norms
    elif layer.attention_norms:
        norms["attention"] = SimpleNamespace(weight=torch.stack([norm.weight for norm in layer.attention_norms]))
    qkv: Linear = layer.qkv[0] if len(layer.qkv) == 1 else JoinedLinear(layer.qkv)
    return FusedLayer(
        *(qkv, layer.out, layer.gate_up, layer.down),
        {name: FusedNorm(norm, shape.norm_eps) for name, norm in norms.items()},
        shape.head_dim**-0.5,
        normed_residual=layer.normed_residual,
    )
