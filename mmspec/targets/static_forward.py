"""Fused decoder layers for passes with static shapes, in few kernel launches.

A Llama layer takes ten launches: residual add with norm, QKV product, rotary embedding with KV write, attention,
reduction of its splits, output product, second norm, gate-up product, activation, down product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.tree_cache import SlotBounds, TreeCache
from mmspec.targets.attention import TreePass, window_of
from mmspec.targets.recognise import (
    HEAD_NORMS,
    PROJECTIONS,
    Rotation,
    epsilon_of,
    gain_of,
    gate_of,
    is_hooked,
    norms_of,
    reproducible,
    rotation_of,
)

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FusedNorm:
    """An RMSNorm.

    Attributes:
        module: has the ``weight``, (features,) or (parts, features).
        plus: added to the weight (1 in Gemma).
    """

    module: Any
    eps: float
    plus: float = 0.0

    def __call__(self, x: Tensor, residual: Tensor | None, after: FusedNorm | None) -> tuple[Tensor, Tensor]:
        """See ``ops.add_norm``."""
        weight = None if after is None else after.module.weight
        return ops.add_norm(x, residual, self.module.weight, self.eps, self.plus, weight)


@dataclass(frozen=True)
class FusedLayer:
    """A pre-norm decoder layer with rotary positions and a gated MLP.

    Attributes:
        qkv: product that computes queries, keys and values, concatenated.
        out, gate_up, down: output product of attention, and products of the MLP.
        norms: "mlp", and if the layer has them: "attention", for the parts of its inputs, the last of which is the
            residual; "attention_after" and "mlp_after", for sublayer outputs; "query" and "key", for heads.
        gelu: see ``ops.act_and_mul``.
        normed_residual: whether the residual is the normed input.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    norms: Mapping[str, FusedNorm]
    scale: float
    gelu: bool = False
    normed_residual: bool = False


@dataclass(frozen=True)
class AttentionMetadata:
    """Masks and lengths of tree attention in one layer.

    Attributes:
        bounds: prefix lengths of the rows, and the first slot that a pass writes.
        offset: number of uncommitted nodes of earlier passes.
        mask: (batch, nodes, offset + nodes) bool.
        depth: (batch, nodes) int64, distance to the end of the prefix; None without a window.
        window: size of the sliding window; None for full attention.
    """

    bounds: SlotBounds
    offset: int
    mask: Tensor
    depth: Tensor | None = None
    window: int | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        """``ops.tree_attention``: (batch, nodes, heads, head_dim)."""
        return ops.tree_attention(
            *(query, keys, values, self.bounds.lengths, self.mask),
            scale=scale,
            start=self.bounds.start,
            depth=self.depth,
            window=self.window,
        )


Buffers = Sequence[Tensor]
"""Keys and values of a layer, (batch, kv_heads, slots, head_dim) each."""


def cache_states(
    layer: FusedLayer, qkv: Tensor, rotation: Rotation, buffers: Buffers, metadata: AttentionMetadata
) -> Tensor:
    """Write keys and values to the cache; returns the queries, (batch, heads, nodes, head_dim), or None without any."""
    norms = [layer.norms[name] for name in ("query", "key") if name in layer.norms]
    weights, first = tuple(norm.module.weight for norm in norms), norms[0] if norms else FusedNorm(None, 0.0)
    keys, values = buffers
    return ops.rotate_and_cache(
        qkv, rotation, keys, values, metadata.bounds.start, metadata.offset, weights, first.eps, first.plus
    )


