"""Chunked gated delta rule for training on a CPU, with a fast backward pass, in place of transformers' functions.

The updates of a chunk solve one unit-triangular system (arXiv 2412.06464, section 3.3), whose inverse is computed for
all chunks at once; what remains between chunks is a recurrence over their last states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 32
"""Positions per chunk. Longer chunks cost more within chunks, shorter ones more between them."""


def chunk_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Gated delta rule: y_t = S_t^T q_t, with S_0 = 0 and

        S_t = exp(g_t) S_{t-1} + k_t (x) u_t,  u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)

    Decays and the triangular systems are computed in the dtype of `g`, products in that of `v`.

    Args:
        q, k: queries and keys, (batch, length, groups, key_dim); groups divide heads, consecutive heads share a group.
        v: values, (batch, length, heads, value_dim).
        g: log decays, not positive, float32 or wider, (batch, length, heads).
        beta: rates, (batch, length, heads).
        chunk: positions per chunk; affects the speed only.

    Returns:
        (batch, length, heads, value_dim), in the dtype of `v`.
    """
    batch, length, heads, value_dim = v.shape
    groups, count, kind = k.shape[2], -(-length // chunk), v.dtype

    def chunked(values: Tensor) -> Tensor:
        """(batch, length, heads, ...) zero-padded as (batch, heads, count, chunk, ...)."""
        missing = count * chunk - length
        if missing:
            values = F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing))
        return values.view(batch, count, chunk, *values.shape[2:]).movedim(3, 1)

    def per_head(values: Tensor) -> Tensor:
        """(batch, groups, ...) as (batch, heads, ...)."""
        return values if groups == heads else values.repeat_interleave(heads // groups, 1)

    # Padded positions have g = 0 and beta = 0: they neither decay the state nor add to it.
    fade = chunked(g).cumsum(-1)  # (batch, heads, count, chunk): log of the decay since the chunk's start
    q, k = chunked(q).to(kind), chunked(k).to(kind)  # (batch, groups, count, chunk, key_dim)
    v, beta = chunked(v), chunked(beta).to(g.dtype)
    since_start, until_end = fade.exp().to(kind)[..., None], (fade[..., -1:] - fade).exp().to(kind)[..., None]

    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    decay = (fade[..., :, None] - fade[..., None, :]).masked_fill(later, -torch.inf).exp()
    overlap = per_head(k @ k.mT).to(g.dtype) * decay * beta[..., None]
    inverse = _UnitTriangularInverse.apply(overlap) * beta[..., None, :]  # to (I + L) U = diag(beta) (...)
    inverse = inverse.to(kind)
    scores = per_head(q @ k.mT) * decay.to(kind)
    q, k = per_head(q), per_head(k)
    updates = inverse @ v  # with a state of zero
    if count > 1:
        corrections, queries, keys = inverse @ (k * since_start), q * since_start, (k * until_end).mT
        ends = fade[..., -1].exp().to(kind)[..., None, None]
        state = keys[:, :, 0] @ updates[:, :, 0]
        read, solved = [torch.zeros_like(v[:, :, 0])], [updates[:, :, 0]]
        for index in range(1, count):
            read.append(queries[:, :, index] @ state)
            solved.append(updates[:, :, index] - corrections[:, :, index] @ state)
            if index < count - 1:
                state = state * ends[:, :, index] + keys[:, :, index] @ solved[-1]
        y = torch.stack(read, 2) + scores @ torch.stack(solved, 2)
    else:
        y = scores @ updates
    return y.movedim(1, 3).reshape(batch, count * chunk, heads, value_dim)[:, :length]


class _UnitTriangularInverse(torch.autograd.Function):
    """(I + L)^-1 for L the part of (..., size, size) below the diagonal."""

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        unit = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
        # Transposed, as the library is column-major: several times faster than with its copies.
        solved = torch.linalg.solve_triangular(system.mT, unit, upper=True, left=False, unitriangular=True)
        inverse = solved.mT
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)
