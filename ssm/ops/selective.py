"""Recurrences over a tree, level by level: the selective scan of Mamba-1, and RG-LRU.

Decays differ by channel and state element, so a matmul over nodes cannot replace the recurrence. Each level of the tree
is computed from its parents. Node states are temporaries for one tile of channels at a time; in RG-LRU, with one state
per channel, they are the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmspec.ops import kernels
from mmspec.ssm.ops.scan import base2, check_state, exp2, in_place


@dataclass(frozen=True)
class DepthIndex:
    """Order in which the nodes of a tree are computed; shared by all layers.

    Attributes:
        ancestors: (batch, nodes, nodes) bool, [i, j] is True if j is i or an ancestor of i.
    """

    ancestors: Tensor

    @cached_property
    def parents(self) -> Tensor:
        """(batch, nodes) int64, -1 at the root: the last proper ancestor, as parents precede their children."""
        index = torch.arange(self.ancestors.shape[1], device=self.ancestors.device)
        return torch.where(self.ancestors.tril(-1), index, -1).amax(-1)

    @cached_property
    def nodes(self) -> tuple[Tensor, ...]:
        """Per level, its nodes as indices into (batch * nodes)."""
        batch, nodes, _ = self.ancestors.shape
        if kernels.static_shapes(self.ancestors.device):  # node by node, without a host sync
            return tuple(torch.arange(batch * nodes, device=self.ancestors.device).view(batch, nodes).unbind(1))
        depth = self.ancestors.sum(-1).flatten()
        return tuple((depth == level).nonzero()[:, 0] for level in range(1, int(depth.max()) + 1))

    @cached_property
    def slots(self) -> tuple[Tensor, ...]:
        """Per level, its nodes as indices into (batch * (1 + nodes)); the first slot of a row is its state."""
        return self._slots_of(torch.arange(self.parents.shape[1], device=self.parents.device))

    @cached_property
    def sources(self) -> tuple[Tensor, ...]:
        """Per level, the slots of their parents."""
        return self._slots_of(self.parents)

    def _slots_of(self, places: Tensor) -> tuple[Tensor, ...]:
        batch, nodes = self.parents.shape
        first = 1 + (1 + nodes) * torch.arange(batch, device=places.device)[:, None]
        flat = (first + places).flatten()
        return tuple(flat[at] for at in self.nodes)


def _check(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *others: Any) -> None:
    (batch, nodes, channels), (groups, size) = x.shape, b.shape[2:]
    if channels % groups:
        raise ValueError(f"groups must divide channels: got {groups} groups of {channels} channels")
    if dt.shape != x.shape:
        raise ValueError(f"dt must be (batch, nodes, channels) {(batch, nodes, channels)}: got {tuple(dt.shape)}")
    if a.shape != (channels, size):
        raise ValueError(f"a must be (channels, state) {(channels, size)}: got {tuple(a.shape)}")
    check_state(others[-2], batch, channels, size)


@kernels.operation(_check)
def tree_selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, levels: DepthIndex
) -> Tensor:
    """Output of the selective scan at every node of a tree.

    With S_p the state at the parent of node i, or the state before the tree at the root:

        S_i = exp(dt_i a) S_p + dt_i x_i (x) B_i
        y_i = S_i C_i + D x_i

    Computed in float32 for any input dtype, in tiles of channels of a limited size.

    Args:
        x: (batch, nodes, channels).
        dt: (batch, nodes, channels) float32, after bias and softplus.
        a: (channels, state) float32, negative.
        b, c: (batch, nodes, groups, state); groups divide channels, consecutive channels share a group.
        d: (channels,) or None.
        state: (batch, channels, state) float32, before the root; not modified.
        levels: levels of the tree, as in ``Tree.levels``.

    Returns:
        (batch, nodes, channels) float32.

    Source: Mamba (arXiv 2312.00752), algorithm 2, along each path of the tree.
    """
    (batch, nodes, _), size = x.shape, b.shape[3]
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for group, part in tiles(x, b, batch * nodes * size):
        step, rate = dt[:, :, part].flatten(0, 1).unsqueeze(2), base2(a[part])
        entering = (step * x[:, :, part].flatten(0, 1).unsqueeze(2)) * b[:, :, group].flatten(0, 1).unsqueeze(1)
        states = torch.empty(batch, 1 + nodes, *rate.shape, dtype=torch.float32, device=x.device)
        states[:, 0] = state[:, part]
        states = states.flatten(0, 1)
        for at, slot, source in zip(levels.nodes, levels.slots, levels.sources, strict=True):
            decay = exp2(step.index_select(0, at) * rate)
            now = entering.index_select(0, at).addcmul_(decay, states.index_select(0, source))
            states.index_copy_(0, slot, now)
        after = states.view(batch, 1 + nodes, *rate.shape)[:, 1:]
        y[:, :, part] = torch.matmul(after, c[:, :, group].float().unsqueeze(3)).squeeze(3)
    return y if d is None else y.addcmul_(x, d)


@kernels.operation(in_place(_check))
def commit_selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along a path, in place; arguments as for ``tree_selective``, path and errors as for
    ``commit_scan``. Source: Mamba (arXiv 2312.00752), algorithm 2."""
    row = torch.arange(len(path), device=path.device)[:, None]
    x, dt, b = (t[row, path.clamp(min=0)].float() for t in (x, dt, b))
    dt = dt * (path >= 0)[..., None]  # padding neither decays nor adds
    for group, part in tiles(x, b, len(path) * b.shape[3]):
        rate, tile = base2(a[part]), state[:, part]
        for step, value, entering in zip(
            *(t.unbind(1) for t in (dt[..., part], x[..., part], b[:, :, group])), strict=True
        ):
            tile.mul_(exp2(step.unsqueeze(2) * rate)).addcmul_((step * value).unsqueeze(2), entering.unsqueeze(1))


