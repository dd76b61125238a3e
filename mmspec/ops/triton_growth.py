"""Triton kernels of ``mmspec.ops.growth``.

Scores are ranked by 64-bit keys, score bits above index bits, so that one max reduction yields score and index, lowest
index first on ties. Top-k splits the vocabulary; each program returns its top k and a partial sum of exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.ops.growth import Beam

_VOCAB = 2048  # vocabulary block size
_CANDIDATES = 64  # block size of tree candidates
_NONE = tl.constexpr(-(2**63))  # key of a masked entry


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See ``mmspec.ops.top_log_probs``."""
    vocab = logits.shape[-1]
    k = min(k, vocab)
    flat = logits.reshape(-1, vocab)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block = min(_VOCAB, triton.next_power_of_2(max(vocab, k)))
    rows, parts = len(flat), triton.cdiv(vocab, block)
    keys = torch.empty(rows, parts, k, dtype=torch.long, device=flat.device)
    peaks, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=flat.device)
    tokens = torch.empty(rows, k, dtype=torch.long, device=flat.device)
    log_probs = torch.empty(rows, k, dtype=torch.float32, device=flat.device)
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


def next_beam(
    above: Tensor | None, log_probs: Tensor, tokens: Tensor, width: int, first: int = 0
) -> tuple[Tensor, Beam]:
    """See ``mmspec.ops.next_beam``."""
    batch, parents, children = log_probs.shape
    entries = parents * children
    width = min(width, entries)
    scores, best = (log_probs.new_empty(batch, size, dtype=torch.float32) for size in (entries, width))
    token, origin, place = tokens.new_empty(3, batch, width)
    _beam_kernel[(batch,)](
        *(above, log_probs, tokens, scores, best, token, origin, place, entries, children, width, first),
        *(*log_probs.stride(), *tokens.stride()),
        ABOVE=above is not None,
        BLOCK_ENTRIES=triton.next_power_of_2(entries),
        num_warps=1 if entries <= 256 else 4,
    )
    return scores, Beam(best, token, origin, place)


def extend_reach(reach: Tensor, origin: Tensor) -> Tensor:
    """See ``mmspec.ops.extend_reach``."""
    (batch, parents, entries), width = reach.shape, origin.shape[1]
    extended = reach.new_empty(batch, width, entries + width)
    reach, target = reach.contiguous().view(torch.uint8), extended.view(torch.uint8)
    _reach_kernel[(width, batch)](
        *(reach, origin.contiguous(), target, parents, entries, width),
        BLOCK=triton.next_power_of_2(entries + width),
        num_warps=1,
    )
    return extended


def node_inputs(table: Tensor, tokens: Tensor, states: Tensor, origin: Tensor, ids: Tensor | None = None) -> Tensor:
    """See ``mmspec.ops.node_inputs``."""
    (batch, width), hidden, features = tokens.shape, table.shape[1], states.shape[2]
    inputs = table.new_empty(batch, width, hidden + features)
    _inputs_kernel[(width, batch)](
        *(table, tokens.contiguous(), states, origin.contiguous(), ids, inputs, width, hidden, features),
        *(table.stride(0), *states.stride()),
        IDS=ids is not None,
        BLOCK=min(1024, triton.next_power_of_2(max(hidden, features))),
    )
    return inputs


