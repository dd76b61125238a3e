"""Keeping an accepted path in a KV buffer: its slots move up behind the committed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import kernels


def compact_kv(storage: Tensor, path: Tensor, start: int | Tensor, ends: Tensor) -> None:
    """Move the nodes of each row's path behind the row's end, in all layers, in place.

    What stood in slot ``start + path[b, i]`` stands in slot ``ends[b] + i`` afterwards. Slots overlap: a path may move
    by less than its length. The last slot of all is scratch, and what stands there means nothing afterwards.

    Args:
        storage: (layers * 2, batch, kv_heads, slots, head_dim), keys and values of all layers.
        path: (batch, depth) int64, ascending node indices padded with -1 at the end; a row may be all -1.
        start: slot of node 0, at least every row's end; an int, or on the device (1,).
        ends: (batch,) int, the slot that the first node of each row's path moves to.

    Raises:
        ValueError: shapes disagree.
    """
    if storage.ndim != 5 or path.ndim != 2 or path.shape[0] != storage.shape[1] or ends.shape != path.shape[:1]:
        raise ValueError(
            "expected storage (layers * 2, batch, kv_heads, slots, head_dim), path (batch, depth) and ends (batch,): "
            f"got {tuple(storage.shape)}, {tuple(path.shape)} and {tuple(ends.shape)}"
        )
    if kernels.in_use(storage.device) == "triton":
        from mmspec.ops import triton_compact

        triton_compact.compact_kv(storage, path, start, ends)
        return
    slot = ends[:, None] + torch.arange(path.shape[1], device=path.device)
    source = start + path.clamp(min=0)
    if len(path) == 1 and path.device.type == "cpu" and int(path[0, -1]) >= 0:
        at = int(ends)  # one row whole: slices spare the writing by index
        storage[:, :, :, at : at + path.shape[1]] = storage[:, :, :, source[0]]
        return
    row = torch.arange(len(path), device=path.device)[:, None]
    slot = torch.where(path >= 0, slot, storage.shape[3] - 1)
    storage[:, row, :, slot] = storage[:, row, :, source]