_TILE = 2**18, 2**24
"""State elements of a tile at all nodes: on a CPU, limited by its cache, and elsewhere."""

_NARROWEST = 512
"""Channels of the smallest tile; narrower tiles are dominated by call overhead."""


def tiles(x: Tensor, b: Tensor, per_channel: int) -> Iterator[tuple[int, slice]]:
    """Yield groups and slices of their channels, given the number of elements per channel."""
    groups, channels = b.shape[2], x.shape[2] // b.shape[2]
    tile = max(_NARROWEST, _TILE[x.device.type != "cpu"] // per_channel)
    for group in range(groups):
        for start in range(0, channels, tile):
            first = group * channels
            yield group, slice(first + start, first + min(start + tile, channels))


def _check_lru(x: Tensor, a: Tensor, state: Tensor, levels_or_path: Any) -> None:
    if a.shape != x.shape:
        raise ValueError(f"a must be (batch, nodes, channels) {tuple(x.shape)}: got {tuple(a.shape)}")
    check_state(state, x.shape[0], x.shape[2])


@kernels.operation(_check_lru)
def tree_lru(x: Tensor, a: Tensor, state: Tensor, levels: DepthIndex) -> Tensor:
    """State of a gated linear recurrence at every node of a tree: ``h_i = a_i h_p + x_i``, with h_p the state at the
    parent of node i, or the state before the tree at the root. Computed in float32 for any input dtype.

    Inputs after the input gate and its scaling, decays from 0 to 1, and results are (batch, nodes, channels); the state
    is (batch, channels) float32, and not modified; ``levels`` as for ``tree_selective``. Source: Griffin (arXiv
    2402.19427), equation 4, along each path of the tree.
    """
    batch, nodes, channels = x.shape
    states = torch.empty(batch, 1 + nodes, channels, dtype=torch.float32, device=x.device)
    states[:, 0] = state
    flat, x, a = states.flatten(0, 1), x.flatten(0, 1), a.flatten(0, 1)
    for at, slot, source in zip(levels.nodes, levels.slots, levels.sources, strict=True):
        decay, entering = (t.index_select(0, at).float() for t in (a, x))
        flat.index_copy_(0, slot, entering.addcmul_(decay, flat.index_select(0, source)))
    return states[:, 1:]


@kernels.operation(in_place(_check_lru))
def commit_lru(x: Tensor, a: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along a path, in place; arguments as for ``tree_lru``, path and errors as for ``commit_scan``.
    Source: Griffin (arXiv 2402.19427), equation 4."""
    row, padding = torch.arange(len(path), device=path.device)[:, None], (path < 0)[..., None]
    x, a = (t[row, path.clamp(min=0)].float() for t in (x, a))
    x, a = x.masked_fill(padding, 0.0), a.masked_fill(padding, 1.0)  # padding neither decays nor adds
    for entering, decay in zip(x.unbind(1), a.unbind(1), strict=True):
        state.mul_(decay).add_(entering)
