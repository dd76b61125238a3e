"""Training kernels of hybrid models on a CPU, with a fast backward pass, in place of transformers' functions.

Mamba-2's scan is chunked (arXiv 2405.21060, section 6): masked attention within a chunk, with scores C . B computed
once per group of heads, and a recurrence over the states at the ends of chunks. `mmspec.ssm.training.delta` contains
that of Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from mmspec.ssm.recurrences import normalised
from mmspec.ssm.training.delta import chunk_delta

CHUNK = 32
"""Positions per chunk. Longer chunks cost more within chunks, shorter ones more between them."""


def chunk_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int = CHUNK) -> Tensor:
    """Mamba-2 scan: y_t = S_t C_t + D x_t, with S_t = exp(dt_t A) S_{t-1} + dt_t x_t (x) B_t and S_0 = 0.

    Decays are computed in float32, products in the dtype of `x`: mixed operands would be several times slower.

    Args:
        x: inputs, (batch, length, heads, head_dim).
        dt: step sizes, positive, float32, (batch, length, heads).
        a: negative decay rates A, (heads,).
        b: input projections B, (batch, length, groups, state).
        c: output projections C, as `b`.
        d: skip weights D, (heads,).
        chunk: positions per chunk; affects the speed only.

    Returns:
        (batch, length, heads, head_dim).
    """
    batch, length, heads, head_dim = x.shape
    groups, count, kind = b.shape[2], -(-length // chunk), x.dtype

    def chunked(values: Tensor) -> Tensor:
        """(batch, length, ...) zero-padded as (batch, count, chunk, ...)."""
        missing = count * chunk - length
        if missing:
            values = F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing))
        return values.view(batch, count, chunk, *values.shape[2:])

    def by_group(values: Tensor) -> Tensor:
        """(batch, count, chunk, heads, head_dim) as (batch, count, groups, chunk, features)."""
        return values.reshape(batch, count, chunk, groups, -1).transpose(2, 3)

    # Padded positions have dt = 0: they neither decay the state nor add to it.
    fade = chunked(dt * a).cumsum(2)  # (batch, count, chunk, heads): log of the decay since the chunk's start
    x = chunked(x)
    written = x * chunked(dt).to(kind)[..., None]  # (batch, count, chunk, heads, head_dim)
    b, c = (chunked(values).transpose(2, 3) for values in (b, c))  # (batch, count, groups, chunk, state)

    scores = (c @ b.transpose(-1, -2))[:, :, :, None]  # (batch, count, groups, 1, chunk, chunk)
    weights = _decays(fade.transpose(2, 3), fade.transpose(2, 3), 1).to(kind).unflatten(2, (groups, -1)) * scores
    y = (weights.flatten(2, 3) @ written.transpose(2, 3)).transpose(2, 3)
    if count > 1:
        remaining = written * (fade[:, :, -1:] - fade).exp().to(kind)[..., None]
        own = b.transpose(-1, -2) @ by_group(remaining)  # (batch, count, groups, state, features)
        starts = _starts(own.unflatten(-1, (-1, head_dim)), fade[:, :, -1])
        read = (c @ starts.flatten(-2)).transpose(2, 3).reshape(x.shape)
        y = y + read * fade.exp().to(kind)[..., None]
    y = y + d.to(kind)[:, None] * x
    return y.reshape(batch, count * chunk, heads, head_dim)[:, :length]


def _decays(at: Tensor, since: Tensor, diagonal: int) -> Tensor:
    """exp(at_i - since_j) for j before i, zero from `diagonal` on; of logs (..., positions)."""
    size = at.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=at.device).triu(diagonal)
    return (at[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()


def _starts(own: Tensor, fade: Tensor) -> Tensor:
    """States at the start of each chunk.

    Args:
        own: contribution of each chunk to its last state, (batch, count, groups, state, heads of a group, head_dim).
        fade: log of each chunk's decay, (batch, count, heads).
    """
    ends = fade.cumsum(1).transpose(1, 2)  # (batch, heads, count)
    decay = _decays(F.pad(ends, (1, 0))[..., :-1], ends, 0).to(own.dtype)
    per_head = own.permute(0, 2, 4, 1, 3, 5)  # (batch, groups, heads of a group, count, state, head_dim)
    starts = decay @ per_head.flatten(4).flatten(1, 2)
    return starts.view(per_head.shape).permute(0, 3, 1, 4, 2, 5)


class _CausalConv(torch.autograd.Function):
    """Causal depthwise convolution as a sum of shifted products, without the padding and copies of plain autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = _taps(weight, x)
        y = x * taps[0] if bias is None else torch.addcmul(bias.to(x.dtype), x, taps[0])
        for back in range(1, len(taps)):
            y[:, back:].addcmul_(x[:, :-back], taps[back])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        taps = _taps(weight, x)
        slope = grad * taps[0]
        columns = [_column_sums(grad * x)]
        for back in range(1, len(taps)):
            slope[:, :-back].addcmul_(grad[:, back:], taps[back])
            columns.insert(0, _column_sums(grad[:, back:] * x[:, :-back]))
        bias = _column_sums(grad).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return slope, torch.stack(columns, 1).to(weight.dtype), bias


