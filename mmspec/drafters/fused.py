"""Fused GPU decoder layers for drafters with static shapes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.layer import LayerParts, Norm, Rotation
from mmspec.drafters.shape import LayerShape
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
