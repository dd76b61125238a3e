"""Tree scan of Mamba-2 in closed form, all nodes in parallel.

Node states are never materialised. The contributions of the initial state and of each ancestor decay by sums along the
node's path, so a tree takes two matmuls; one of them reads the state once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmspec.ops import kernels

_LARGE = 2**18
"""Intermediate size, in elements, above which rows are computed one by one."""


def base2(exponent: Tensor) -> Tensor:
    """Convert an exponent of base e to base 2."""
    return exponent * math.log2(math.e)


def log2_decay(dt: Tensor, a: Tensor | float = 1.0) -> Tensor:
    """``dt a`` in base 2, in float64 because differences of large path sums are used; float32 on MPS."""
    return (dt * (a * math.log2(math.e))).to(torch.float32 if dt.device.type == "mps" else torch.float64)


def exp2(exponent: Tensor) -> Tensor:
    """``exp2`` in float32 that flushes values below 2**-100 to zero.

    CPUs are about a hundred times slower on denormals, also in every later product. torch's ``exp`` (MKL) is equally
    slow on denormals and infinities, unlike ``exp2``.
    """
    return torch.nn.functional.threshold(exponent.float(), -100.0, -torch.inf).exp2_()


def check_state(state: Tensor, *shape: int) -> None:
    """Raise ``ValueError`` if recurrent states do not have this shape or are not float32."""
    if state.shape != shape or state.dtype != torch.float32:
        raise ValueError(f"state must be {shape} torch.float32: got {tuple(state.shape)} {state.dtype}")


def in_place(check: Callable[..., None]) -> Callable[..., None]:
    """The check of an operation that updates its second last argument, a state, in place: it must be contiguous."""

    def checked(*args: Tensor) -> None:
        check(*args)
        if not args[-2].is_contiguous():
            raise ValueError(f"state must be contiguous to be updated in place: got strides {args[-2].stride()}")

    return checked


def _check(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *others: Any) -> None:
    batch, nodes, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    if heads % groups:
        raise ValueError(f"groups must divide heads: got {groups} groups of {heads} heads")
    if dt.shape != (batch, nodes, heads):
        raise ValueError(f"dt must be (batch, nodes, heads) {(batch, nodes, heads)}: got {tuple(dt.shape)}")
    check_state(others[-2], batch, heads, head_dim, size)


@kernels.operation(_check)
def tree_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, ancestors: Tensor
) -> Tensor:
    """Selective state space output at every node of a tree.

    With ``a_t = dt a``, M the ancestors, ``L = M a_t``, and S0 the state before the tree:

        y_i = exp(L_i) S0 C_i + sum_j M_ij exp(L_i - L_j) (C_i . B_j) dt_j x_j + D x_i

    Computed in float32 for any input dtype. Nothing of the size of the state is allocated.

    Args:
        x: (batch, nodes, heads, head_dim).
        dt: (batch, nodes, heads) float32, after bias, softplus and limits.
        a: (heads,) float32, negative.
        b, c: (batch, nodes, groups, state); groups divide heads, consecutive heads share a group.
        d: (heads,) or None.
        state: (batch, heads, head_dim, state) float32, before the root; not modified.
        ancestors: (batch, nodes, nodes) bool, [i, j] is True if j is i or an ancestor of i.

    Returns:
        (batch, nodes, heads, head_dim) float32.

    Source: STree (arXiv 2505.14969), section 3; Mamba-2 (arXiv 2405.21060) for the recurrence.
    """
    # Row by row if intermediates exceed the CPU cache.
    batch, nodes, heads, head_dim = x.shape
    rows = 1 if batch * heads * nodes * max(nodes, head_dim) > _LARGE else batch
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    by_row = zip(*(t.split(rows) if rows < batch else (t,) for t in (x, dt, b, c, state, ancestors, y)), strict=True)
    scan = _scan_root if nodes == 1 else _scan_rows
    for x, dt, b, c, state, ancestors, out in by_row:
        scan(x, dt, a, b, c, d, state, ancestors, out)
    return y


@kernels.operation(in_place(_check))
def commit_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along a path, in place.

        S = exp(L_n) S0 + sum_{j on the path} exp(L_n - L_j) dt_j x_j (x) B_j

    Args:
        x, dt, a, b: as for ``tree_scan``.
        state: (batch, heads, head_dim, state) float32, contiguous; updated in place.
        path: (batch, depth) int64, node indices from the root, right-padded with -1. A row of only -1 keeps its state.

    Raises:
        ValueError: the state is not contiguous.

    Source: STree (arXiv 2505.14969); the recurrence unrolled over the path.
    """
    batch, depth = path.shape
    nodes, heads = dt.shape[1:]
    groups, size = b.shape[2:]
    index = (path.clamp(min=0) + nodes * torch.arange(batch, device=path.device)[:, None]).flatten()
    x, dt, b = (t.flatten(0, 1).index_select(0, index).float() for t in (x, dt, b))
    dt = dt.view(batch, depth, heads) * (path >= 0)[..., None]  # padding neither decays nor adds
    reach = log2_decay(dt, a).cumsum(1)
    weight = exp2(reach[:, -1:] - reach).mul_(dt)
    x = (x.view(batch, depth, heads, -1) * weight[..., None]).view(batch, depth, groups, -1)
    b = b.view(batch, depth, groups, size).transpose(1, 2).reshape(batch * groups, depth, size)
    state.mul_(exp2(reach[:, -1])[..., None, None])
    state.view(batch * groups, -1, size).baddbmm_(x.permute(0, 2, 3, 1).reshape(batch * groups, -1, depth), b)


