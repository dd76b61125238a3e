"""The scan of Mamba-2 over a tree, in closed form: every node at once, no state but the root's.

A node's state is never formed. What it reads from the state before the tree, and from each of its ancestors, is decayed
by sums along its own path, so a tree costs two matrix products, the first of which reads the state once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec import kernels


def tree_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, ancestors: Tensor
) -> Tensor:
    """What the selective state space puts out at every node of a tree.

    With ``a_t = dt a``, M the ancestors, ``L = M a_t``, and S0 the state before the tree:

        y_i = exp(L_i) S0 C_i + sum_j M_ij exp(L_i - L_j) (C_i . B_j) dt_j x_j + D x_i

    Computed in float32 whatever the inputs' precision. Nothing of the size of the state is allocated.

    Args:
        x: (batch, nodes, heads, head_dim).
        dt: (batch, nodes, heads) float32, behind bias, softplus and limits.
        a: (heads,) float32, negative.
        b, c: (batch, nodes, groups, state), groups divide heads; consecutive heads share a group.
        d: (heads,) or None.
        state: (batch, heads, head_dim, state) float32, before the root; only read.
        ancestors: (batch, nodes, nodes) bool, [i, j] is True where j is i or an ancestor of i.

    Returns:
        (batch, nodes, heads, head_dim) float32.

    Source: STree (arXiv 2505.14969), section 3; Mamba-2 (arXiv 2405.21060) for the recurrence.
    """
    _check(x, dt, b, state)
    if kernels.in_use(x.device) == "triton":
        from ssm.ops import triton_scan

        return triton_scan.tree_scan(x, dt, a, b, c, d, state, ancestors)
    batch, nodes, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    per = heads // groups
    b, c = b.float().transpose(1, 2), c.float().transpose(1, 2)  # (batch, groups, nodes, state)
    reach = (ancestors.float() @ (dt * a)).transpose(1, 2)  # (batch, heads, nodes): sums of a_t along each path

    # A node that is no ancestor may lie anywhere: mask before exp, which could overflow.
    weight = (reach[..., :, None] - reach[..., None, :]).masked_fill_(~ancestors[:, None], -torch.inf).exp_()
    weight.unflatten(1, (groups, per)).mul_((c @ b.transpose(2, 3))[:, :, None])
    weight.mul_(dt.transpose(1, 2)[:, :, None, :])  # (batch, heads, nodes, nodes)
    if d is not None:
        weight.diagonal(dim1=2, dim2=3).add_(d[:, None])

    flat = state.reshape(batch * groups, per * head_dim, size)
    y = torch.bmm(c.reshape(batch * groups, nodes, size), flat.transpose(1, 2))
    y = y.view(batch, groups, nodes, per, head_dim).transpose(2, 3).reshape(batch, heads, nodes, head_dim)
    y = y * reach.exp()[..., None] + weight @ x.float().transpose(1, 2)
    return y.transpose(1, 2)


def commit_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """Let the state absorb the nodes of a path, in place.

        S = exp(L_n) S0 + sum_{j on the path} exp(L_n - L_j) dt_j x_j (x) B_j

    Args:
        x, dt, a, b: what ``tree_scan`` was given.
        state: (batch, heads, head_dim, state) float32, contiguous; becomes the state behind each row's path.
        path: (batch, depth) int64, node indices from the root on, padded with -1 at the end. A row of only -1 keeps its
            state.

    Raises:
        ValueError: the state is not contiguous.

    Source: STree (arXiv 2505.14969); the recurrence unrolled over the path.
    """
    _check(x, dt, b, state)
    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous to be updated in place: got strides {state.stride()}")
    if kernels.in_use(x.device) == "triton":
        from ssm.ops import triton_scan

        return triton_scan.commit_scan(x, dt, a, b, state, path)
    batch, depth = path.shape
    groups, size = b.shape[2:]
    row, index = torch.arange(batch, device=x.device)[:, None], path.clamp(min=0)
    dt = dt[row, index] * (path >= 0)[..., None]  # (batch, depth, heads): a padded node neither decays nor adds
    reach = (dt * a).cumsum(1)
    weight = (reach[:, -1:] - reach).exp_().mul_(dt)
    x = (x[row, index].float() * weight[..., None]).view(batch, depth, groups, -1).permute(0, 2, 3, 1)
    b = b[row, index].float().transpose(1, 2)  # (batch, groups, depth, state)
    state.mul_(reach[:, -1].exp()[..., None, None])
    flat = state.view(batch * groups, -1, size)
    flat.baddbmm_(x.reshape(batch * groups, -1, depth), b.reshape(batch * groups, depth, size))


def _check(x: Tensor, dt: Tensor, b: Tensor, state: Tensor) -> None:
    batch, nodes, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    if heads % groups:
        raise ValueError(f"groups must divide heads: got {groups} groups of {heads} heads")
    if dt.shape != (batch, nodes, heads):
        raise ValueError(f"dt must be (batch, nodes, heads) {(batch, nodes, heads)}: got {tuple(dt.shape)}")
    if state.shape != (batch, heads, head_dim, size) or state.dtype != torch.float32:
        expected = (batch, heads, head_dim, size)
        raise ValueError(f"state must be {expected} torch.float32: got {tuple(state.shape)} {state.dtype}")