def _taps(weight: Tensor, x: Tensor) -> Tensor:
    """Weights by lag, (width, channels), contiguous: strided ones make each product five times slower."""
    return weight.flip(1).t().to(x.dtype).contiguous()


def _column_sums(values: Tensor) -> Tensor:
    """Sums over all axes but the last, as a matrix product: in bfloat16 several times faster than `sum`."""
    rows = values.reshape(-1, values.shape[-1])
    return (rows.new_ones(1, len(rows)) @ rows)[0]


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal depthwise convolution.

    Args:
        x: (batch, length, channels), length > width.
        weight: (channels, width), the last column for the current position.
        bias: (channels,), if any.
    """
    return _CausalConv.apply(x, weight, bias)


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last axis: statistics in float32, products in the dtype of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
        scale = (squares / x.shape[-1] + eps).rsqrt().to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale, weight)
        return y * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, scale, weight = ctx.saved_tensors
        used = weight.to(y.dtype)
        product = grad * y
        along = product @ (used[:, None] / len(used))
        slope = (grad * used).addcmul_(y, along, value=-1).mul_(scale)
        return slope, _column_sums(product).to(weight.dtype), None


def _scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Tensor:
    assert options["initial_states"] is None
    assert not options["return_final_states"]
    positive = F.softplus(dt.float() + options["dt_bias"])
    return chunk_scan(x, positive, a, b, c, options["D"])


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    assert options["initial_state"] is None
    assert not options["output_final_state"]
    assert options["use_qk_l2norm_in_kernel"]
    return chunk_delta(normalised(q) * q.shape[-1] ** -0.5, normalised(k), v, g, beta), None


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **options: Any) -> Tensor:
    assert activation == "silu"
    return F.silu(causal_conv(x.transpose(1, 2), weight, bias)).transpose(1, 2)


def _norm(self: Any, x: Tensor) -> Tensor:
    return _RMSNorm.apply(x, self.weight, self.variance_epsilon)


def _norm_around_one(self: Any, x: Tensor) -> Tensor:
    return _RMSNorm.apply(x, 1 + self.weight, self.eps)


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    assert getattr(self, "group_size", x.shape[-1]) == x.shape[-1]  # older releases have one group
    return _RMSNorm.apply(x * F.silu(gate), self.weight, self.variance_epsilon)


def _norm_then_gate(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return _norm(self, x) * F.silu(gate)


_BAMBA: Any = modeling_bamba
_QWEN: Any = modeling_qwen3_5
_FUNCTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_BAMBA, "mamba2_chunk_scan", _scan),
    (_BAMBA, "causal_conv1d_fn", _conv),
    (_BAMBA.BambaRMSNorm, "forward", _norm),
    (_BAMBA.BambaRMSNormGated, "forward", _gated_norm),
    (_QWEN, "torch_chunk_gated_delta_rule", _delta_rule),
    (_QWEN, "causal_conv1d_fn", _conv),
    (_QWEN.Qwen3_5RMSNorm, "forward", _norm_around_one),
    (_QWEN.Qwen3_5RMSNormGated, "forward", _norm_then_gate),
)
"""What is replaced: module or class, name, and replacement."""


@contextmanager
def fast_layers() -> Iterator[None]:
    """Replaces functions of transformers' Bamba and Qwen3.5 within the block. Not for decoding."""
    with ExitStack() as stack:
        for owner, name, function in _FUNCTIONS:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        yield
