"""KV compaction: moves the accepted path's slots to the end of the committed prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import kernels


def compact_kv(storage: Tensor, path: Tensor, start: int | Tensor, lengths: Tensor) -> None:
    """Move the KV slots of each row's path to the end of the row's prefix, in all layers, in place.

    Slot ``start + path[b, i]`` moves to ``lengths[b] + i``. Source and destination may overlap. The last slot of the
    buffer is a write sink for padding.

    Args:
        storage: (layers * 2, batch, kv_heads, slots, head_dim), keys and values of all layers.
        path: (batch, depth) int64, ascending node indices padded with -1 at the end; a row may be all -1.
        start: slot of node 0, at least every row's length; an int, or (1,) int on the device.
        lengths: (batch,) int, committed slots of each row.

    Raises:
        ValueError: shapes disagree.
    """
    if storage.ndim != 5 or path.ndim != 2 or path.shape[0] != storage.shape[1] or lengths.shape != path.shape[:1]:
        raise ValueError(
            "expected storage (layers * 2, batch, kv_heads, slots, head_dim), path (batch, depth) and lengths "
            f"(batch,): got {tuple(storage.shape)}, {tuple(path.shape)} and {tuple(lengths.shape)}"
        )
    kernels.run(storage.device, _compact_kv, storage, path, start, lengths)


def _compact_kv(storage: Tensor, path: Tensor, start: int | Tensor, lengths: Tensor) -> None:
    slot = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    source = start + path.clamp(min=0)
    if len(path) == 1 and path.device.type == "cpu" and int(path[0, -1]) >= 0:
        at = int(lengths)  # one row without padding: a slice write is faster than an indexed one
        storage[:, :, :, at : at + path.shape[1]] = storage[:, :, :, source[0]]
        return
    row = torch.arange(len(path), device=path.device)[:, None]
    slot = torch.where(path >= 0, slot, storage.shape[3] - 1)
    storage[:, row, :, slot] = storage[:, row, :, source]
