"""Triton kernels of ``mmspec.ssm.ops.selective``: one program per row, group and tile of the group's channels.

Prefixes as in ``triton_scan``. A program walks the nodes, parents first, with the states of its small tile at all nodes
in registers. A step selects the parent's state and stores the node's output. Larger trees, such as prompt chunks, keep
states in global memory, for a limited number of channels at a time. The commit walks the path.

RG-LRU uses one program per row and tile of channels, which reads the parent's state from its own output.
"""

# Kernel arguments are pointers, scalars and constexprs, which have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.ssm.ops.selective import DepthIndex, tiles

_NODES = 64
"""Maximum nodes whose states are in registers."""

_TREE_TILE, _COMMIT_TILE = 32, 512
"""State elements per program; for trees, one warp, so that selecting a state needs no other warp."""

_LRU_TILE = 32
"""Channels per program, one warp: steps are sequential, and many warps hide their latency."""


def tree_selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, levels: DepthIndex
) -> Tensor:
    """See ``mmspec.ssm.ops.tree_selective``."""
    (batch, nodes, _), size, parents = x.shape, b.shape[3], levels.parents
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    in_registers, whole = nodes <= _NODES, slice(None)
    parts = [(slice(group, group + 1), part) for group, part in tiles(x, b, batch * nodes * size)]
    for group, part in [(whole, whole)] if in_registers else parts:
        x_part, b_part, d_part = x[:, :, part], b[:, :, group], None if d is None else d[part]
        states = None
        if not in_registers:
            states = torch.empty(batch, nodes, x_part.shape[2], size, dtype=torch.float32, device=x.device)
        grid, per_group, tile = _launch(x_part, b_part, _TREE_TILE)
        _tree_selective_kernel[grid](
            *(x_part, dt[:, :, part], a[part], b_part, c[:, :, group], d_part, state[:, part], parents),
            *(y[:, :, part], states, nodes, per_group, size),
            *(*x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride(), *state.stride()),
            *(*parents.stride(), *y.stride()),
            HAS_D=d is not None,
            IN_REGISTERS=in_registers,
            BLOCK_NODES=triton.next_power_of_2(nodes) if in_registers else 1,
            **tile,
            num_warps=1,
        )
    return y


def commit_selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """See ``mmspec.ssm.ops.commit_selective``."""
    grid, per_group, tile = _launch(x, b, _COMMIT_TILE)
    _commit_selective_kernel[grid](
        *(x, dt, a, b, state, path),
        *(path.shape[1], per_group, b.shape[3]),
        *(*x.stride(), *dt.stride(), *a.stride(), *b.stride(), *state.stride(), *path.stride()),
        **tile,
    )


