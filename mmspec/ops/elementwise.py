"""Fused ops of a decoder layer between GEMMs: residual add with norm, rotary positions with KV write, activation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.ops import kernels


@kernels.operation()
def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus: float = 0.0, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream, and compute the RMSNorm of the sum (arXiv 1910.07467).

    Sums and norms are computed in float32; the sum is rounded before the norm.

    Args:
        x: (..., parts * features) float, contiguous; the sublayer's output.
        residual: like ``x``, or a slice of larger rows; None means that ``x`` is the sum.
        weight: (features,) or (parts, features) float; each part of the features has its own norm.
        eps: added to the mean squares.
        plus: added to the weights.
        after: like ``weight``, for a norm of ``x`` before the addition; None without this norm.

    Returns:
        The sum and its norm, in the shape and dtype of ``x``.
    """
    total, shape = x, (-1, weight.shape[-1])
    if after is not None:
        total = _normed(total.unflatten(-1, shape), after, eps, plus).flatten(-2)
    if residual is not None:
        total = total.float() + residual.float()
    total = total.to(x.dtype)
    return total, _normed(total.unflatten(-1, shape), weight, eps, plus).to(x.dtype).flatten(-2)


def _normed(x: Tensor, weight: Tensor, eps: float, plus: float) -> Tensor:
    """RMSNorm in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps) * (weight.float() + plus)


@kernels.operation()
def rotate_and_cache(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    offset: int,
    norms: tuple[Tensor, ...] = (),
    eps: float = 0.0,
    plus: float = 0.0,
) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864, with Llama's pairs) to queries and keys; cache keys and values.

    Args:
        qkv: (batch, nodes, (heads + 2 * kv_heads) * head_dim) float, contiguous: optional queries, keys, values.
        rotation: cosines and sines, (batch or 1, nodes or 1, head_dim) each; only the first half of the cosines and the
            second half of the sines are read.
        keys, values: (batch, kv_heads, slots, head_dim), written in place.
        start: (1,) int, and
        offset: their sum is the slot of the first node; the other nodes follow.
        norms: RMSNorm weights of queries and keys, (head_dim,) each, applied before rotation; empty without norms.
        eps, plus: parameters of these norms, see ``add_norm``.

    Returns:
        Queries, (batch, heads, nodes, head_dim), a view of (batch, nodes, heads, head_dim).
    """
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads = qkv.unflatten(-1, (-1, head_dim))
    turned, value = heads.split([heads.shape[2] - kv_heads, kv_heads], dim=2)
    query, key = turned.split([turned.shape[2] - kv_heads, kv_heads], dim=2)
    if norms:
        query, key = (_normed(x, weight, eps, plus) for x, weight in zip((query, key), norms, strict=True))
    cos, sin = (x.unsqueeze(2).float() for x in rotation)
    half = head_dim // 2
    cos, sin = cos[..., :half], sin[..., half:]

    def turn(x: Tensor) -> Tensor:
        low, high = x.float().split(half, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    slots = start + torch.arange(offset, offset + qkv.shape[1], device=qkv.device)
    keys.index_copy_(2, slots, turn(key).transpose(1, 2).to(keys.dtype))
    values.index_copy_(2, slots, value.transpose(1, 2).to(values.dtype))
    return turn(query).to(qkv.dtype).transpose(1, 2)


@kernels.operation()
def act_and_mul(x: Tensor, gelu: bool) -> Tensor:
    """Gated activation of an MLP: ``act(gate) * up`` (arXiv 2002.05202).

    Args:
        x: (..., 2 * features) float, contiguous: gate and up.
        gelu: use GELU (tanh approximation) instead of SiLU.

    Returns:
        (..., features).
    """
    gate, up = x.chunk(2, dim=-1)
    return (F.gelu(gate.float(), approximate="tanh") if gelu else F.silu(gate.float())).to(x.dtype) * up
