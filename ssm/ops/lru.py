"""Gated linear recurrence of RG-LRU over a tree, level by level: one state per channel, decays per token.

A node's output is its state, so that the outputs are all there is to store.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import kernels
from mmspec.ssm.ops.selective import DepthIndex


def tree_lru(x: Tensor, a: Tensor, state: Tensor, levels: DepthIndex) -> Tensor:
    """State of a gated linear recurrence at every node of a tree.

    With h_p the state at the parent of node i, or the state before the tree at the root:

        h_i = a_i h_p + x_i

    Computed in float32 for any input dtype.

    Args:
        x: (batch, nodes, channels), after the input gate and its scaling.
        a: (batch, nodes, channels), the decays, from 0 to 1.
        state: (batch, channels) float32, before the root; not modified.
        levels: from ``depth_index``.

    Returns:
        (batch, nodes, channels) float32.

    Source: Griffin (arXiv 2402.19427), equation 4, whose sequence is a path of the tree.
    """
    _check(x, a, state)
    return kernels.run(x.device, _tree_lru, x, a, state, levels)


def _tree_lru(x: Tensor, a: Tensor, state: Tensor, levels: DepthIndex) -> Tensor:
    batch, nodes, channels = x.shape
    states = torch.empty(batch, 1 + nodes, channels, device=x.device)
    states[:, 0] = state
    flat, x, a = states.flatten(0, 1), x.flatten(0, 1), a.flatten(0, 1)
    for at, slot, source in zip(levels.nodes, levels.slots, levels.sources, strict=True):
        decay, entering = (t.index_select(0, at).float() for t in (a, x))
        flat.index_copy_(0, slot, entering.addcmul_(decay, flat.index_select(0, source)))
    return states[:, 1:]


def commit_lru(x: Tensor, a: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along a path, in place.

    Args:
        x, a: as for ``tree_lru``.
        state: (batch, channels) float32, contiguous; updated in place.
        path: (batch, depth) int64, node indices from the root, right-padded with -1. A row of only -1 keeps its state.

    Raises:
        ValueError: the state is not contiguous.

    Source: Griffin (arXiv 2402.19427), equation 4.
    """
    _check(x, a, state)
    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous to be updated in place: got strides {state.stride()}")
    kernels.run(x.device, _commit_lru, x, a, state, path)


def _commit_lru(x: Tensor, a: Tensor, state: Tensor, path: Tensor) -> None:
    row, padding = torch.arange(len(path), device=path.device)[:, None], (path < 0)[..., None]
    x, a = (t[row, path.clamp(min=0)].float() for t in (x, a))
    x, a = x.masked_fill(padding, 0.0), a.masked_fill(padding, 1.0)  # padding neither decays nor adds
    for entering, decay in zip(x.unbind(1), a.unbind(1), strict=True):
        state.mul_(decay).add_(entering)


def _check(x: Tensor, a: Tensor, state: Tensor) -> None:
    if a.shape != x.shape:
        raise ValueError(f"a must be (batch, nodes, channels) {tuple(x.shape)}: got {tuple(a.shape)}")
    expected = (x.shape[0], x.shape[2])
    if state.shape != expected or state.dtype != torch.float32:
        raise ValueError(f"state must be {expected} torch.float32: got {tuple(state.shape)} {state.dtype}")