def _launch(x: Tensor, b: Tensor, elements: int) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """Grid, channels per group, and tile sizes: the full state dimension, and as many channels as fit."""
    groups, size = b.shape[2:]
    per_group, block_state = x.shape[2] // groups, triton.next_power_of_2(size)
    block = max(1, min(triton.next_power_of_2(per_group), elements // block_state))
    grid = (triton.cdiv(per_group, block), groups, x.shape[0])
    return grid, per_group, {"BLOCK_CHANNELS": block, "BLOCK_STATE": block_state}


@triton.jit
def _program(per_group, size, BLOCK_CHANNELS: tl.constexpr, BLOCK_STATE: tl.constexpr):
    """Row, group, channel and state indices of a program, and masks of the last two."""
    i_group, i_state = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_STATE)
    i_in = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    i_channel = i_group * per_group + i_in
    return tl.program_id(2).to(tl.int64), i_group, i_channel, i_in < per_group, i_state, i_state < size


@triton.jit
def _vector(pointer, i, stride, m_i):
    return tl.load(pointer + i * stride, mask=m_i, other=0.0).to(tl.float32)


@triton.jit
def _tile(a, state, i_channel, m_channel, i_state, m_state, a_channel, a_state, s_channel, s_state):
    """A program's A, (channels, state), pointers to its states, and their mask."""
    m_tile = m_channel[:, None] & m_state[None, :]
    b_a = tl.load(a + i_channel[:, None] * a_channel + i_state[None, :] * a_state, mask=m_tile, other=0.0)
    return b_a, state + i_channel[:, None] * s_channel + i_state[None, :] * s_state, m_tile


@triton.jit
def _advance(b_before, b_a, b_step, b_x, b_b):
    """States after a node, (channels, state)."""
    return b_before * tl.exp(b_step[:, None] * b_a) + (b_step * b_x)[:, None] * b_b[None, :]


@triton.jit
def _tree_selective_kernel(
    x, dt, a, b, c, d, state, parents, y, states,
    nodes, per_group, size,
    x_row, x_node, x_channel,
    dt_row, dt_node, dt_channel,
    a_channel, a_state,
    b_row, b_node, b_group, b_state,
    c_row, c_node, c_group, c_state,
    s_row, s_channel, s_state,
    p_row, p_node,
    y_row, y_node, y_channel,
    HAS_D: tl.constexpr, IN_REGISTERS: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
):  # fmt: skip
    i_row, i_group, i_channel, m_channel, i_state, m_state = _program(per_group, size, BLOCK_CHANNELS, BLOCK_STATE)
    x += i_row * x_row
    dt += i_row * dt_row
    b += i_row * b_row + i_group * b_group
    c += i_row * c_row + i_group * c_group
    parents += i_row * p_row
    y += i_row * y_row

    b_a, p_tile, m_tile = _tile(
        a, state + i_row * s_row, i_channel, m_channel, i_state, m_state, a_channel, a_state, s_channel, s_state
    )
    b_start = tl.load(p_tile, mask=m_tile, other=0.0)
    if HAS_D:
        b_d = _vector(d, i_channel, 1, m_channel)
    if IN_REGISTERS:
        i_slot = tl.arange(0, BLOCK_NODES)[:, None, None]
        b_states = tl.zeros((BLOCK_NODES, BLOCK_CHANNELS, BLOCK_STATE), dtype=tl.float32)
    else:  # contiguous
        of_node = tl.num_programs(1).to(tl.int64) * per_group * size
        p_states = states + i_row * nodes * of_node + i_channel[:, None] * size + i_state[None, :]
    for i_node in range(nodes):
        i_parent = tl.load(parents + i_node * p_node)
        b_step = _vector(dt + i_node * dt_node, i_channel, dt_channel, m_channel)
        b_x = _vector(x + i_node * x_node, i_channel, x_channel, m_channel)
        b_b = _vector(b + i_node * b_node, i_state, b_state, m_state)
        b_c = _vector(c + i_node * c_node, i_state, c_state, m_state)
        if IN_REGISTERS:
            b_before = tl.sum(tl.where(i_slot == i_parent, b_states, 0.0), axis=0)
        else:
            b_before = tl.load(p_states + tl.maximum(i_parent, 0) * of_node, mask=m_tile, other=0.0)
        b_before = tl.where(i_parent < 0, b_start, b_before)
        b_now = _advance(b_before, b_a, b_step, b_x, b_b)
        if IN_REGISTERS:
            b_states = tl.where(i_slot == i_node, b_now[None, :, :], b_states)
        else:
            tl.store(p_states + i_node * of_node, b_now, mask=m_tile)
            tl.debug_barrier()  # other threads may read them
        b_y = tl.sum(b_now * b_c[None, :], axis=1)
        if HAS_D:
            b_y += b_d * b_x
        tl.store(y + i_node * y_node + i_channel * y_channel, b_y, mask=m_channel)


@triton.jit
def _commit_selective_kernel(
    x, dt, a, b, state, path,
    depth, per_group, size,
    x_row, x_node, x_channel,
    dt_row, dt_node, dt_channel,
    a_channel, a_state,
    b_row, b_node, b_group, b_state,
    s_row, s_channel, s_state,
    p_row, p_depth,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_STATE: tl.constexpr,
):  # fmt: skip
    i_row, i_group, i_channel, m_channel, i_state, m_state = _program(per_group, size, BLOCK_CHANNELS, BLOCK_STATE)
    x += i_row * x_row
    dt += i_row * dt_row
    b += i_row * b_row + i_group * b_group
    path += i_row * p_row

    b_a, p_tile, m_tile = _tile(
        a, state + i_row * s_row, i_channel, m_channel, i_state, m_state, a_channel, a_state, s_channel, s_state
    )
    b_tile = tl.load(p_tile, mask=m_tile, other=0.0)
    for i_depth in range(depth):
        i_node = tl.load(path + i_depth * p_depth)
        kept = (i_node >= 0).to(tl.float32)  # padding neither decays nor adds
        i_node = tl.maximum(i_node, 0)
        b_step = _vector(dt + i_node * dt_node, i_channel, dt_channel, m_channel) * kept
        b_x = _vector(x + i_node * x_node, i_channel, x_channel, m_channel)
        b_b = _vector(b + i_node * b_node, i_state, b_state, m_state)
        b_tile = _advance(b_tile, b_a, b_step, b_x, b_b)
    tl.store(p_tile, b_tile, mask=m_tile)


def tree_lru(x: Tensor, a: Tensor, state: Tensor, levels: DepthIndex) -> Tensor:
    """See ``mmspec.ssm.ops.tree_lru``."""
    (batch, nodes, channels), parents = x.shape, levels.parents
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _tree_lru_kernel[triton.cdiv(channels, _LRU_TILE), batch](
        *(x, a, state, parents, y, nodes, channels),
        *(*x.stride(), *a.stride(), *state.stride(), *parents.stride(), *y.stride()),
        BLOCK=_LRU_TILE,
        num_warps=1,
    )
    return y


def commit_lru(x: Tensor, a: Tensor, state: Tensor, path: Tensor) -> None:
    """See ``mmspec.ssm.ops.commit_lru``."""
    channels = x.shape[2]
    _commit_lru_kernel[triton.cdiv(channels, _LRU_TILE), len(path)](
        *(x, a, state, path, path.shape[1], channels),
        *(*x.stride(), *a.stride(), *state.stride(), *path.stride()),
        BLOCK=_LRU_TILE,
        num_warps=1,
    )


@triton.jit
def _lru_program(channels, BLOCK: tl.constexpr):
    """Row, channel indices and channel mask of a program."""
    i_channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1).to(tl.int64), i_channel, i_channel < channels


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
    i_row, i_channel, m_channel = _lru_program(channels, BLOCK)
    x += i_row * x_row
    a += i_row * a_row
    parents += i_row * p_row
    y += i_row * y_row
    b_start = _vector(state + i_row * s_row, i_channel, s_channel, m_channel)
    for i_node in range(nodes):
        i_parent = tl.load(parents + i_node * p_node)
        b_x = _vector(x + i_node * x_node, i_channel, x_channel, m_channel)
        b_a = _vector(a + i_node * a_node, i_channel, a_channel, m_channel)
        b_before = _vector(y + tl.maximum(i_parent, 0) * y_node, i_channel, y_channel, m_channel)
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
    i_row, i_channel, m_channel = _lru_program(channels, BLOCK)
    x += i_row * x_row
    a += i_row * a_row
    path += i_row * p_row
    p_state = state + i_row * s_row + i_channel * s_channel
    b_state = tl.load(p_state, mask=m_channel, other=0.0)
    for i_depth in range(depth):
        i_node = tl.load(path + i_depth * p_depth)
        b_x = _vector(x + tl.maximum(i_node, 0) * x_node, i_channel, x_channel, m_channel)
        b_a = _vector(a + tl.maximum(i_node, 0) * a_node, i_channel, a_channel, m_channel)
        b_state = tl.where(i_node < 0, b_state, b_a * b_state + b_x)  # padding neither decays nor adds
    tl.store(p_state, b_state, mask=m_channel)
