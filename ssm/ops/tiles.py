"""Tiles of channels within the groups of a selective scan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_TILE = 2**18, 2**24
"""State elements of a tile at all nodes: on a CPU, in whose cache they stay, and elsewhere."""

_NARROWEST = 512
"""Channels of the smallest tile: in narrower ones, calls take longer than their work."""


def tiles(x: Tensor, b: Tensor, per_channel: int) -> Iterator[tuple[int, slice]]:
    """Groups, and slices of their channels, given the elements that a channel takes."""
    groups, channels = b.shape[2], x.shape[2] // b.shape[2]
    tile = max(_NARROWEST, _TILE[x.device.type != "cpu"] // per_channel)
    for group in range(groups):
        for start in range(0, channels, tile):
            first = group * channels
            yield group, slice(first + start, first + min(start + tile, channels))
