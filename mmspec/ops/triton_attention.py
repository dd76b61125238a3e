"""Triton kernels of ``mmspec.ops.attention``: split-KV attention with a merge pass.

Prefixes in kernels: ``i_`` index, ``b_`` block in registers, ``m_`` mask. A tile's rows are the queries of one KV head
(group x nodes), so that keys and values are read once for all of them. The prefix is split until the device is
occupied; the last split also handles the tail, the only part that reads a mask.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PRECISION = tl.constexpr("tf32x3")
"""Float32 matmuls as three TF32 passes on tensor cores: close to float32 accuracy, much faster than FP32 units."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_SPLIT = 128  # minimum slots per split: shorter splits do not pay for the merge

_LARGE_SHARED = 160_000  # minimum shared memory per SM, in bytes, of data-centre GPUs (A100, H100, B200)

_INTERPRETED = 6  # concurrent programs assumed for the interpreter, so that tests cover split prefixes


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    start: Tensor | None = None,
    depth: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See ``mmspec.ops.tree_attention``."""
    (batch, heads, nodes, head_dim), value_dim = query.shape, value.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    depth = None if window is None else depth
    group, slots, tail = heads // key.shape[1], key.shape[2], mask.shape[2]
    device = _device(query.device.type, query.device.index)
    block_rows, block_slots = tiles(group * nodes, max(head_dim, value_dim), query.dtype, device.shared)
    block_dim, block_value = block_of(head_dim), block_of(value_dim)
    parts = triton.cdiv(group * nodes, block_rows)
    splits = max(1, min(device.programs // (parts * key.shape[1] * batch), triton.cdiv(slots, _MIN_SPLIT)))
    read = query.new_empty(batch, nodes, heads, value_dim)
    if splits > 1:
        part = torch.empty(batch, nodes, heads, splits, value_dim, dtype=torch.float32, device=query.device)
        weight = torch.empty(batch, nodes, heads, splits, dtype=torch.float32, device=query.device)
    else:
        part = weight = read
    mask = mask.view(torch.uint8)
    _attend_kernel[(parts * splits, key.shape[1], batch)](
        *(query, key, value, prefix, mask, start, depth, part, weight),
        *(nodes, group * nodes, slots, tail, parts, splits, heads),
        *(scale if softcap is not None else scale * _LOG2_E.value, softcap or 1.0, window or 0),
        *(*query.stride(), *key.stride(), *value.stride(), *mask.stride(), *(depth.stride() if window else (0, 0))),  # type: ignore[union-attr]
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        SPLIT=splits > 1,
        START=start is not None,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_SLOTS=block_slots,
        BLOCK_DIM=block_dim,
        BLOCK_VALUE=block_value,
        **options(block_rows, max(block_dim, block_value), query.dtype),
    )
    if splits > 1:
        _merge_kernel[(heads, nodes, batch)](
            *(part, weight, read, splits, heads, nodes),
            HEAD_DIM=value_dim,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            BLOCK_DIM=block_value,
            num_warps=2,
        )
    return read


def tiles(rows: int, head_dim: int, dtype: torch.dtype, shared: int) -> tuple[int, int]:
    """Tile size ``(rows, slots)`` that fits in registers and in ``shared`` bytes of shared memory."""
    wide, exact = head_dim > 128, dtype == torch.float32
    max_rows = (16 if wide else 32) if exact else 64 if wide else 128  # by register use of the compiled kernels
    slots = 32 if wide or exact else 64
    if shared < _LARGE_SHARED:
        slots //= 2
    return min(max_rows, block_of(rows)), slots


def block_of(size: int) -> int:
    """Tile size of an unsplit matmul axis."""
    return max(16, triton.next_power_of_2(size))


def options(block_rows: int, block_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch options of the kernel for a tile size."""
    exact, numbers = dtype == torch.float32, block_rows * block_dim
    return {"num_warps": 8 if numbers >= (4096 if exact else 16384) else 4, "num_stages": 2 if exact else 3}


class _Device(NamedTuple):
    programs: int
    shared: int


@cache
def _device(kind: str, index: int | None) -> _Device:
    """Concurrent programs of a device, and bytes of shared memory per program."""
    if kind != "cuda":
        return _Device(_INTERPRETED, _LARGE_SHARED)
    device = torch.cuda.get_device_properties(index)
    return _Device(device.multi_processor_count, device.shared_memory_per_block_optin)  # type: ignore[attr-defined]


@triton.jit
def _fold_in(
    b_q, b_k, b_v, b_allowed, b_most, b_sum, b_read, scale, softcap, SOFTCAP: tl.constexpr
):  # one step of the online softmax, base 2
    b_score = tl.dot(b_q, b_k, input_precision=_PRECISION) * scale
    if SOFTCAP:
        # tanh, exact for large arguments
        b_score = softcap * _LOG2_E * (1.0 - 2.0 / (tl.exp(2.0 * b_score / softcap) + 1.0))
    b_score = tl.where(b_allowed, b_score, float("-inf"))
    b_higher = tl.maximum(b_most, tl.max(b_score, axis=1))
    b_zero = tl.where(b_higher == float("-inf"), 0.0, b_higher)  # all slots so far may be masked
    b_fade = tl.exp2(b_most - b_zero)
    b_weight = tl.exp2(b_score - b_zero[:, None])
    b_sum = b_sum * b_fade + tl.sum(b_weight, axis=1)
    b_read = b_read * b_fade[:, None] + tl.dot(b_weight.to(b_v.dtype), b_v, input_precision=_PRECISION)
    return b_higher, b_sum, b_read


