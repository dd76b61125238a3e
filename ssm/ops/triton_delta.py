"""Triton kernels of ``mmspec.ssm.ops.delta``: one program per row, head and tile of the head's value channels.

Prefixes, loads and tile sizes are those in ``triton_scan``. The triangular system is solved level by level: one matmul
computes all nodes with the same number of ancestors within their tile. Updates of earlier tiles are in global memory.
The commit walks the path node by node, with its part of the state in registers.

For KDA, another kernel first walks from each node to the root and computes products of keys and queries with decayed
keys for all tiles of value channels; Gated DeltaNet's kernel reads these products.
"""

# Kernel arguments are pointers, scalars and constexprs, which have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.ssm.ops.triton_scan import (
    _PRECISION,
    _SCAN_DIM,
    _SCAN_PART,
    SCAN_STAGES,
    _decay,
    _load,
    _program,
    _reach,
    _read,
    _tile,
)

_NODE_TILE = 16
"""Nodes per tile; larger tiles spill registers."""

_WALKING = 4
"""Nodes per program of KDA's first kernel: one per warp."""


def tree_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor) -> Tensor:
    """See ``mmspec.ssm.ops.tree_delta``."""
    return _tree_delta(q, k, v, g, beta, state, ancestors.view(torch.uint8), None)


