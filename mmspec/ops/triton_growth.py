"""Triton kernels of ``mmspec.ops.growth``.

Scores are ranked by 64-bit keys, score bits above index bits, so that one max reduction yields score and index, lowest
index first on ties. Top-k splits the vocabulary among programs; each returns its own top k and partial sum of
exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VOCAB = 2048
"""Vocabulary block size."""
_CANDIDATES = 64
"""Block size of tree candidates."""
_NONE = tl.constexpr(-(2**63))
"""Key of a masked entry."""


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See ``mmspec.ops.top_log_probs``."""
    vocab = logits.shape[-1]
    flat = logits.reshape(-1, vocab)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block = min(_VOCAB, triton.next_power_of_2(max(vocab, k)))
    rows, parts = len(flat), triton.cdiv(vocab, block)
    keys = torch.empty(rows, parts, k, dtype=torch.long, device=flat.device)
    peaks, sums = torch.empty(2, rows, parts, device=flat.device)
    tokens = torch.empty(rows, k, dtype=torch.long, device=flat.device)
    log_probs = torch.empty(rows, k, device=flat.device)
    _rank_kernel[(rows, parts)](
        *(flat, keys, peaks, sums, vocab, flat.stride(0)), K=k, BLOCK_VOCAB=block, num_warps=4 if block < _VOCAB else 8
    )
    _top_kernel[(rows,)](
        *(keys, peaks, sums, tokens, log_probs, parts),
        K=k,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCK_KEYS=triton.next_power_of_2(parts * k),
        num_warps=2,
    )
    shape = *logits.shape[:-1], k
    return tokens.view(shape), log_probs.view(shape)


def next_beam(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``mmspec.ops.next_beam``."""
    batch, entries = scores.shape
    best = scores.new_empty(batch, width)
    token, at = tokens.new_empty(2, batch, width)
    _beam_kernel[(batch,)](
        *(scores.contiguous(), tokens.contiguous(), best, token, at, entries, width),
        BLOCK_ENTRIES=triton.next_power_of_2(entries),
        num_warps=1 if entries <= 256 else 4,
    )
    return best, token, at


def keep_best(
    root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``mmspec.ops.keep_best``."""
    batch, candidates = scores.shape
    kept, above = tokens.new_empty(2, batch, 1 + nodes)
    score = scores.new_empty(batch, nodes)
    _keep_kernel[(triton.cdiv(candidates, _CANDIDATES), batch)](
        *(t.contiguous() for t in (root, tokens, parents, scores)),
        *(kept, above, score, candidates, nodes),
        BLOCK=_CANDIDATES,
        num_warps=4,
    )
    return kept, above, score


@triton.jit
def _keys(b_number, i_place, m_there):
    """Sort keys of float32 numbers and their indices."""
    b_bits = b_number.to(tl.int32, bitcast=True)
    b_rank = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)  # integer order = float order
    return tl.where(m_there, (b_rank.to(tl.int64) << 32) | (0x7FFFFFFF - i_place).to(tl.int64), _NONE)


@triton.jit
def _number(key):
    rank = (key >> 32).to(tl.int32)
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["vocab"])
def _rank_kernel(logits, keys, peaks, sums, vocab, s_row, K: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_token = i_part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    m_token = i_token < vocab
    b_logit = tl.load(logits + i_row * s_row + i_token, mask=m_token, other=float("-inf")).to(tl.float32)
    peak = tl.max(b_logit, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    i_at = i_row * tl.num_programs(1) + i_part
    tl.store(peaks + i_at, peak)
    tl.store(sums + i_at, tl.sum(tl.exp(b_logit - shift), axis=0))
    b_key = _keys(b_logit, i_token, m_token)
    for rank in range(K):
        best = tl.max(b_key, axis=0)
        tl.store(keys + i_at * K + rank, best)
        b_key = tl.where(b_key == best, _NONE, b_key)


@triton.jit(do_not_specialize=["parts"])
def _top_kernel(
    keys,
    peaks,
    sums,
    tokens,
    log_probs,
    parts,
    K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    i_row, i_part, i_key = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_KEYS)
    b_peak = tl.load(peaks + i_row * parts + i_part, mask=i_part < parts, other=float("-inf"))
    b_sum = tl.load(sums + i_row * parts + i_part, mask=i_part < parts, other=0.0)
    peak = tl.max(b_peak, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = shift + tl.log(tl.sum(b_sum * tl.exp(b_peak - shift), axis=0))
    b_key = tl.load(keys + i_row * parts * K + i_key, mask=i_key < parts * K, other=_NONE)
    for rank in range(K):
        best = tl.max(b_key, axis=0)
        tl.store(tokens + i_row * K + rank, _place(best))
        tl.store(log_probs + i_row * K + rank, _number(best) - total)
        b_key = tl.where(b_key == best, _NONE, b_key)


@triton.jit(do_not_specialize=["entries", "width"])
def _beam_kernel(scores, tokens, best_score, best_token, best_at, entries, width, BLOCK_ENTRIES: tl.constexpr):
    i_row, i_entry = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_ENTRIES)
    m_entry = i_entry < entries
    b_score = tl.load(scores + i_row * entries + i_entry, mask=m_entry, other=0.0)
    b_key = _keys(b_score, i_entry, m_entry)
    for rank in range(width):
        best = tl.max(b_key, axis=0)
        at = _place(best)
        tl.store(best_score + i_row * width + rank, _number(best))
        tl.store(best_token + i_row * width + rank, tl.load(tokens + i_row * entries + at))
        tl.store(best_at + i_row * width + rank, at)
        b_key = tl.where(b_key == best, _NONE, b_key)


@triton.jit(do_not_specialize=["candidates", "nodes"])
def _keep_kernel(root, tokens, parents, scores, kept, above, score, candidates, nodes, BLOCK: tl.constexpr):
    i_row = tl.program_id(1).to(tl.int64)
    i_mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_mine = i_mine < candidates
    tokens += i_row * candidates
    parents += i_row * candidates
    scores += i_row * candidates
    b_parent = tl.load(parents + i_mine, mask=m_mine, other=0)
    m_below = b_parent > 0
    b_score = tl.load(scores + i_mine, mask=m_mine, other=0.0)
    b_key = _keys(b_score, i_mine, m_mine)
    i_parent = tl.where(m_below, b_parent - 1, 0).to(tl.int32)
    b_above = _keys(tl.load(scores + i_parent), i_parent, m_below)
    # The rank of a node, and of its parent, is its new index.
    b_rank, b_rank_above = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for i_at in range(0, candidates, BLOCK):
        i_other = i_at + tl.arange(0, BLOCK)
        m_other = i_other < candidates
        b_other = _keys(tl.load(scores + i_other, mask=m_other, other=0.0), i_other, m_other)
        b_rank += tl.sum((b_other[None, :] > b_key[:, None]).to(tl.int32), axis=1)
        b_rank_above += tl.sum((b_other[None, :] > b_above[:, None]).to(tl.int32), axis=1)
    m_kept = m_mine & (b_rank < nodes)
    kept += i_row * (1 + nodes)
    above += i_row * (1 + nodes)
    tl.store(kept + 1 + b_rank, tl.load(tokens + i_mine, mask=m_kept, other=0), mask=m_kept)
    tl.store(above + 1 + b_rank, tl.where(m_below, b_rank_above + 1, 0).to(tl.int64), mask=m_kept)
    tl.store(score + i_row * nodes + b_rank, b_score, mask=m_kept)
    if tl.program_id(0) == 0:
        tl.store(kept, tl.load(root + i_row))
        tl.store(above, -1)