_VARYING = ["nodes", "rows", "slots", "tail", "parts", "splits", "heads", "m_row", "m_node"]
"""Arguments that change between steps: no specialisation."""


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["mask"])
def _attend_kernel(
    query, key, value, prefix, mask, start,
    depth, part, weight, nodes, rows, slots, tail, parts, splits, heads, scale, softcap, window,
    q_row, q_head, q_node, q_dim,
    k_row, k_head, k_slot, k_dim,
    v_row, v_head, v_slot, v_dim,
    m_row, m_node, m_slot,
    d_row, d_node,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SPLIT: tl.constexpr, START: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    # Programs that read the same keys are adjacent.
    i_split, i_kv, i_batch = tl.program_id(0) // parts, tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_tile = (tl.program_id(0) % parts) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_node, i_head = i_tile % nodes, i_kv * (rows // nodes) + i_tile // nodes
    i_dim, i_block = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_SLOTS)
    i_value = tl.arange(0, BLOCK_VALUE)
    m_tile, m_dim, m_value = i_tile < rows, i_dim < HEAD_DIM, i_value < VALUE_DIM
    key += i_batch * k_row + i_kv.to(tl.int64) * k_head
    value += i_batch * v_row + i_kv.to(tl.int64) * v_head

    p_q = query + i_batch * q_row + i_head[:, None] * q_head + i_node[:, None] * q_node + i_dim[None, :] * q_dim
    b_q = tl.load(p_q, mask=m_tile[:, None] & m_dim[None, :], other=0.0)
    b_most = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    b_read = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)

    i_first, i_end = 0, tl.load(prefix + i_batch).to(tl.int32)
    if WINDOW:
        i_first = tl.maximum(0, i_end - window + 1)
        b_depth = tl.load(depth + i_batch * d_row + i_node * d_node, mask=m_tile, other=0).to(tl.int32)
    share = tl.cdiv(tl.cdiv(tl.maximum(i_end - i_first, 0), splits), BLOCK_SLOTS) * BLOCK_SLOTS
    i_first += i_split * share
    i_last = tl.minimum(i_first + share, i_end)
    for i_at in range(i_first, i_last, BLOCK_SLOTS):
        i_slot = i_at + i_block
        m_slot_in = i_slot < i_last
        b_allowed = m_slot_in[None, :]
        if WINDOW:
            b_allowed = b_allowed & (i_slot[None, :] > i_end + b_depth[:, None] - window)
        p_k = key + i_slot[None, :] * k_slot + i_dim[:, None] * k_dim
        b_k = tl.load(p_k, mask=m_slot_in[None, :] & m_dim[:, None], other=0.0)
        p_v = value + i_slot[:, None] * v_slot + i_value[None, :] * v_dim
        b_v = tl.load(p_v, mask=m_slot_in[:, None] & m_value[None, :], other=0.0)
        b_most, b_sum, b_read = _fold_in(b_q, b_k, b_v, b_allowed, b_most, b_sum, b_read, scale, softcap, SOFTCAP)

    if i_split == splits - 1:
        i_start = slots - tail
        if START:
            i_start = tl.load(start).to(tl.int32)
        mask += i_batch * m_row
        for i_at in range(0, tail, BLOCK_SLOTS):
            i_tail = i_at + i_block
            m_tail = i_tail < tail
            p_mask = mask + i_node[:, None] * m_node + i_tail[None, :] * m_slot
            b_allowed = tl.load(p_mask, mask=m_tile[:, None] & m_tail[None, :], other=0) != 0
            p_k = key + (i_start + i_tail)[None, :] * k_slot + i_dim[:, None] * k_dim
            b_k = tl.load(p_k, mask=m_tail[None, :] & m_dim[:, None], other=0.0)
            p_v = value + (i_start + i_tail)[:, None] * v_slot + i_value[None, :] * v_dim
            b_v = tl.load(p_v, mask=m_tail[:, None] & m_value[None, :], other=0.0)
            b_most, b_sum, b_read = _fold_in(b_q, b_k, b_v, b_allowed, b_most, b_sum, b_read, scale, softcap, SOFTCAP)

    b_read /= tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
    i_out = (i_batch * nodes + i_node) * heads + i_head
    if SPLIT:
        i_out = i_out * splits + i_split
        tl.store(weight + i_out, b_most + tl.log2(b_sum), mask=m_tile)
    m_out = m_tile[:, None] & m_value[None, :]
    tl.store(part + i_out[:, None] * VALUE_DIM + i_value[None, :], b_read, mask=m_out)


@triton.jit(do_not_specialize=["splits", "heads", "nodes"])
def _merge_kernel(
    part, weight, read, splits, heads, nodes,
    HEAD_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    i_out = (tl.program_id(2).to(tl.int64) * nodes + tl.program_id(1)) * heads + tl.program_id(0)
    i_split, i_dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIM)
    m_split, m_dim = i_split < splits, i_dim < HEAD_DIM
    b_weight = tl.load(weight + i_out * splits + i_split, mask=m_split, other=float("-inf"))
    b_weight = tl.exp2(b_weight - tl.max(b_weight))  # the split with the tail is never fully masked
    p_part = part + (i_out * splits + i_split)[:, None] * HEAD_DIM + i_dim[None, :]
    b_part = tl.load(p_part, mask=m_split[:, None] & m_dim[None, :], other=0.0)
    b_read = tl.sum(b_part * b_weight[:, None], axis=0) / tl.sum(b_weight)
    tl.store(read + i_out * HEAD_DIM + i_dim, b_read, mask=m_dim)