def run_layers(
    layers: Sequence[FusedLayer],
    x: Tensor,
    rotations: Sequence[Rotation],
    buffers: Sequence[Buffers],
    metadata: Sequence[AttentionMetadata],
    add: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Run layers on the nodes of a pass, and write their keys and values.

    Args:
        x: (batch, nodes, width), inputs of the first layer.
        rotations, buffers, metadata: one entry per layer.
        add: add the last MLP's output in place to the last residual stream.

    Returns:
        The residual stream before each layer and before the last MLP, (batch, nodes, hidden) each; and the last MLP's
        output, before its norm if it has one, still to be added to the residual; or with ``add`` the sum.
    """
    streams: list[Tensor] = []
    residual, after = None, None
    for layer, rotation, kept, one in zip(layers, rotations, buffers, metadata, strict=True):
        if "attention" in layer.norms:
            total, normed = layer.norms["attention"](x, residual, after)
        else:
            total = normed = x if residual is None else residual + x
        streams.append(total)
        query = cache_states(layer, layer.qkv(normed), rotation, kept, one)
        x = layer.out(one.attend(query, kept[0], kept[1], layer.scale).flatten(2))
        residual = (normed if layer.normed_residual else total)[..., -x.shape[-1] :]
        residual, normed = layer.norms["mlp"](x, residual, layer.norms.get("attention_after"))
        gated, after = ops.act_and_mul(layer.gate_up(normed), layer.gelu), layer.norms.get("mlp_after")
        x = add_product(residual, layer.down, gated) if add and layer is layers[-1] else layer.down(gated)
    assert residual is not None
    return [*streams, residual], x


def add_product(residual: Tensor, layer: Linear, x: Tensor) -> Tensor:
    """``residual + layer(x)``, in place in ``residual`` if the product can accumulate."""
    if not isinstance(layer, nn.Linear) or layer.bias is not None or residual.dtype != x.dtype:
        return residual + layer(x)
    residual.view(-1, residual.shape[-1]).addmm_(x.flatten(0, -2), layer.weight.detach().t())
    return residual


class JoinedLinear:
    """Concatenation of linear layers. Their weights become views of one tensor, rebuilt after the layers move."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        weights, biases = [part.weight for part in self.parts], [part.bias for part in self.parts]
        return F.linear(x, _joined(weights), None if None in biases else _joined(biases))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first axis and make the originals views."""
    first, place, together = parts[0], parts[0].storage_offset(), True
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        together = together and same and part.is_contiguous() and part.storage_offset() == place
        place += part.numel()
    if together:
        return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    with torch.inference_mode(first.is_inference()):  # the model may be trained afterwards
        whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


class FusedDecoder:
    """Runs a transformers decoder with static shapes by ``run_layers``."""

    def __init__(self, decoder: Any, config: Any) -> None:
        self._decoder, self._config = decoder, config
        self._layers = [_fused(layer) for layer in decoder.layers]
        self._parts = _parts(decoder)
        self._norm = _norm(decoder.norm)

    @classmethod
    def of(cls, decoder: Any, config: Any) -> FusedDecoder | None:
        """Build from a decoder; None if its layers are not supported."""
        known = hasattr(decoder, "embed_tokens") and hasattr(getattr(decoder, "norm", None), "weight")
        return cls(decoder, config) if known and reproducible(decoder, _alone) else None

    @property
    def current(self) -> bool:
        """Whether the decoder's modules are unchanged since ``of``, and none has a hook."""
        parts = _parts(self._decoder)
        same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        return same and not any(map(is_hooked, parts))

    def states(
        self, tokens: Tensor, positions: Tensor, masks: Any, tree: TreePass, cache: TreeCache
    ) -> tuple[list[Tensor], Tensor]:
        """Inputs of all layers and the last layer's output, and the normed output, (batch, nodes, hidden) each.

        Args:
            tokens: (batch, nodes) int64.
            positions: (batch, nodes) int64, or (axes, batch, nodes) with several position axes.
            masks: (batch, 1, nodes, offset + nodes) bool, or a dict of such masks by kind of layer.
        """
        decoder, x = self._decoder, self._decoder.embed_tokens(tokens)
        kinds = [""] * len(self._layers)
        kinds = (getattr(self._config, "layer_types", None) or kinds)[: len(kinds)]
        rotations: dict[str, Rotation] = {}
        metadata: dict[str, AttentionMetadata] = {}
        buffers = [[states[: len(x)] for states in cache.kv.states(place)] for place in range(len(kinds))]
        for place, (kind, layer) in enumerate(zip(kinds, decoder.layers, strict=True)):
            if kind not in metadata:
                mask, window = masks[kind] if isinstance(masks, dict) else masks, window_of(self._config, place)
                rotations[kind] = rotation_of(decoder.rotary_emb, layer, x, positions)
                metadata[kind] = AttentionMetadata(tree.bounds, cache.offset, mask[:, 0], tree.depth, window)
        each = [rotations[kind] for kind in kinds], buffers, [metadata[kind] for kind in kinds]
        (*streams, residual), y = run_layers(self._layers, x, *each)
        whole, normed = self._norm(y, residual, self._layers[-1].norms.get("mlp_after"))
        return [*streams, whole], normed


def _parts(decoder: Any) -> list[Any]:
    return [part for layer in decoder.layers for part in layer.modules()]


def _norm(norm: Any) -> FusedNorm:
    plus = (gain_of(norm) - norm.weight.detach().float()).mean().round()
    return FusedNorm(norm, epsilon_of(norm), float(plus))


def _fused(layer: Any) -> FusedLayer:
    """Convert a layer with the structure checked in ``recognise``."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = dict(zip(("query", "key"), HEAD_NORMS, strict=True)) if hasattr(attention, HEAD_NORMS[0]) else {}
    norms = {**norms_of(layer), **{name: getattr(attention, module) for name, module in heads.items()}}
    return FusedLayer(
        JoinedLinear([getattr(attention, name) for name in PROJECTIONS]),
        attention.o_proj,
        JoinedLinear([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj,
        {name: _norm(norm) for name, norm in norms.items()},
        attention.scaling,
        gelu=gate_of(mlp.act_fn) == "gelu",
    )


def _alone(layer: Any, x: Tensor, rotation: Rotation) -> Tensor:
    """Output of a single layer on a prompt, (batch, tokens, hidden)."""
    if gate_of(layer.mlp.act_fn) is None:
        raise ValueError("another activation")
    fused, (batch, nodes, _) = _fused(layer), x.shape
    width = layer.self_attn.head_dim
    buffers = x.new_zeros(2, batch, layer.self_attn.k_proj.out_features // width, nodes, width)
    none = torch.zeros(batch + 1, dtype=torch.long)
    mask = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(batch, -1, -1)
    metadata = AttentionMetadata(SlotBounds(none[:-1], none[-1:]), 0, mask)
    streams, y = run_layers([fused], x, [rotation], [list(buffers)], [metadata])
    return fused.norms["mlp"](y, streams[-1], fused.norms.get("mlp_after"))[0]