def _tree_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor, overlap: Tensor | None
) -> Tensor:
    """Outputs at every node; ``overlap``, (2, batch, heads, nodes, nodes), has KDA's products of keys and of queries
    with decayed keys, for keys and queries that are decayed from the initial state."""
    batch, nodes, heads, value_dim = v.shape
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    block_dim = max(16, min(triton.next_power_of_2(value_dim), _SCAN_DIM))
    tiles = triton.cdiv(nodes, _NODE_TILE)
    updates = torch.empty(v.shape, dtype=torch.float32, device=v.device) if tiles > 1 else y
    overlap_strides = (0, 0, 0, 0) if overlap is None else overlap.stride()[:4]
    _tree_delta_kernel[(triton.cdiv(value_dim, block_dim), heads, batch)](
        *(q, k, v, g, beta, state, ancestors, overlap, updates, y),
        *(nodes, value_dim, k.shape[3], heads // k.shape[2]),
        *(*q.stride(), *k.stride(), *v.stride(), *g.stride()[:3], *beta.stride()),
        *(*state.stride(), *ancestors.stride(), *overlap_strides, *y.stride()),
        PRODUCTS=overlap is not None,
        TILES=tiles,
        BLOCK_NODES=_NODE_TILE,
        BLOCK_DIM=block_dim,
        BLOCK_PART=max(16, min(triton.next_power_of_2(k.shape[3]), _SCAN_PART)),
        num_stages=SCAN_STAGES,
    )
    return y


def commit_delta(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, path: Tensor) -> None:
    """See ``mmspec.ssm.ops.commit_delta``, and ``commit_kda``, whose ``g`` has a last axis of key channels."""
    batch, _, heads, value_dim = v.shape
    g = g if g.ndim == 4 else g.unsqueeze(3)
    block_key, block_dim = _tile(value_dim, k.shape[3])
    _commit_delta_kernel[(triton.cdiv(value_dim, block_dim), heads, batch)](
        *(k, v, g, beta, state, path),
        *(path.shape[1], value_dim, k.shape[3], heads // k.shape[2]),
        *(*k.stride(), *v.stride(), *g.stride(), *beta.stride(), *state.stride(), *path.stride()),
        PER_CHANNEL=g.shape[3] > 1,
        BLOCK_DIM=block_dim,
        BLOCK_KEY=block_key,
    )


@triton.jit
def _overlaps(
    q, k, g, ancestors, overlap, b_reach, i_to, m_to, other, nodes, key_dim,
    q_node, q_key, k_node, k_key, g_node, m_i, m_j, o_part, o_node,
    PRODUCTS: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_PART: tl.constexpr,
):  # fmt: skip
    """Decayed products of a tile's keys and queries with the keys of another tile, (nodes, nodes) float32 each, and the
    ancestor mask."""
    i_on = other * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    m_on = i_on < nodes
    if PRODUCTS:
        b_keys = _load(overlap, i_to, m_to, o_node, i_on, m_on, 1)
        b_queries = _load(overlap + o_part, i_to, m_to, o_node, i_on, m_on, 1)
        m_pair = m_to[:, None] & m_on[None, :]
        b_pair = tl.load(ancestors + i_to[:, None] * m_i + i_on[None, :] * m_j, mask=m_pair, other=0) != 0
    else:
        b_decay, b_pair = _decay(1.0, g, ancestors, b_reach, i_to, m_to, other, nodes, g_node, m_i, m_j, BLOCK_NODES)
        b_keys = b_decay * _read(
            k, i_to, m_to, k_node, k_key, k, i_on, m_on, k_node, k_key, key_dim, BLOCK_NODES, BLOCK_PART, _PRECISION
        )
        b_queries = b_decay * _read(
            q, i_to, m_to, q_node, q_key, k, i_on, m_on, k_node, k_key, key_dim, BLOCK_NODES, BLOCK_PART, _PRECISION
        )
    return b_keys, b_queries, b_pair


@triton.jit
def _solve(b_weight, b_right, b_pair):
    """Solve for the updates of a tile's nodes, in the order of their number of ancestors in the tile."""
    b_level = tl.sum(b_pair.to(tl.int32), axis=1)
    b_update = tl.where((b_level == 1)[:, None], b_right, 0.0)
    for level in range(2, tl.max(b_level) + 1):
        b_next = b_right - tl.dot(b_weight, b_update, input_precision=_PRECISION)
        b_update = tl.where((b_level == level)[:, None], b_next, b_update)
    return b_update


@triton.jit
def _tree_delta_kernel(
    q, k, v, g, beta, state, ancestors, overlap, updates, y,
    nodes, value_dim, key_dim, per_group,
    q_row, q_node, q_group, q_key,
    k_row, k_node, k_group, k_key,
    v_row, v_node, v_head, v_dim,
    g_row, g_node, g_head,
    b_row, b_node, b_head,
    s_row, s_head, s_key, s_dim,
    m_row, m_i, m_j,
    o_part, o_row, o_head, o_node,
    y_row, y_node, y_head, y_dim,
    PRODUCTS: tl.constexpr, TILES: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_PART: tl.constexpr,
):  # fmt: skip
    i_row, i_head, i_dim, m_dim = _program(value_dim, BLOCK_DIM)
    i_group = i_head // per_group
    q += i_row * q_row + i_group * q_group
    k += i_row * k_row + i_group * k_group
    v += i_row * v_row + i_head * v_head
    g += i_row * g_row + i_head * g_head
    beta += i_row * b_row + i_head * b_head
    state += i_row * s_row + i_head.to(tl.int64) * s_head
    ancestors += i_row * m_row
    if PRODUCTS:
        overlap += i_row * o_row + i_head * o_head
    updates += i_row * y_row + i_head * y_head
    y += i_row * y_row + i_head * y_head

    for tile in range(TILES):
        i_to = tile * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
        m_to = i_to < nodes
        b_right = _read(
            k, i_to, m_to, k_node, k_key, state, i_dim, m_dim, s_dim, s_key, key_dim, BLOCK_DIM, BLOCK_PART, _PRECISION
        )
        b_y = _read(
            q, i_to, m_to, q_node, q_key, state, i_dim, m_dim, s_dim, s_key, key_dim, BLOCK_DIM, BLOCK_PART, _PRECISION
        )
        b_reach = tl.zeros((BLOCK_NODES,), dtype=tl.float64)
        if not PRODUCTS:
            b_reach = _reach(1.0, g, ancestors, tile, nodes, g_node, m_i, m_j, BLOCK_NODES)
            b_start = tl.exp(b_reach.to(tl.float32))[:, None]
            b_right *= b_start
            b_y *= b_start
        b_right = _load(v, i_to, m_to, v_node, i_dim, m_dim, v_dim) - b_right
        for other in range(tile):
            i_on = other * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
            b_update = _load(updates, i_on, i_on < nodes, y_node, i_dim, m_dim, y_dim)
            b_keys, b_queries, _ = _overlaps(
                *(q, k, g, ancestors, overlap, b_reach, i_to, m_to, other, nodes, key_dim),
                *(q_node, q_key, k_node, k_key, g_node, m_i, m_j, o_part, o_node, PRODUCTS, BLOCK_NODES, BLOCK_PART),
            )
            b_right -= tl.dot(b_keys, b_update, input_precision=_PRECISION)
            b_y = tl.dot(b_queries, b_update, b_y, input_precision=_PRECISION)

        b_keys, b_queries, b_pair = _overlaps(
            *(q, k, g, ancestors, overlap, b_reach, i_to, m_to, tile, nodes, key_dim),
            *(q_node, q_key, k_node, k_key, g_node, m_i, m_j, o_part, o_node, PRODUCTS, BLOCK_NODES, BLOCK_PART),
        )
        b_beta = tl.load(beta + i_to * b_node, mask=m_to, other=0.0)[:, None]
        b_update = _solve(b_beta * b_keys, b_beta * b_right, b_pair)
        b_y = tl.dot(b_queries, b_update, b_y, input_precision=_PRECISION)

        m_y = m_to[:, None] & m_dim[None, :]
        tl.store(y + i_to[:, None] * y_node + i_dim[None, :] * y_dim, b_y, mask=m_y)
        if tile < TILES - 1:
            tl.store(updates + i_to[:, None] * y_node + i_dim[None, :] * y_dim, b_update, mask=m_y)
            tl.debug_barrier()  # other threads read the updates


@triton.jit
def _commit_delta_kernel(
    k, v, g, beta, state, path,
    depth, value_dim, key_dim, per_group,
    k_row, k_node, k_group, k_key,
    v_row, v_node, v_head, v_dim,
    g_row, g_node, g_head, g_key,
    b_row, b_node, b_head,
    s_row, s_head, s_key, s_dim,
    p_row, p_depth,
    PER_CHANNEL: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    i_row, i_head, i_dim, m_dim = _program(value_dim, BLOCK_DIM)
    i_key = tl.arange(0, BLOCK_KEY)
    m_key = i_key < key_dim
    k += i_row * k_row + (i_head // per_group) * k_group
    v += i_row * v_row + i_head * v_head
    g += i_row * g_row + i_head * g_head
    beta += i_row * b_row + i_head * b_head
    path += i_row * p_row

    m_tile = m_key[:, None] & m_dim[None, :]
    p_tile = state + i_row * s_row + i_head.to(tl.int64) * s_head + i_key[:, None] * s_key + i_dim[None, :] * s_dim
    b_tile = tl.load(p_tile, mask=m_tile, other=0.0)
    for i_depth in range(depth):
        i_node = tl.load(path + i_depth * p_depth)
        kept = (i_node >= 0).to(tl.float32)  # padding neither decays nor updates
        i_node = tl.maximum(i_node, 0)
        b_k = tl.load(k + i_node * k_node + i_key * k_key, mask=m_key, other=0.0).to(tl.float32)
        b_v = tl.load(v + i_node * v_node + i_dim * v_dim, mask=m_dim, other=0.0).to(tl.float32)
        if PER_CHANNEL:
            b_g = tl.load(g + i_node * g_node + i_key * g_key, mask=m_key, other=0.0)
            b_tile *= tl.exp(b_g * kept)[:, None]
        else:
            b_tile *= tl.exp(tl.load(g + i_node * g_node) * kept)
        b_update = (b_v - tl.sum(b_tile * b_k[:, None], axis=0)) * (tl.load(beta + i_node * b_node) * kept)
        b_tile += b_k[:, None] * b_update[None, :]
    tl.store(p_tile, b_tile, mask=m_tile)


def tree_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor) -> Tensor:
    """See ``mmspec.ssm.ops.tree_kda``."""
    batch, nodes, heads, key_dim = k.shape
    keys, queries = k.new_empty(2, *k.shape, dtype=torch.float32)  # decayed from the initial state
    overlap = torch.empty(2, batch, heads, nodes, nodes, dtype=torch.float32, device=v.device)
    ancestors = ancestors.view(torch.uint8)
    _overlap_kda_kernel[(triton.cdiv(nodes, _WALKING), heads, batch)](
        *(q, k, g, ancestors, keys, queries, overlap[0], overlap[1]),
        *(nodes, key_dim),
        *(*q.stride(), *k.stride(), *g.stride(), *ancestors.stride(), *keys.stride()),
        *overlap.stride()[1:4],
        BLOCK_NODES=_WALKING,
        BLOCK_ALL=max(16, triton.next_power_of_2(nodes)),
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
    )
    return _tree_delta(queries, keys, v, g, beta, state, ancestors, overlap)


commit_kda = commit_delta


@triton.jit
def _overlap_kda_kernel(
    q, k, g, ancestors, keys, queries, key_overlap, query_overlap,
    nodes, key_dim,
    q_row, q_node, q_head, q_key,
    k_row, k_node, k_head, k_key,
    g_row, g_node, g_head, g_key,
    m_row, m_i, m_j,
    r_row, r_node, r_head, r_key,
    o_row, o_head, o_node,
    BLOCK_NODES: tl.constexpr, BLOCK_ALL: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    i_row, i_head, i_to, m_to = _program(nodes, BLOCK_NODES)
    i_key, i_on = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_ALL)
    m_key, m_on = i_key < key_dim, i_on < nodes
    q += i_row * q_row + i_head * q_head
    k += i_row * k_row + i_head * k_head
    g += i_row * g_row + i_head * g_head
    rows = i_row * r_row + i_head * r_head
    overlaps = i_row * o_row + i_head * o_head

    b_k = _load(k, i_to, m_to, k_node, i_key, m_key, k_key)
    b_q = _load(q, i_to, m_to, q_node, i_key, m_key, q_key)
    m_pair = m_to[:, None] & m_on[None, :]
    b_pair = tl.load(ancestors + i_row * m_row + i_to[:, None] * m_i + i_on[None, :] * m_j, mask=m_pair, other=0) != 0
    b_keys = tl.zeros((BLOCK_NODES, BLOCK_ALL), dtype=tl.float32)
    b_queries = tl.zeros((BLOCK_NODES, BLOCK_ALL), dtype=tl.float32)
    b_reach = tl.zeros((BLOCK_NODES, BLOCK_KEY), dtype=tl.float32)
    i_at = tl.max(tl.where(b_pair, i_on[None, :], -1), axis=1)
    # Summed generation by generation, decays neither cancel nor overflow.
    for _ in range(tl.max(tl.sum(b_pair.to(tl.int32), axis=1))):
        m_at = i_at >= 0
        b_decayed = _load(k, i_at, m_at, k_node, i_key, m_key, k_key) * tl.exp(b_reach)
        m_here = i_on[None, :] == i_at[:, None]
        b_keys = tl.where(m_here, tl.sum(b_decayed * b_k, axis=1)[:, None], b_keys)
        b_queries = tl.where(m_here, tl.sum(b_decayed * b_q, axis=1)[:, None], b_queries)
        b_reach += _load(g, i_at, m_at, g_node, i_key, m_key, g_key)
        i_at = tl.max(tl.where(b_pair & (i_on[None, :] < i_at[:, None]), i_on[None, :], -1), axis=1)

    b_start = tl.exp(b_reach)
    p_rows = rows + i_to[:, None] * r_node + i_key[None, :] * r_key
    m_rows = m_to[:, None] & m_key[None, :]
    tl.store(keys + p_rows, b_k * b_start, mask=m_rows)
    tl.store(queries + p_rows, b_q * b_start, mask=m_rows)
    p_pair = overlaps + i_to[:, None] * o_node + i_on[None, :]
    tl.store(key_overlap + p_pair, b_keys, mask=m_pair)
    tl.store(query_overlap + p_pair, b_queries, mask=m_pair)
