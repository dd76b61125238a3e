"""Triton kernels of ``mmspec.ops.elementwise``.

Prefixes in kernels: ``i_`` index, ``b_`` block in registers, ``m_`` mask. Norms use one program per row; rotation uses
one program per node and head, which also writes keys and values to the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.ops import kernels

_FEATURES = 1024  # features of an activation per program


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus: float = 0.0, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``mmspec.ops.add_norm``."""
    kernels.require_contiguous(x, weight, after)
    features = weight.shape[-1]
    summed = residual is not None or after is not None
    total, normed = torch.empty_like(x) if summed else x, torch.empty_like(x)
    block = triton.next_power_of_2(features)
    _norm_kernel[(x.numel() // features,)](
        *(x, residual, weight, after, total, normed, eps, plus, weight.numel() // features),
        0 if residual is None else residual.stride(-2) - residual.shape[-1],
        FEATURES=features,
        ADD=residual is not None,
        AFTER=after is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, normed


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
    """See ``mmspec.ops.rotate_and_cache``."""
    kernels.require_contiguous(qkv, *norms)
    (batch, nodes, width), (kv_heads, head_dim) = qkv.shape, keys.shape[1::2]
    heads = width // head_dim - 2 * kv_heads
    query = qkv.new_empty(batch, nodes, heads, head_dim)
    cos, sin = (x.expand(batch, nodes, head_dim) for x in rotation)
    weights = norms or (None, None)
    _rotate_kernel[(heads + 2 * kv_heads, nodes, batch)](
        *(qkv, cos, sin, *weights, query, keys, values, start, offset, nodes, heads, kv_heads, eps, plus),
        *(*cos.stride(), *sin.stride(), *keys.stride()[:3], *values.stride()[:3]),
        HALF=head_dim // 2,
        NORM=bool(norms),
        BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return query.transpose(1, 2)


def act_and_mul(x: Tensor, gelu: bool) -> Tensor:
    """See ``mmspec.ops.act_and_mul``."""
    kernels.require_contiguous(x)
    features = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], features)
    block = min(_FEATURES, triton.next_power_of_2(features))
    _gate_kernel[(out.numel() // features, triton.cdiv(features, block))](x, out, features, GELU=gelu, BLOCK=block)
    return out


@triton.jit(do_not_specialize=["parts", "apart"])
def _norm_kernel(
    x, residual, weight, after, total, normed, eps, plus, parts, apart,
    FEATURES: tl.constexpr, ADD: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row, i_feature = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m_feature = i_feature < FEATURES
    i_at, i_weight = i_row * FEATURES + i_feature, (i_row % parts) * FEATURES + i_feature
    b_x = tl.load(x + i_at, mask=m_feature, other=0.0).to(tl.float32)
    if AFTER:
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=0) / FEATURES + eps)
        b_x *= tl.load(after + i_weight, mask=m_feature, other=0.0).to(tl.float32) + plus
    if ADD:
        b_x += tl.load(residual + i_at + (i_row // parts) * apart, mask=m_feature, other=0.0).to(tl.float32)
    if ADD or AFTER:
        b_sum = b_x.to(total.dtype.element_ty)
        tl.store(total + i_at, b_sum, mask=m_feature)
        b_x = b_sum.to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=0) / FEATURES + eps)
    b_x *= tl.load(weight + i_weight, mask=m_feature, other=0.0).to(tl.float32) + plus
    tl.store(normed + i_at, b_x.to(normed.dtype.element_ty), mask=m_feature)


@triton.jit(do_not_specialize=["offset", "nodes"])
def _rotate_kernel(
    qkv, cos, sin, of_query, of_key, query, keys, values, start, offset, nodes, heads, kv_heads, eps, plus,
    c_row, c_node, c_dim, s_row, s_node, s_dim,
    k_row, k_head, k_slot, v_row, v_head, v_slot,
    HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_head, i_node, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_dim = tl.arange(0, BLOCK)
    m_dim = i_dim < HALF
    i_at = i_row * nodes + i_node
    source = qkv + (i_at * (heads + 2 * kv_heads) + i_head) * 2 * HALF + i_dim
    b_low = tl.load(source, mask=m_dim, other=0.0).to(tl.float32)
    b_high = tl.load(source + HALF, mask=m_dim, other=0.0).to(tl.float32)
    i_slot = tl.load(start).to(tl.int64) + offset + i_node
    if i_head >= heads + kv_heads:
        target = values + i_row * v_row + (i_head - heads - kv_heads).to(tl.int64) * v_head + i_slot * v_slot + i_dim
        tl.store(target, b_low.to(values.dtype.element_ty), mask=m_dim)
        tl.store(target + HALF, b_high.to(values.dtype.element_ty), mask=m_dim)
    else:
        if NORM:
            weight = of_query
            if i_head >= heads:
                weight = of_key
            weight += i_dim
            b_scale = tl.rsqrt(tl.sum(b_low * b_low + b_high * b_high, axis=0) / (2 * HALF) + eps)
            b_low *= b_scale * (tl.load(weight, mask=m_dim, other=0.0).to(tl.float32) + plus)
            b_high *= b_scale * (tl.load(weight + HALF, mask=m_dim, other=0.0).to(tl.float32) + plus)
        b_cos = tl.load(cos + i_row * c_row + i_node * c_node + i_dim * c_dim, mask=m_dim, other=0.0).to(tl.float32)
        p_sin = sin + i_row * s_row + i_node * s_node + (HALF + i_dim) * s_dim
        b_sin = tl.load(p_sin, mask=m_dim, other=0.0).to(tl.float32)
        b_turned, b_other = b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin
        if i_head < heads:
            target = query + (i_at * heads + i_head) * 2 * HALF + i_dim
            tl.store(target, b_turned.to(query.dtype.element_ty), mask=m_dim)
            tl.store(target + HALF, b_other.to(query.dtype.element_ty), mask=m_dim)
        else:
            target = keys + i_row * k_row + (i_head - heads).to(tl.int64) * k_head + i_slot * k_slot + i_dim
            tl.store(target, b_turned.to(keys.dtype.element_ty), mask=m_dim)
            tl.store(target + HALF, b_other.to(keys.dtype.element_ty), mask=m_dim)


@triton.jit(do_not_specialize=["features"])
def _gate_kernel(x, out, features, GELU: tl.constexpr, BLOCK: tl.constexpr):
    i_row, i_feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_feature = i_feature < features
    b_gate = tl.load(x + i_row * 2 * features + i_feature, mask=m_feature, other=0.0).to(tl.float32)
    b_up = tl.load(x + i_row * 2 * features + features + i_feature, mask=m_feature, other=0.0)
    if GELU:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 * z)
        b_gate *= tl.sigmoid(1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate))
    else:
        b_gate *= tl.sigmoid(b_gate)
    b_gate = b_gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(
        out + i_row * features + i_feature, (b_gate * b_up.to(tl.float32)).to(out.dtype.element_ty), mask=m_feature
    )
