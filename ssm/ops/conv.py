"""Short causal convolution over a tree: each node convolves the last inputs of its own path."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import kernels


def conv_window(parents: Tensor, width: int) -> Tensor:
    """Gather indices of each node's convolution window, computed once per tree, for all layers: (batch, nodes, width)
    int64, oldest input first, into the last ``width - 1`` entries of the state, followed by the nodes' inputs.
    ``parents``: (batch, nodes) int64, -1 at the root, else less than the node's index."""
    batch, nodes = parents.shape
    before = width - 1
    # Predecessor of each entry: the previous state entry; for the root, the last state entry.
    kept = torch.arange(-1, before - 1, device=parents.device).expand(batch, -1)
    previous = torch.cat([kept, parents + before], dim=1)
    taps = [torch.arange(before, before + nodes, device=parents.device).expand(batch, -1)]
    for _ in range(before):
        taps.append(previous.gather(1, taps[-1]))
    return torch.stack(taps[::-1], dim=2)


def _check(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, activation: str | None = "silu"
) -> None:
    width = weight.shape[1]
    if state.shape[:2] != (x.shape[0], x.shape[2]) or state.shape[2] < width - 1:
        expected = f"({x.shape[0]}, {x.shape[2]}, {width - 1} or more)"
        raise ValueError(f"the state of a convolution of width {width} must be {expected}: got {tuple(state.shape)}")
    if activation not in ("silu", "swish", None):
        raise ValueError(f"activation must be 'silu', 'swish' or None: got {activation!r}")


@kernels.operation(_check)
def tree_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, activation: str | None = "silu"
) -> Tensor:
    """Depthwise causal convolution at every node of a tree.

    Args:
        x: (batch, nodes, channels), the nodes' inputs.
        state: (batch, channels, entries), inputs before the tree, newest last; the last ``width - 1`` are used
            (transformers stores ``width``, other libraries ``width - 1``).
        weight: (channels, width).
        bias: (channels,) or None.
        window: (batch, nodes, width), from ``conv_window``.
        activation: "silu" (alias "swish") or None.

    Returns:
        (batch, nodes, channels), in the dtype of ``x``; computed in float32.

    Raises:
        ValueError: the state has fewer than ``width - 1`` entries, or the activation is unknown.
    """
    batch, nodes, channels = x.shape
    before = weight.shape[1] - 1
    taps = weight.t().float().contiguous()  # (width, channels)
    kept = state[:, :, state.shape[2] - before :].transpose(1, 2)
    inputs = torch.cat([kept.to(x.dtype), x], dim=1).float()  # (batch, width - 1 + nodes, channels)
    if nodes == 1:
        y = (inputs * taps).sum(1, keepdim=True)
        if bias is not None:
            y += bias
    else:
        y = inputs[:, before:] * taps[-1] if bias is None else torch.addcmul(bias.float(), inputs[:, before:], taps[-1])
        first = inputs.shape[1] * torch.arange(batch, device=x.device)[:, None, None]
        index = (window + first).view(-1, before + 1).t()
        flat = inputs.view(-1, channels)
        for tap in range(before):
            y.view(-1, channels).addcmul_(flat.index_select(0, index[tap]), taps[tap])
    return (y if activation is None else torch.nn.functional.silu(y, inplace=True)).to(x.dtype)


@kernels.operation()
def commit_conv(x: Tensor, state: Tensor, path: Tensor) -> None:
    """Shift inputs, (batch, nodes, channels), along a path into the convolution's state, (batch, channels, entries), in
    place. ``path``: (batch, depth) int64, node indices from the root, right-padded with -1."""
    entries = state.shape[2]
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    inputs = torch.cat([state, x[row, path.clamp(min=0)].transpose(1, 2).to(state.dtype)], dim=2)
    last = (path >= 0).sum(1, keepdim=True) + torch.arange(entries, device=x.device)  # (batch, entries)
    state.copy_(inputs.gather(2, last[:, None].expand(-1, state.shape[1], -1)))
