"""Triton kernels of ``mmspec.ssm.ops.conv``: one program per row and tile of channels (``tree_conv``: and of nodes)."""

# Kernel arguments are pointers, scalars and constexprs without Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_CHANNELS = 128
_BLOCK_NODES = 8


def tree_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, activation: str | None = "silu"
) -> Tensor:
    """See ``mmspec.ssm.ops.tree_conv``."""
    batch, nodes, channels = x.shape
    width = weight.shape[1]
    y = torch.empty((batch, nodes, channels), dtype=x.dtype, device=x.device)
    block_nodes = min(_BLOCK_NODES, triton.next_power_of_2(nodes))
    grid = (triton.cdiv(channels, _BLOCK_CHANNELS), triton.cdiv(nodes, block_nodes), batch)
    _tree_conv_kernel[grid](
        *(x, state[:, :, state.shape[2] - width + 1 :], weight, bias, window, y),
        *(nodes, channels),
        *(*x.stride(), *state.stride(), *weight.stride(), *window.stride(), *y.stride()),
        HAS_BIAS=bias is not None,
        SILU=activation is not None,
        WIDTH=width,
        BLOCK_NODES=block_nodes,
        BLOCK_CHANNELS=_BLOCK_CHANNELS,
    )
    return y


def commit_conv(x: Tensor, state: Tensor, path: Tensor) -> None:
    """See ``mmspec.ssm.ops.commit_conv``."""
    batch, _, channels = x.shape
    _commit_conv_kernel[(triton.cdiv(channels, _BLOCK_CHANNELS), batch)](
        *(x, state, path),
        *(channels, state.shape[2], path.shape[1]),
        *(*x.stride(), *state.stride(), *path.stride()),
        BLOCK_CHANNELS=_BLOCK_CHANNELS,
        BLOCK_ENTRIES=triton.next_power_of_2(state.shape[2]),
        BLOCK_DEPTH=triton.next_power_of_2(path.shape[1]),
    )


@triton.jit
def _tree_conv_kernel(
    x, state, weight, bias, window, y,
    nodes, channels,
    x_row, x_node, x_channel,
    s_row, s_channel, s_entry,
    w_channel, w_tap,
    i_row_stride, i_node_stride, i_tap_stride,
    y_row, y_node, y_channel,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK_NODES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(2).to(tl.int64)
    i_node = tl.program_id(1) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    i_channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    m_node, m_channel = i_node < nodes, i_channel < channels
    m_y = m_node[:, None] & m_channel[None, :]
    b_y = tl.zeros((BLOCK_NODES, BLOCK_CHANNELS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        i_entry = tl.load(
            window + i_row * i_row_stride + i_node * i_node_stride + tap * i_tap_stride, mask=m_node, other=0
        )
        m_state = i_entry < WIDTH - 1
        p_state = state + i_row * s_row + i_entry[:, None] * s_entry + i_channel[None, :] * s_channel
        b_state = tl.load(p_state, mask=m_y & m_state[:, None], other=0.0).to(tl.float32)
        p_x = x + i_row * x_row + (i_entry - (WIDTH - 1))[:, None] * x_node + i_channel[None, :] * x_channel
        b_x = tl.load(p_x, mask=m_y & (i_entry >= WIDTH - 1)[:, None], other=0.0).to(tl.float32)
        b_weight = tl.load(weight + i_channel * w_channel + tap * w_tap, mask=m_channel, other=0.0).to(tl.float32)
        b_y += (b_state + b_x) * b_weight[None, :]
    if HAS_BIAS:
        b_y += tl.load(bias + i_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        b_y = b_y * tl.sigmoid(b_y)
    tl.store(y + i_row * y_row + i_node[:, None] * y_node + i_channel[None, :] * y_channel, b_y, mask=m_y)


@triton.jit
def _commit_conv_kernel(
    x, state, path, channels, entries, depth,
    x_row, x_node, x_channel,
    s_row, s_channel, s_entry,
    p_row, p_depth,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_ENTRIES: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(1).to(tl.int64)
    i_channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    i_entry, i_depth = tl.arange(0, BLOCK_ENTRIES), tl.arange(0, BLOCK_DEPTH)
    m_entry = (i_channel < channels)[:, None] & (i_entry < entries)[None, :]
    path += i_row * p_row
    length = tl.sum((tl.load(path + i_depth * p_depth, mask=i_depth < depth, other=-1) >= 0).to(tl.int32))

    # Each new entry is an old entry or the input of a path node.
    i_old = i_entry + length
    m_old = i_old < entries
    p_state = state + i_row * s_row + i_channel[:, None] * s_channel
    b_old = tl.load(p_state + i_old[None, :] * s_entry, mask=m_entry & m_old[None, :], other=0.0)
    i_node = tl.load(path + (i_old - entries) * p_depth, mask=(i_entry < entries) & (i_old >= entries), other=0)
    p_x = x + i_row * x_row + i_node[None, :] * x_node + i_channel[:, None] * x_channel
    b_new = tl.load(p_x, mask=m_entry & (i_old >= entries)[None, :], other=0.0)
    b_entry = tl.where(m_old[None, :], b_old, b_new.to(b_old.dtype))
    # All loads before any store: they overlap.
    tl.debug_barrier()
    tl.store(p_state + i_entry[None, :] * s_entry, b_entry, mask=m_entry)
