"""Fused decoder layers for passes with static shapes, in few kernel launches.

A Llama layer takes ten launches: residual add with norm, QKV product, rotary embedding with KV write, attention,
reduction of its splits, output product, second norm, gate-up product, activation, down product.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.tree_cache import SlotBounds, TreeCache
from mmspec.targets.attention import TreePass, window_of
from mmspec.targets.recognise import PROJECTIONS, epsilon_of, gain_of, gate_of, is_hooked, switches

Linear = Callable[[Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_GEMMA_PARTS = {*_PARTS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION, _MLP = (*PROJECTIONS, "o_proj"), ("gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = {"query": "q_norm", "key": "k_norm"}
_FEATURES = 64  # hidden features of the reduced test layer


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
        return cls(decoder, config) if known and _reproducible(decoder) else None

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
                rotations[kind] = _rotation_of(decoder.rotary_emb, layer, x, positions)
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
    """Convert a layer with the structure checked by ``_has_parts``."""
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        JoinedLinear([getattr(attention, name) for name in PROJECTIONS]),
        attention.o_proj,
        JoinedLinear([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj,
        {name: _norm(norm) for name, norm in _norms(layer).items()},
        attention.scaling,
        gelu=gate_of(mlp.act_fn) == "gelu",
    )


def _norms(layer: Any) -> dict[str, Any]:
    """The norms by their names in ``FusedLayer``."""
    norms = {"attention": layer.input_layernorm, "mlp": layer.post_attention_layernorm}
    if hasattr(layer, "pre_feedforward_layernorm"):
        norms |= {"attention_after": norms["mlp"], "mlp": layer.pre_feedforward_layernorm}
        norms["mlp_after"] = layer.post_feedforward_layernorm
    heads = {name: getattr(layer.self_attn, module, None) for name, module in _HEAD_NORMS.items()}
    return norms | {name: norm for name, norm in heads.items() if norm is not None}


def _linears(layer: Any) -> list[Any]:
    """Queries, keys, values and outputs of attention; gate, up and down of the MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    return [*(getattr(attention, name) for name in _ATTENTION), *(getattr(mlp, name) for name in _MLP)]


def _has_parts(layer: Any) -> bool:
    """Whether a layer has exactly the submodules of a Llama, Qwen3 or Gemma 3 layer."""
    names = lambda module: {name for name, _ in module.named_children()}  # noqa: E731
    if names(layer) not in (_PARTS, _GEMMA_PARTS) or names(layer.mlp) - {*_MLP, "act_fn"}:
        return False
    if names(layer.self_attn) not in ({*_ATTENTION}, {*_ATTENTION, *_HEAD_NORMS.values()}):
        return False
    if getattr(layer.self_attn, "attn_logit_softcapping", None):  # Gemma 2; small scores do not reveal it
        return False
    own = [*layer.parameters(recurse=False), *layer.self_attn.parameters(recurse=False)]
    return all(type(part) is nn.Linear for part in _linears(layer)) and not own


def _reproducible(decoder: nn.Module) -> bool:
    """Whether all layers have a supported structure, and each kind of layer is reproduced by ``run_layers``."""
    rotary, layers = getattr(decoder, "rotary_emb", None), getattr(decoder, "layers", None)
    if rotary is None or not isinstance(layers, nn.ModuleList) or not all(map(_has_parts, layers)):
        return False
    kinds = {(type(layer), *switches(layer.self_attn)): layer for layer in layers}
    return all(_reproduces(layer, rotary) for layer in kinds.values())


@torch.inference_mode()
def _reproduces(layer: Any, rotary: nn.Module) -> bool:
    """Whether ``run_layers`` reproduces a reduced layer on random hidden states at widely spaced positions."""
    plain, device = _small(layer), next(rotary.buffers()).device
    generator, (batch, nodes) = torch.Generator().manual_seed(0), (2, 5)
    x = torch.randn(batch, nodes, plain.mlp.down_proj.out_features, dtype=torch.float32, generator=generator)
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 5, 9, 20, 50]], dtype=torch.long)
    none = torch.zeros(batch + 1, dtype=torch.long)
    mask = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(batch, -1, -1)
    metadata = AttentionMetadata(SlotBounds(none[:-1], none[-1:]), 0, mask)
    try:
        rotation = _rotation_of(rotary, layer, x.to(device), positions.to(device))
        rotation = rotation[0].cpu(), rotation[1].cpu()
        expected = plain(x, position_ids=positions, position_embeddings=rotation)
        fused, width = _fused(plain), plain.self_attn.head_dim
        buffers = x.new_zeros(2, batch, plain.self_attn.k_proj.out_features // width, nodes, width)
        streams, y = run_layers([fused], x, [rotation], [list(buffers)], [metadata])
        computed = fused.norms["mlp"](y, streams[-1], fused.norms.get("mlp_after"))[0]
        gated = gate_of(plain.mlp.act_fn) in ("silu", "gelu")
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):
        return False
    rotated_once = rotation[0].ndim == 3  # otherwise per position axis (images)
    same = isinstance(expected, Tensor) and torch.allclose(computed, expected, atol=1e-4, rtol=1e-4)
    return gated and rotated_once and same


def _rotation_of(rotary: Any, layer: Any, x: Tensor, positions: Tensor) -> Rotation:
    """Cosines and sines for a layer; some decoders have several sets of frequencies, chosen by layer."""
    takes_type = "layer_type" in signature(rotary.forward).parameters
    cos, sin = rotary(x, position_ids=positions, **({"layer_type": layer.self_attn.layer_type} if takes_type else {}))
    return cos, sin


def _small(layer: Any) -> Any:
    """A copy of a layer in float32 on the CPU, reduced to the first features of its hidden states and its MLP."""
    some, whole = slice(_FEATURES), slice(None)
    sizes = [(whole, some)] * len(PROJECTIONS) + [(some, whole)] + [(some, some)] * len(_MLP)
    memo: dict[int, Any] = {}
    for part, (rows, columns) in zip(_linears(layer), sizes, strict=True):
        memo[id(part.weight)] = nn.Parameter(part.weight.detach()[rows, columns].float().cpu(), requires_grad=False)
        if part.bias is not None:
            memo[id(part.bias)] = nn.Parameter(part.bias[rows].float().cpu(), requires_grad=False)
    for name, norm in _norms(layer).items():
        features = whole if name in _HEAD_NORMS else some
        memo[id(norm.weight)] = nn.Parameter(norm.weight[features].float().cpu(), requires_grad=False)
    small = copy.deepcopy(layer, memo)
    for part in _linears(small):
        part.out_features, part.in_features = part.weight.shape
    return small
