"""Triton kernels of ``mmspec.ssm.ops.lru``: one program per row and tile of channels.

Prefixes as in ``triton_scan``. A program walks the nodes, parents first, and reads a parent's state from the output,
which it has written itself. The commit walks the path.
"""

# Kernel arguments are pointers, scalars and constexprs, which have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.ssm.ops.selective import DepthIndex

_TILE = 32
"""Channels per program, the lanes of one warp: a step waits for the one before it, and many warps hide that."""


def tree_lru(x: Tensor, a: Tensor, state: Tensor, levels: DepthIndex) -> Tensor:
    """See ``mmspec.ssm.ops.tree_lru``."""
    (batch, nodes, channels), parents = x.shape, levels.parents
    y = torch.empty(x.shape, device=x.device)
    _tree_lru_kernel[triton.cdiv(channels, _TILE), batch](
        *(x, a, state, parents, y, nodes, channels),
        *(*x.stride(), *a.stride(), *state.stride(), *parents.stride(), *y.stride()),
        BLOCK=_TILE,
        num_warps=1,
    )
    return y


def commit_lru(x: Tensor, a: Tensor, state: Tensor, path: Tensor) -> None:
    """See ``mmspec.ssm.ops.commit_lru``."""
    channels = x.shape[2]
    _commit_lru_kernel[triton.cdiv(channels, _TILE), len(path)](
        *(x, a, state, path, path.shape[1], channels),
        *(*x.stride(), *a.stride(), *state.stride(), *path.stride()),
        BLOCK=_TILE,
        num_warps=1,
    )


@triton.jit
def _program(channels, BLOCK: tl.constexpr):
    """Row, channel indices and channel mask of a program."""
    i_channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1).to(tl.int64), i_channel, i_channel < channels


@triton.jit
def _load(pointer, i, stride, m_i):
    return tl.load(pointer + i * stride, mask=m_i, other=0.0).to(tl.float32)


@triton.jit
def _tree_lru_kernel(
    x, a, state, parents, y,
    nodes, channels,
    x_row, x_node, x_channel,
    a_row, a_node, a_channel,
    s_row, s_channel,
    p_row, p_node,
    y_row, y_node, y_channel,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_row, i_channel, m_channel = _program(channels, BLOCK)
    x += i_row * x_row
    a += i_row * a_row
    parents += i_row * p_row
    y += i_row * y_row
    b_start = _load(state + i_row * s_row, i_channel, s_channel, m_channel)
    for i_node in range(nodes):
        i_parent = tl.load(parents + i_node * p_node)
        b_x = _load(x + i_node * x_node, i_channel, x_channel, m_channel)
        b_a = _load(a + i_node * a_node, i_channel, a_channel, m_channel)
        b_before = _load(y + tl.maximum(i_parent, 0) * y_node, i_channel, y_channel, m_channel)
        b_now = b_a * tl.where(i_parent < 0, b_start, b_before) + b_x
        tl.store(y + i_node * y_node + i_channel * y_channel, b_now, mask=m_channel)
        tl.debug_barrier()  # other threads may read them


@triton.jit
def _commit_lru_kernel(
    x, a, state, path,
    depth, channels,
    x_row, x_node, x_channel,
    a_row, a_node, a_channel,
    s_row, s_channel,
    p_row, p_depth,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_row, i_channel, m_channel = _program(channels, BLOCK)
    x += i_row * x_row
    a += i_row * a_row
    path += i_row * p_row
    p_state = state + i_row * s_row + i_channel * s_channel
    b_state = tl.load(p_state, mask=m_channel, other=0.0)
    for i_depth in range(depth):
        i_node = tl.load(path + i_depth * p_depth)
        b_x = _load(x + tl.maximum(i_node, 0) * x_node, i_channel, x_channel, m_channel)
        b_a = _load(a + tl.maximum(i_node, 0) * a_node, i_channel, a_channel, m_channel)
        b_state = tl.where(i_node < 0, b_state, b_a * b_state + b_x)  # padding neither decays nor adds
    tl.store(p_state, b_state, mask=m_channel)
