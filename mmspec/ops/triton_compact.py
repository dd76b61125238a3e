"""Triton kernel of ``mmspec.ops.compact``: one program per layer, row and head, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_DEPTH = 16
"""Nodes of a path moved per iteration."""


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
