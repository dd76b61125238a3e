"""The Mamba-2 recurrence over whole sequences, fast to differentiate on a CPU, in place of that of transformers.

Chunks as in arXiv 2405.21060, section 6: inside a chunk a masked attention whose scores C . B are computed once per
group of heads and not per head; between chunks a recurrence over the few states at their ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bamba import modeling_bamba

CHUNK = 32
"""Positions per chunk. Longer ones spend more on decays inside, shorter ones more on states between."""


def chunk_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int = CHUNK) -> Tensor:
    """Outputs y_t = S_t C_t + D x_t of the recurrence S_t = exp(dt_t A) S_{t-1} + dt_t x_t (x) B_t from S = 0.

    Decays are computed in float32, products in the type of `x`: mixed operands would cost several times the time.

    Args:
        x: inputs, (batch, length, heads, head_dim).
        dt: step sizes, positive, float32, (batch, length, heads).
        a: negative decay rates A, (heads,).
        b: what is written to, (batch, length, groups, state).
        c: what is read, as `b`.
        d: weights D of the inputs themselves, (heads,).
        chunk: positions computed together; changes nothing but the time it takes.

    Returns:
        (batch, length, heads, head_dim).
    """
    batch, length, heads, head_dim = x.shape
    groups, count, kind = b.shape[2], -(-length // chunk), x.dtype

    def cut(values: Tensor) -> Tensor:
        missing = count * chunk - length
        if missing:
            values = F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing))
        return values.view(batch, count, chunk, *values.shape[2:]).transpose(2, 3)

    # A padded position has dt = 0: it neither decays the state nor writes to it.
    fade = cut(dt * a).cumsum(-1)  # (batch, count, heads, chunk): log of the decay since the chunk's start
    written = cut(x * dt.to(kind)[..., None])  # (batch, count, heads, chunk, head_dim)
    b, c = cut(b), cut(c)  # (batch, count, groups, chunk, state)

    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (fade[..., :, None] - fade[..., None, :]).masked_fill(later, -torch.inf).exp().to(kind)
    scores = (c @ b.transpose(-1, -2))[:, :, :, None]  # (batch, count, groups, 1, chunk, chunk)
    y = (decay.unflatten(2, (groups, -1)) * scores).flatten(2, 3) @ written

    if count > 1:
        remaining = (fade[..., -1:] - fade).exp().to(kind)[..., None] * written
        own = remaining.unflatten(2, (groups, -1)).transpose(-1, -2) @ b[:, :, :, None]  # (.., head_dim, state)
        starts = _starts(own.flatten(2, 3), fade[..., -1]).unflatten(2, (groups, -1))
        read = (c[:, :, :, None] @ starts.transpose(-1, -2)).flatten(2, 3)
        y = y + read * fade.exp().to(kind)[..., None]
    y = y.transpose(2, 3).reshape(batch, count * chunk, heads, head_dim)[:, :length]
    return y + d.to(kind)[:, None] * x


def _starts(own: Tensor, fade: Tensor) -> Tensor:
    """States at the start of each chunk.

    Args:
        own: what each chunk adds to the state at its end, (batch, count, heads, head_dim, state).
        fade: log of each chunk's decay, (batch, count, heads).
    """
    since = fade.cumsum(1).transpose(1, 2)  # (batch, heads, count)
    before = F.pad(since, (1, 0))[..., :-1]
    later = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool, device=own.device).triu()
    decay = (before[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp().to(own.dtype)
    return (decay @ own.transpose(1, 2).flatten(3)).view(*decay.shape[:3], *own.shape[3:]).transpose(1, 2)


class _CausalConv(torch.autograd.Function):
    """Depthwise convolution over the past as few shifted products: plain autograd pads and copies each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        width, weight = weight.shape[1], weight.to(x.dtype)
        y = torch.addcmul(bias.to(x.dtype), x, weight[:, -1])
        for back in range(1, width):
            y[:, back:].addcmul_(x[:, :-back], weight[:, -1 - back])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        used = weight.to(x.dtype)
        slope = grad * used[:, -1]
        columns = [(grad * x).sum((0, 1), dtype=weight.dtype)]
        for back in range(1, weight.shape[1]):
            slope[:, :-back].addcmul_(grad[:, back:], used[:, -1 - back])
            columns.insert(0, (grad[:, back:] * x[:, :-back]).sum((0, 1), dtype=weight.dtype))
        return slope, torch.stack(columns, 1), grad.sum((0, 1), dtype=weight.dtype)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise convolution over the past without padding at the end.

    Args:
        x: (batch, length, channels), longer than the convolution is wide.
        weight: (channels, width), the last column for the present.
        bias: (channels,).
    """
    return _CausalConv.apply(x, weight, bias)


@contextmanager
def fast_mixers() -> Iterator[None]:
    """Inside, transformers' Bamba mixers compute whole sequences by the functions of this file. Not for decoding."""

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Tensor:
        assert options["initial_states"] is None
        assert not options["return_final_states"]
        positive = F.softplus(dt.float() + options["dt_bias"])
        return chunk_scan(x, positive, a, b, c, options["D"])

    def conv(x: Tensor, weight: Tensor, bias: Tensor, activation: str, **options: Any) -> Tensor:
        assert activation == "silu"
        return F.silu(causal_conv(x.transpose(1, 2), weight, bias)).transpose(1, 2)

    with mock.patch.multiple(modeling_bamba, mamba2_chunk_scan=scan, causal_conv1d_fn=conv):
        yield
