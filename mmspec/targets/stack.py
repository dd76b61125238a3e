"""All layers of a decoder of ``MergedLayer`` as one call of the C++ kernels."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cache.tree_cache import TreeCache
from mmspec.ops import cpu
from mmspec.targets.decoder_layer import MergedLayer, allowed_slots, rotation_of

_MAX_ROWS = 1024  # every layer's output is kept


class Stack:
    """A decoder's layers, computed by one call in all but large passes.

    In a pass of the decoder, the first layer's forward computes the outputs of all layers. Each other layer returns its
    own if it is called with the output of the layer before it, so hooks on layers receive the usual inputs and outputs.
    """

    def __init__(self, layers: list[MergedLayer]) -> None:
        self._layers = layers
        self._outputs: list[Tensor] = []
        self._rotations = torch.empty(0)  # (positions, 1, head_dim / 2) complex64
        for place, layer in enumerate(layers):
            layer.place, layer.stack = place, self

    def states(
        self, decoder: Any, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> list[Tensor] | None:
        """Inputs of the layers and the output of the last, without a pass of the decoder.

        Args:
            decoder: a decoder with these layers whose embeddings go to the first of them as they are.
            tokens: (batch, nodes) int64.
            positions: (batch, nodes) int64.
            mask: (batch, 1, nodes, slots) bool or additive; None for single nodes that attend to all slots.
            cache: a ``TreeCache``.

        Returns:
            (batch, nodes, hidden) each; None where a pass of the decoder is needed.
        """
        hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers)
        usual = positions.ndim == 2 and (isinstance(mask, Tensor) or (mask is None and tokens.shape[1] == 1))
        changing = any(kind in getattr(decoder.rotary_emb, "rope_type", "dynamic") for kind in ("dynamic", "longrope"))
        if hooks or changing or not usual or not self._layers[0].attends_by_kernel({}) or self._weights is None:
            return None
        x, highest = decoder.embed_tokens(tokens), int(positions.max())
        if highest >= len(self._rotations):
            known = torch.arange(2 * (highest + 1), device=x.device)[None]
            self._rotations = rotation_of(*decoder.rotary_emb(x, position_ids=known))[0]
        outputs = self._computed(x, self._rotations[positions], mask, cache)
        return None if outputs is None else [x, *outputs]

    def output(self, place: int, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> Tensor | None:
        """A layer's output; None where the layer has to compute it."""
        if place == 0:
            self._outputs = self._computed(x, rotation.expand(len(x), -1, -1, -1), mask, cache) or []
        elif not self._outputs or x is not self._outputs[place - 1]:
            return None
        return self._outputs[place] if self._outputs else None

    def _computed(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> list[Tensor] | None:
        first = self._layers[0]
        stored = isinstance(cache, TreeCache) and not cache.static_shapes and len(cache.attending) >= len(self._layers)
        small = x.shape[0] * x.shape[1] <= _MAX_ROWS
        if not (small and stored) or self._weights is None:
            return None
        like = x.new_empty(first.kv_heads, 0, first.head_dim, dtype=torch.bfloat16)
        start = cache.get_seq_length()
        storage = cache.kv.shared(cache.attending, *x.shape[:2], like, start)
        allowed, scaling = None if mask is None else allowed_slots(mask, len(x)), first.self_attn.scaling
        inputs = x.float().contiguous(), rotation.contiguous(), allowed, scaling
        *inner, last = cpu.decode(self._weights, *inputs, storage, start)
        return [*inner, self._layers[-1].rounded(last)]

    @cached_property
    def _weights(self) -> Any:
        """The layers' weights for ``cpu.decode``; None where it does not compute them all, with one mask."""
        native = [layer.native for layer in self._layers]
        kinds = getattr(self._layers[0].config, "layer_types", None) or []
        return None if None in native or len(set(kinds)) > 1 else cpu.decoder_weights(native)

    def __getstate__(self) -> dict[str, Any]:
        return {"_layers": self._layers, "_outputs": [], "_rotations": self._rotations}


def first_layers(layers: nn.ModuleList, count: int) -> nn.ModuleList:
    """The first layers of a decoder; merged ones as copies with the same weights, which are a stack of their own."""
    first: list[Any] = list(layers[:count])
    if all(isinstance(layer, MergedLayer) for layer in first):
        first = [copy.copy(layer) for layer in first]
        first[-1].last = True
        Stack(first)
    return nn.ModuleList(first)
