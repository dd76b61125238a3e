"""Triton kernels of ``mmspec.ssm.ops.scan``: one program per row, head and tile of the head's channels.

Prefixes in kernels: ``i_`` index, ``b_`` block in registers, ``m_`` mask. Both kernels are bound by reading the state:
the scan streams it in pipelined tiles, the commit keeps its tile in registers. The number of node tiles is a constexpr:
one for up to 32 nodes, or up to 16 nodes on a path.
"""

# Kernel arguments are pointers, scalars and constexprs, which have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STATE_TILE = 4096
"""State elements per commit program: 32 registers per thread, for occupancy."""

_SCAN_DIM, _SCAN_PART = 32, 32
"""Channels and state elements per scan tile; larger tiles spill registers."""

SCAN_STAGES = 3
"""Pipeline stages of a scan's state loads."""

_NODE_TILE = 32
"""Nodes per tile; larger tiles waste work on small trees and compile to much longer code."""

_PRECISION = tl.constexpr("tf32x3")
"""Float32 matmuls as three TF32 passes on tensor cores: close to float32 accuracy, much faster than float32 units. For
16-bit inputs, a single pass is exact."""


def tree_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, ancestors: Tensor
) -> Tensor:
    """See ``mmspec.ssm.ops.tree_scan``."""
    batch, nodes, heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block_dim = max(16, min(triton.next_power_of_2(head_dim), _SCAN_DIM))
    ancestors = ancestors.view(torch.uint8)
    block_nodes = min(_NODE_TILE, max(16, triton.next_power_of_2(nodes)))
    grid = (triton.cdiv(head_dim, block_dim), heads, batch)
    _tree_scan_kernel[grid](
        *(x, dt, a, b, c, d, state, ancestors, y),
        *(nodes, head_dim, b.shape[3], heads // b.shape[2]),
        *(*x.stride(), *dt.stride(), *b.stride(), *c.stride(), *state.stride(), *ancestors.stride(), *y.stride()),
        HAS_D=d is not None,
        TILES=triton.cdiv(nodes, block_nodes),
        BLOCK_NODES=block_nodes,
        BLOCK_DIM=block_dim,
        BLOCK_PART=max(16, min(triton.next_power_of_2(b.shape[3]), _SCAN_PART)),
        num_stages=SCAN_STAGES,
    )
    return y


def commit_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """See ``mmspec.ssm.ops.commit_scan``."""
    batch, _, heads, head_dim = x.shape
    block_state, block_dim = _tile(head_dim, b.shape[3])
    grid = (triton.cdiv(head_dim, block_dim), heads, batch)
    _commit_scan_kernel[grid](
        *(x, dt, a, b, state, path),
        *(path.shape[1], head_dim, b.shape[3], heads // b.shape[2]),
        *(*x.stride(), *dt.stride(), *b.stride(), *state.stride(), *path.stride()),
        TILES=triton.cdiv(path.shape[1], 16),
        BLOCK_DEPTH=16,
        BLOCK_DIM=block_dim,
        BLOCK_STATE=block_state,
        num_stages=1,
    )


def _tile(head_dim: int, size: int) -> tuple[int, int]:
    """Commit tile: the full state dimension, and as many channels as fit."""
    block_state = max(16, triton.next_power_of_2(size))
    return block_state, max(16, min(triton.next_power_of_2(head_dim), _STATE_TILE // block_state))


@triton.jit
def _program(head_dim, BLOCK_DIM: tl.constexpr):
    """Row, head, channel indices and channel mask of a program."""
    i_dim = tl.program_id(0) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    return tl.program_id(2).to(tl.int64), tl.program_id(1), i_dim, i_dim < head_dim


@triton.jit
def _load(pointer, i, m_i, i_stride, j, m_j, j_stride):
    """Load a 2D block, (i, j) float32, zero where masked."""
    p_both = pointer + i[:, None] * i_stride + j[None, :] * j_stride
    return tl.load(p_both, mask=m_i[:, None] & m_j[None, :], other=0.0).to(tl.float32)


@triton.jit
def _read(
    c, i_to, m_to, c_node, c_state, other, j, m_j, o_j, o_state, size,
    BLOCK_J: tl.constexpr, BLOCK_PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Matmul of the nodes' C with the state or the nodes' B: (nodes, j) float32."""
    b_sum = tl.zeros((i_to.shape[0], BLOCK_J), dtype=tl.float32)
    for i_at in range(0, size, BLOCK_PART):
        i_state = i_at + tl.arange(0, BLOCK_PART)
        m_state = i_state < size
        b_other = _load(other, i_state, m_state, o_state, j, m_j, o_j)
        b_c = _load(c, i_to, m_to, c_node, i_state, m_state, c_state)
        b_sum = tl.dot(b_c, b_other, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def _reach(a_head, dt, ancestors, tile, nodes, stride_dt, stride_i, stride_j, BLOCK_NODES: tl.constexpr):
    """Sums of ``dt a`` along the paths of a tile's nodes, in float64 because differences are used."""
    i_end = tile * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    b_reach = tl.zeros((BLOCK_NODES,), dtype=tl.float64)
    for other in range(tile + 1):  # ancestors may be in any earlier tile
        i_on = other * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
        m_on = i_on < nodes
        b_step = tl.load(dt + i_on * stride_dt, mask=m_on, other=0.0) * a_head
        m_pair = (i_end < nodes)[:, None] & m_on[None, :]
        b_pair = tl.load(ancestors + i_end[:, None] * stride_i + i_on[None, :] * stride_j, mask=m_pair, other=0)
        b_reach += tl.sum(tl.where(b_pair != 0, b_step[None, :], 0.0).to(tl.float64), axis=1)
    return b_reach


@triton.jit
def _decay(a_head, dt, ancestors, b_reach, i_to, m_to, other, nodes, dt_node, m_i, m_j, BLOCK_NODES: tl.constexpr):
    """Decay from the nodes of another tile to the nodes of this tile, 0 for non-ancestors, and the ancestor mask."""
    i_on = other * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    m_pair = m_to[:, None] & (i_on < nodes)[None, :]
    b_pair = tl.load(ancestors + i_to[:, None] * m_i + i_on[None, :] * m_j, mask=m_pair, other=0) != 0
    b_from = _reach(a_head, dt, ancestors, other, nodes, dt_node, m_i, m_j, BLOCK_NODES)
    # Mask before exp, which could overflow between nodes of different paths.
    return tl.exp(tl.where(b_pair, (b_reach[:, None] - b_from[None, :]).to(tl.float32), float("-inf"))), b_pair


@triton.jit
def _tree_scan_kernel(
    x, dt, a, b, c, d, state, ancestors, y,
    nodes, head_dim, size, per_group,
    x_row, x_node, x_head, x_dim,
    dt_row, dt_node, dt_head,
    b_row, b_node, b_group, b_state,
    c_row, c_node, c_group, c_state,
    s_row, s_head, s_dim, s_state,
    m_row, m_i, m_j,
    y_row, y_node, y_head, y_dim,
    HAS_D: tl.constexpr, TILES: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_PART: tl.constexpr,
):  # fmt: skip
    i_row, i_head, i_dim, m_dim = _program(head_dim, BLOCK_DIM)
    i_group = i_head // per_group
    x += i_row * x_row + i_head * x_head
    dt += i_row * dt_row + i_head * dt_head
    b += i_row * b_row + i_group * b_group
    c += i_row * c_row + i_group * c_group
    state += i_row * s_row + i_head.to(tl.int64) * s_head
    ancestors += i_row * m_row
    y += i_row * y_row + i_head * y_head

    overlap_precision: tl.constexpr = _PRECISION if b.dtype.element_ty == tl.float32 else "tf32"
    a_head = tl.load(a + i_head)

    for tile in range(TILES):
        i_to = tile * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
        m_to = i_to < nodes
        b_reach = _reach(a_head, dt, ancestors, tile, nodes, dt_node, m_i, m_j, BLOCK_NODES)
        # The state is read as (state, head_dim), transposed by its strides.
        b_y = _read(
            c, i_to, m_to, c_node, c_state, state, i_dim, m_dim, s_dim, s_state, size, BLOCK_DIM, BLOCK_PART, _PRECISION
        )
        b_y *= tl.exp(b_reach.to(tl.float32))[:, None]

        for other in range(tile + 1):
            i_on = other * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
            m_on = i_on < nodes
            b_overlap = _read(
                *(c, i_to, m_to, c_node, c_state, b, i_on, m_on, b_node, b_state, size),
                *(BLOCK_NODES, BLOCK_PART, overlap_precision),
            )
            b_decay, _ = _decay(
                a_head, dt, ancestors, b_reach, i_to, m_to, other, nodes, dt_node, m_i, m_j, BLOCK_NODES
            )
            b_step = tl.load(dt + i_on * dt_node, mask=m_on, other=0.0)
            b_weight = b_decay * b_overlap * b_step[None, :]
            b_x = _load(x, i_on, m_on, x_node, i_dim, m_dim, x_dim)
            b_y = tl.dot(b_weight, b_x, b_y, input_precision=_PRECISION)

        m_y = m_to[:, None] & m_dim[None, :]
        if HAS_D:
            b_x = _load(x, i_to, m_to, x_node, i_dim, m_dim, x_dim)
            b_y += tl.load(d + i_head).to(tl.float32) * b_x
        tl.store(y + i_to[:, None] * y_node + i_dim[None, :] * y_dim, b_y, mask=m_y)


@triton.jit
def _commit_scan_kernel(
    x, dt, a, b, state, path,
    depth, head_dim, size, per_group,
    x_row, x_node, x_head, x_dim,
    dt_row, dt_node, dt_head,
    b_row, b_node, b_group, b_state,
    s_row, s_head, s_dim, s_state,
    p_row, p_depth,
    TILES: tl.constexpr, BLOCK_DEPTH: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_STATE: tl.constexpr,
):  # fmt: skip
    i_row, i_head, i_dim, m_dim = _program(head_dim, BLOCK_DIM)
    i_state = tl.arange(0, BLOCK_STATE)
    m_state = i_state < size
    i_group = i_head // per_group
    x += i_row * x_row + i_head * x_head
    dt += i_row * dt_row + i_head * dt_head
    b += i_row * b_row + i_group * b_group
    state += i_row * s_row + i_head.to(tl.int64) * s_head
    path += i_row * p_row

    a_head = tl.load(a + i_head)
    m_tile = m_dim[:, None] & m_state[None, :]
    p_tile = state + i_dim[:, None] * s_dim + i_state[None, :] * s_state
    b_tile = tl.load(p_tile, mask=m_tile, other=0.0)
    for tile in range(TILES):
        i_depth = tile * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
        i_node = tl.load(path + i_depth * p_depth, mask=i_depth < depth, other=-1)
        m_node = i_node >= 0
        b_step = tl.load(dt + i_node * dt_node, mask=m_node, other=0.0)
        # A node's input decays by the later steps of this tile; later tiles decay the whole state.
        m_later = tl.arange(0, BLOCK_DEPTH)[:, None] < tl.arange(0, BLOCK_DEPTH)[None, :]
        b_later = tl.sum(tl.where(m_later, b_step[None, :], 0.0), axis=1) * a_head
        b_x = _load(x, i_dim, m_dim, x_dim, i_node, m_node, x_node)
        b_b = _load(b, i_node, m_node, b_node, i_state, m_state, b_state)
        b_tile *= tl.exp(tl.sum(b_step) * a_head)
        b_tile += tl.dot(b_x * (tl.exp(b_later) * b_step)[None, :], b_b, input_precision=_PRECISION)
    tl.store(p_tile, b_tile, mask=m_tile)