def _scan_rows(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    ancestors: Tensor,
    y: Tensor,
) -> None:
    """``tree_scan`` into ``y``, with two matmuls per head."""
    batch, nodes, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    split = (batch, groups, heads // groups)
    b, c = (t.transpose(1, 2).reshape(batch * groups, nodes, size).float() for t in (b, c))
    dt = dt.transpose(1, 2)  # (batch, heads, nodes)

    reach = log2_decay(dt, a.unsqueeze(1))
    reach = torch.bmm(reach, ancestors.transpose(1, 2).to(reach.dtype))
    exponent = (reach.unsqueeze(3) - (reach - dt.log2()).unsqueeze(2)).float()  # includes the factor dt_j
    # Mask before exp2, which could overflow for non-ancestors.
    weight = exp2(exponent.masked_fill_(~ancestors.unsqueeze(1), -torch.inf))  # (batch, heads, nodes, nodes)
    weight.view(*split, nodes, nodes).mul_(torch.bmm(c, b.transpose(1, 2)).view(batch, groups, 1, nodes, nodes))
    if d is not None:
        weight.diagonal(dim1=2, dim2=3).add_(d.unsqueeze(1))

    before = torch.bmm(c, state.reshape(batch * groups, -1, size).transpose(1, 2)).view(
        batch, groups, nodes, -1, head_dim
    )
    inputs = x.transpose(1, 2).reshape(batch * heads, nodes, head_dim).float()
    within = torch.bmm(weight.view(batch * heads, nodes, nodes), inputs).view(*split, nodes, head_dim)
    decay = exp2(reach).view(*split, nodes, 1)
    # Add, and transpose from heads first to nodes first.
    order = (0, 3, 1, 2, 4)
    out = y.view(batch, nodes, groups, -1, head_dim)
    torch.addcmul(within.permute(order), before.transpose(1, 2), decay.permute(order), out=out)


def _scan_root(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, ancestors: Any, y: Tensor
) -> None:
    """``tree_scan`` of a root-only tree, into ``y``."""
    batch, _, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    split = (batch, groups, heads // groups)
    b, c = (t.reshape(batch * groups, 1, size).float() for t in (b, c))
    out = y.view(*split, head_dim)
    torch.bmm(c, state.reshape(batch * groups, -1, size).transpose(1, 2), out=y.view(batch * groups, 1, -1))
    weight = dt.reshape(split) * torch.bmm(b, c.transpose(1, 2)).view(batch, groups, 1)
    if d is not None:
        weight += d.view(split[1:])
    out.mul_((dt * a).exp_().view(*split, 1)).addcmul_(x.reshape(*split, head_dim).float(), weight.unsqueeze(3))
