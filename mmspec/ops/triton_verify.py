"""Triton kernels of ``mmspec.ops.verify``.

Prefixes in kernels: ``i_`` index, ``b_`` block in registers, ``m_`` mask. The tree walk is one program per row,
rejection sampling one per node, with one pass over the vocabulary per rejected child. KV compaction is one program per
layer, row and head, in one launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree

_VOCAB = 4096  # vocabulary block size

_DEPTH = 16  # nodes of a path moved per iteration


def accepted_path(tree: TokenTree, choices: Tensor) -> Tensor:
    """See ``mmspec.ops.accepted_path``."""
    (batch, nodes), width = choices.shape, tree.max_depth + 1
    verdict = choices.new_empty(batch, 2 + 2 * width)
    tokens, parents, choices = (t.contiguous() for t in (tree.tokens, tree.parents, choices))
    _path_kernel[(batch,)](
        *(tokens, parents, _bytes(tree.valid), choices, verdict, nodes, width),
        VALID=tree.valid is not None,
        BLOCK_NODES=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return verdict


def choose_drawn(tree: TokenTree, probs: Tensor, chances: Tensor, last: Tensor) -> Tensor:
    """See ``mmspec.ops.choose_drawn``."""
    (batch, first, vocab), nodes = probs.shape, tree.nodes
    assert tree.draft_probs is not None
    # Double buffers of p and q: a pass reads one and writes the other.
    scratch = probs.new_empty(4, batch, first, vocab)
    scratch[0], scratch[2] = probs, tree.draft_probs
    choice = tree.tokens.new_empty(batch, first)
    tokens, parents, chances, last = (t.contiguous() for t in (tree.tokens, tree.parents, chances, last))
    _choose_kernel[(first, batch)](
        *(tokens, parents, _bytes(tree.valid), scratch, chances, last, choice, nodes, vocab),
        VALID=tree.valid is not None,
        BLOCK_NODES=triton.next_power_of_2(nodes),
        BLOCK_VOCAB=_block(vocab),
        num_warps=8,
    )
    return choice


def quantile(probs: Tensor, uniform: Tensor) -> Tensor:
    """See ``mmspec.ops.quantile``."""
    vocab = probs.shape[-1]
    flat, block = probs.reshape(-1, vocab).contiguous(), _block(vocab)
    rows, parts = len(flat), triton.cdiv(vocab, block)
    sums = torch.empty(rows, parts, dtype=torch.float64, device=probs.device)
    token = torch.empty(rows, dtype=torch.long, device=probs.device)
    _sum_kernel[(rows, parts)](flat, sums, vocab, BLOCK_VOCAB=block, num_warps=8)
    _quantile_kernel[(rows,)](
        *(flat, sums, uniform.reshape(-1).contiguous(), token, vocab, parts),
        BLOCK_VOCAB=block,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        num_warps=8,
    )
    return token.view(uniform.shape)


def _block(vocab: int) -> int:
    return min(_VOCAB, triton.next_power_of_2(vocab))


def _bytes(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.contiguous().view(torch.uint8)


@triton.jit(do_not_specialize=["nodes", "width"])
def _path_kernel(
    tokens, parents, valid, choices, verdict, nodes, width, VALID: tl.constexpr, BLOCK_NODES: tl.constexpr
):
    i_row, i_node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_NODES)
    m_node = i_node < nodes
    b_token = tl.load(tokens + i_row * nodes + i_node, mask=m_node, other=-1)
    b_parent = tl.load(parents + i_row * nodes + i_node, mask=m_node, other=-1)
    m_child = m_node & (b_parent >= 0)
    if VALID:
        m_child = m_child & (tl.load(valid + i_row * nodes + i_node, mask=m_node, other=0) != 0)
    choices += i_row * nodes
    verdict += i_row * (2 + 2 * width)

    first = tl.load(choices)
    at, length, bonus = tl.program_id(0) * 0, tl.program_id(0) * 0, first
    alive = length == 0
    for step in range(width):
        choice = tl.load(choices + at)
        tl.store(verdict + 2 + step, tl.where(alive, at, -1))
        tl.store(verdict + 2 + width + step, tl.where(alive, choice, first))
        length += alive.to(tl.int32)
        bonus = tl.where(alive, choice, bonus)
        # Siblings have distinct tokens: at most one child matches.
        child = tl.max(tl.where(m_child & (b_parent == at) & (b_token == choice), i_node, -1), axis=0)
        alive = alive & (child >= 0)
        at = tl.where(alive, child, at)
    tl.store(verdict, length)
    tl.store(verdict + 1, bonus)


@triton.jit
def _quantile(probs, uniform, vocab, BLOCK_VOCAB: tl.constexpr):
    i_block = tl.arange(0, BLOCK_VOCAB)
    b_total = tl.zeros((BLOCK_VOCAB,), tl.float64)
    for i_at in range(0, vocab, BLOCK_VOCAB):
        b_total += tl.load(probs + i_at + i_block, mask=i_at + i_block < vocab, other=0.0).to(tl.float64)
    wanted = uniform.to(tl.float64) * tl.sum(b_total, axis=0)
    passed = wanted * 0.0
    token = vocab
    i_at = 0
    while (i_at < vocab) & (token == vocab):
        b_p = tl.load(probs + i_at + i_block, mask=i_at + i_block < vocab, other=0.0).to(tl.float64)
        # b_p > 0: rounding of the sum could otherwise select a token of probability 0.
        m_hit = (passed + tl.cumsum(b_p, axis=0) > wanted) & (b_p > 0.0)
        token = tl.min(tl.where(m_hit, i_at + i_block, vocab), axis=0)
        passed += tl.sum(b_p, axis=0)
        i_at += BLOCK_VOCAB
    return tl.minimum(token, vocab - 1)


@triton.jit
def _sum_kernel(probs, sums, vocab, BLOCK_VOCAB: tl.constexpr):
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_token = i_part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    b_p = tl.load(probs + i_row * vocab + i_token, mask=i_token < vocab, other=0.0).to(tl.float64)
    tl.store(sums + i_row * tl.num_programs(1) + i_part, tl.sum(b_p, axis=0))


@triton.jit
def _quantile_kernel(probs, sums, uniform, token, vocab, parts, BLOCK_VOCAB: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Select the part of the vocabulary by the sums of all parts, then the token in it."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_PARTS)
    b_sum = tl.load(sums + i_row * parts + i_part, mask=i_part < parts, other=0.0)
    b_total = tl.cumsum(b_sum, axis=0)
    wanted = tl.load(uniform + i_row).to(tl.float64) * tl.sum(tl.where(i_part == parts - 1, b_total, 0.0), axis=0)
    part = _first(b_total > wanted, b_sum, i_part, BLOCK_PARTS)
    passed = tl.sum(tl.where(i_part == part - 1, b_total, 0.0), axis=0)
    i_token = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    b_p = tl.load(probs + i_row * vocab + i_token, mask=i_token < vocab, other=0.0).to(tl.float64)
    tl.store(token + i_row, _first(passed + tl.cumsum(b_p, axis=0) > wanted, b_p, i_token, vocab))


@triton.jit
def _first(m_passed, b_share, i_entry, end):
    """First entry with a positive share at which the sum passes the threshold, else the last entry with a share."""
    first = tl.min(tl.where(m_passed & (b_share > 0.0), i_entry, end), axis=0)
    last = tl.max(tl.where(b_share > 0.0, i_entry, 0), axis=0)
    return tl.where(first == end, last, first)


@triton.jit
def _reject(p, q, to_p, to_q, scale_p, scale_q, token, vocab, BLOCK_VOCAB: tl.constexpr):
    """Write max(p - q, 0) and q without ``token`` to ``to_p`` and ``to_q``; returns the sums of both."""
    i_block = tl.arange(0, BLOCK_VOCAB)
    b_sum_p = tl.zeros((BLOCK_VOCAB,), to_p.dtype.element_ty)
    b_sum_q = tl.zeros((BLOCK_VOCAB,), to_q.dtype.element_ty)
    for i_at in range(0, vocab, BLOCK_VOCAB):
        i_token = i_at + i_block
        m_token = i_token < vocab
        b_q = tl.load(q + i_token, mask=m_token, other=0.0)
        b_p = tl.load(p + i_token, mask=m_token, other=0.0)
        b_p = tl.maximum(b_p * scale_p - b_q * scale_q, 0.0)
        b_q = tl.where(i_token == token, 0.0, b_q)
        tl.store(to_p + i_token, b_p, mask=m_token)
        tl.store(to_q + i_token, b_q, mask=m_token)
        b_sum_p += b_p
        b_sum_q += b_q
    return tl.sum(b_sum_p, axis=0), tl.sum(b_sum_q, axis=0)


@triton.jit(do_not_specialize=["nodes"])
def _choose_kernel(
    tokens, parents, valid, scratch, chances, last, choice, nodes, vocab,
    VALID: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    i_at, i_row, i_node = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_NODES)
    m_node = i_node < nodes
    m_child = m_node & (tl.load(parents + i_row * nodes + i_node, mask=m_node, other=-1) == i_at)
    if VALID:
        m_child = m_child & (tl.load(valid + i_row * nodes + i_node, mask=m_node, other=0) != 0)
    i_out = i_row * tl.num_programs(0) + i_at
    plane = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * vocab
    scratch += i_out * vocab
    # current buffers of p and q, and their normalisation factors
    in_p, in_q = i_row * 0, i_row * 0
    one = tl.load(chances + i_row * nodes) * 0.0 + 1.0
    scale_p, scale_q = one, one
    chosen = tl.load(tokens) * 0 - 1
    child = tl.min(tl.where(m_child, i_node, BLOCK_NODES), axis=0)
    while (child < BLOCK_NODES) & (chosen < 0):
        token = tl.load(tokens + i_row * nodes + child)
        p, q = scratch + in_p * plane, scratch + (2 + in_q) * plane
        p_token, q_token = tl.load(p + token) * scale_p, tl.load(q + token) * scale_q
        if tl.load(chances + i_row * nodes + child) * q_token < p_token:
            chosen = token
        else:
            to_p, to_q = scratch + (1 - in_p) * plane, scratch + (3 - in_q) * plane
            sum_p, sum_q = _reject(p, q, to_p, to_q, scale_p, scale_q, token, vocab, BLOCK_VOCAB)
            tl.debug_barrier()
            # A sum of 0 comes from rounding: keep the previous distribution.
            in_p = tl.where(sum_p > 0.0, 1 - in_p, in_p)
            scale_p = tl.where(sum_p > 0.0, 1.0 / sum_p, scale_p)
            in_q = tl.where(sum_q > 0.0, 1 - in_q, in_q)
            scale_q = tl.where(sum_q > 0.0, 1.0 / sum_q, scale_q)
        child = tl.min(tl.where(m_child & (i_node > child), i_node, BLOCK_NODES), axis=0)
    if chosen < 0:
        p = scratch + in_p * plane
        chosen = _quantile(p, tl.load(last + i_out), vocab, BLOCK_VOCAB).to(tl.int64)
    tl.store(choice + i_out, chosen)


def compact_kv(storage: Tensor, path: Tensor, start: int | Tensor, lengths: Tensor) -> None:
    """See ``mmspec.ops.compact_kv``; needs no write sink."""
    planes, batch, heads, _, head_dim = storage.shape
    _compact_kernel[(heads, batch, planes)](
        *(storage, path, start, lengths, path.shape[1]),
        *(*storage.stride(), *path.stride()),
        HEAD_DIM=head_dim,
        START=isinstance(start, Tensor),
        BLOCK_DEPTH=min(_DEPTH, triton.next_power_of_2(path.shape[1])),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["start", "depth", "p_row"])
def _compact_kernel(
    storage, path, start, lengths, depth,
    s_plane, s_row, s_head, s_slot, s_dim,
    p_row, p_depth,
    HEAD_DIM: tl.constexpr, START: tl.constexpr, BLOCK_DEPTH: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    i_head, i_row, i_plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_dim = tl.arange(0, BLOCK_DIM)
    storage += i_plane * s_plane + i_row * s_row + i_head * s_head + i_dim[None, :] * s_dim
    i_end = tl.load(lengths + i_row).to(tl.int32)
    i_start = start
    if START:
        i_start = tl.load(start).to(tl.int32)
    for i_first in range(0, depth, BLOCK_DEPTH):
        i_depth = i_first + tl.arange(0, BLOCK_DEPTH)
        i_node = tl.load(path + i_row * p_row + i_depth * p_depth, mask=i_depth < depth, other=-1).to(tl.int32)
        i_from, i_to = i_start + i_node, i_end + i_depth
        m_move = ((i_node >= 0) & (i_from != i_to))[:, None] & (i_dim < HEAD_DIM)[None, :]
        b_kept = tl.load(storage + i_from[:, None] * s_slot, mask=m_move, other=0.0)
        # A slot is overwritten only after its last read: by this tile before the barrier, and never by a later tile,
        # as paths ascend and slots only move towards the front.
        tl.debug_barrier()
        tl.store(storage + i_to[:, None] * s_slot, b_kept, mask=m_move)
        tl.debug_barrier()