def keep_best(
    root: Tensor, tokens: Tensor, places: Tensor | None, children: int, scores: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``mmspec.ops.keep_best``."""
    batch, candidates = scores.shape
    nodes = min(nodes, candidates)
    kept, above = tokens.new_empty(2, batch, 1 + nodes)
    score = scores.new_empty(batch, 1 + nodes)
    extended = 0 if places is None else places.shape[1]
    _keep_kernel[(triton.cdiv(candidates, _CANDIDATES), batch)](
        *(root.contiguous(), tokens.contiguous(), places, scores.contiguous()),
        *(kept, above, score, candidates, extended, candidates - extended * children, children, nodes),
        PLACES=places is not None,
        BLOCK=_CANDIDATES,
        num_warps=4,
    )
    return kept, above, score


def tree_ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """See ``mmspec.ops.tree_ancestors``."""
    batch, nodes = parents.shape
    reach = parents.new_empty(batch, nodes, nodes, dtype=torch.bool)
    depth = parents.new_empty(batch, nodes)
    block = triton.next_power_of_2(nodes)
    _ancestors_kernel[(nodes, batch)](
        *(parents, reach.view(torch.uint8), depth, nodes, *parents.stride()), BLOCK_NODES=block, num_warps=1
    )
    return reach, depth


def write_last(state: Tensor, outputs: Tensor, length: Tensor) -> None:
    """See ``mmspec.ops.write_last``."""
    batch, _, size = outputs.shape
    if not size:
        return
    block = min(1024, triton.next_power_of_2(size))
    _last_kernel[(triton.cdiv(size, block), batch)](
        *(state, outputs, length, size, state.stride(0), *outputs.stride(), length.stride(0)), BLOCK=block
    )


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
    keys, peaks, sums, tokens, log_probs, parts, K: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_KEYS: tl.constexpr
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


@triton.jit(do_not_specialize=["entries", "children", "width", "first"])
def _beam_kernel(
    above, log_probs, tokens, scores, best_score, best_token, best_origin, best_place, entries, children, width, first,
    s_row, s_parent, s_child, t_row, t_parent, t_child,
    ABOVE: tl.constexpr, BLOCK_ENTRIES: tl.constexpr,
):  # fmt: skip
    i_row, i_entry = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_ENTRIES)
    m_entry, i_parent = i_entry < entries, i_entry // children
    p_log_prob = log_probs + i_row * s_row + i_parent * s_parent + (i_entry % children) * s_child
    b_score = tl.load(p_log_prob, mask=m_entry, other=0.0)
    if ABOVE:
        b_score += tl.load(above + i_row * (entries // children) + i_parent, mask=m_entry, other=0.0)
    tl.store(scores + i_row * entries + i_entry, b_score, mask=m_entry)
    b_key = _keys(b_score, i_entry, m_entry)
    for rank in range(width):
        best = tl.max(b_key, axis=0)
        at, out = _place(best), i_row * width + rank
        tl.store(best_score + out, _number(best))
        p_token = tokens + i_row * t_row + (at // children) * t_parent + (at % children) * t_child
        tl.store(best_token + out, tl.load(p_token))
        tl.store(best_origin + out, at // children)
        tl.store(best_place + out, at + first)
        b_key = tl.where(b_key == best, _NONE, b_key)


@triton.jit(do_not_specialize=["parents", "entries", "width"])
def _reach_kernel(reach, origin, extended, parents, entries, width, BLOCK: tl.constexpr):
    i_node, i_row, i_entry = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    i_out = i_row * width + i_node
    parent = tl.load(origin + i_out)
    b_above = tl.load(reach + (i_row * parents + parent) * entries + i_entry, mask=i_entry < entries, other=0)
    b_reach = tl.where(i_entry == entries + i_node, 1, b_above.to(tl.int32))
    tl.store(extended + i_out * (entries + width) + i_entry, b_reach.to(tl.uint8), mask=i_entry < entries + width)


@triton.jit(do_not_specialize=["width"])
def _inputs_kernel(
    table, tokens, states, origin, ids, inputs, width, hidden, features,
    t_row, s_row, s_parent, s_feature,
    IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(1).to(tl.int64)
    i_out = i_row * width + tl.program_id(0)
    token, parent = tl.load(tokens + i_out), tl.load(origin + i_out)
    if IDS:
        token = tl.load(ids + token)
    inputs += i_out * (hidden + features)
    for i_first in range(0, hidden, BLOCK):
        i_feature = i_first + tl.arange(0, BLOCK)
        b_embed = tl.load(table + token * t_row + i_feature, mask=i_feature < hidden, other=0.0)
        tl.store(inputs + i_feature, b_embed, mask=i_feature < hidden)
    for i_first in range(0, features, BLOCK):
        i_feature = i_first + tl.arange(0, BLOCK)
        p_state = states + i_row * s_row + parent * s_parent + i_feature * s_feature
        b_state = tl.load(p_state, mask=i_feature < features, other=0.0)
        tl.store(inputs + hidden + i_feature, b_state, mask=i_feature < features)


@triton.jit
def _parents(places, i_candidate, m_candidate, first, children, PLACES: tl.constexpr):
    """Parents of candidates, 0 for the root, i for the i-th candidate."""
    b_parent = i_candidate * 0
    if PLACES:
        m_below = m_candidate & (i_candidate >= first)
        b_parent = tl.load(places + (i_candidate - first) // children, mask=m_below, other=0).to(tl.int32)
    return b_parent


@triton.jit(do_not_specialize=["candidates", "extended", "first", "children", "nodes"])
def _keep_kernel(
    root, tokens, places, scores, kept, above, score, candidates, extended, first, children, nodes,
    PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(1).to(tl.int64)
    i_mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_mine = i_mine < candidates
    tokens += i_row * candidates
    scores += i_row * candidates
    if PLACES:
        places += i_row * extended
    b_parent = _parents(places, i_mine, m_mine, first, children, PLACES)
    m_below = b_parent > 0
    b_score = tl.load(scores + i_mine, mask=m_mine, other=0.0)
    b_key = _keys(b_score, i_mine, m_mine)
    i_parent = tl.where(m_below, b_parent - 1, 0)
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
    i_out = i_row * (1 + nodes) + 1 + b_rank
    tl.store(kept + i_out, tl.load(tokens + i_mine, mask=m_kept, other=0), mask=m_kept)
    tl.store(above + i_out, tl.where(m_below, b_rank_above + 1, 0).to(tl.int64), mask=m_kept)
    tl.store(score + i_out, b_score, mask=m_kept)
    if tl.program_id(0) == 0:
        tl.store(kept + i_row * (1 + nodes), tl.load(root + i_row))
        tl.store(above + i_row * (1 + nodes), -1)
        tl.store(score + i_row * (1 + nodes), 0.0)


@triton.jit(do_not_specialize=["nodes", "p_row"])
def _ancestors_kernel(parents, reach, depth, nodes, p_row, p_node, BLOCK_NODES: tl.constexpr):
    i_node, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parents += i_row * p_row
    b_node = tl.arange(0, BLOCK_NODES)
    b_reach = (b_node == i_node).to(tl.uint8)
    above, levels = tl.load(parents + i_node * p_node), i_row * 0
    while above >= 0:
        b_reach = tl.where(b_node == above, 1, b_reach).to(tl.uint8)
        levels += 1
        above = tl.load(parents + above * p_node)
    i_out = i_row * nodes + i_node
    tl.store(reach + i_out * nodes + b_node, b_reach, mask=b_node < nodes)
    tl.store(depth + i_out, levels)


@triton.jit(do_not_specialize=["size", "state_row", "o_row", "o_node", "l_row"])
def _last_kernel(state, outputs, length, size, state_row, o_row, o_node, o_feature, l_row, BLOCK: tl.constexpr):
    i_row, i_feature = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(length + i_row * l_row) - 1
    m_feature = i_feature < tl.where(last >= 0, size, 0)
    b_last = tl.load(outputs + i_row * o_row + last * o_node + i_feature * o_feature, mask=m_feature, other=0.0)
    tl.store(state + i_row * state_row + i_feature, b_last, mask=m_feature)
