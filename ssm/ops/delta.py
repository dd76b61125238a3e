"""Gated delta rules of Gated DeltaNet and Kimi Delta Attention (KDA) over a tree, all nodes in parallel.

A step of the recurrence corrects the state's value for a key: it reads the decayed state and writes a rank-1 update.
Node states are never materialised. The updates of all nodes are the solution of one unit-triangular system per head,
which reads the initial state once.

KDA's decays differ by key channel: products of keys include the decay between their nodes, so one matmul is not enough.
They are computed generation by generation: every node with itself, its parent, its grandparent, and so on. Decays are
sums over the nodes in between, which neither cancel nor overflow, so float32 suffices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.ops import kernels
from mmspec.ssm.ops.scan import base2, check_state, exp2, in_place, log2_decay


def _check(*args: Tensor) -> None:
    """Check shapes of all arguments but the queries, and ancestors or path, the last argument."""
    k, v, g, beta, state, _ = args[-6:]
    _check_shapes(k, v, state, g=g, beta=beta)


def _check_channels(*args: Tensor) -> None:
    k, v, g, beta, state, _ = args[-6:]
    _check_shapes(k, v, state, beta=beta)
    expected = (*beta.shape, state.shape[2])
    for name, x in (("k", k), ("g", g)):
        if x.shape != expected:
            raise ValueError(f"{name} must be (batch, nodes, heads, key_dim) {expected}: got {tuple(x.shape)}")


def _check_shapes(k: Tensor, v: Tensor, state: Tensor, **gates: Tensor) -> None:
    batch, nodes, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    if heads % groups:
        raise ValueError(f"groups must divide heads: got {groups} groups of {heads} heads")
    for name, gate in gates.items():
        if gate.shape != (batch, nodes, heads):
            raise ValueError(f"{name} must be (batch, nodes, heads) {(batch, nodes, heads)}: got {tuple(gate.shape)}")
    check_state(state, batch, heads, key_dim, value_dim)


@kernels.operation(_check)
def tree_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor) -> Tensor:
    """Output of the gated delta rule at every node of a tree.

    With M the ancestors, ``G = M g``, ``D_ij = M_ij exp(G_i - G_j)``, and S0 the state before the tree, the updates U
    solve the first equation, in which ``L_ij = beta_i D_ij (k_i . k_j)`` for i != j:

        (I + L) U = diag(beta) (V - exp(G) K S0)
        Y = exp(G) Q S0 + (D * Q K^T) U

    Computed in float32 for any input dtype. Nothing of the size of the state is allocated.

    Args:
        q, k: (batch, nodes, groups, key_dim), keys L2-normalised; groups divide heads, consecutive heads share a group.
        v: (batch, nodes, heads, value_dim).
        g: (batch, nodes, heads) float32, log decays, not positive.
        beta: (batch, nodes, heads) float32, rates.
        state: (batch, heads, key_dim, value_dim) float32, before the root; not modified.
        ancestors: (batch, nodes, nodes) bool, [i, j] is True if j is i or an ancestor of i.

    Returns:
        (batch, nodes, heads, value_dim) float32.

    Source: Gated DeltaNet (arXiv 2412.06464), section 3, with the mask of a tree instead of a chain.
    """
    batch, nodes, heads = g.shape
    keys, queries, values = (_heads_first(x, heads) for x in (k, q, v))
    both = torch.cat([keys, queries], dim=1)
    reach = log2_decay(g).transpose(1, 2)
    if nodes > 1:
        reach = torch.bmm(reach, ancestors.transpose(1, 2).to(reach.dtype))
    decay = exp2(reach).reshape(batch * heads, nodes, 1)
    read = _read(both, state)
    updates = torch.addcmul(values, read[:, :nodes], decay, value=-1).mul_(_scalars(beta))
    overlap = torch.bmm(both, keys.transpose(1, 2))
    if nodes > 1:
        within = _decays(reach, ancestors)
        overlap.view(batch * heads, 2, nodes, nodes).mul_(within.unsqueeze(1))
        updates = _solve(overlap[:, :nodes], _scalars(beta), updates)
    y = (read[:, nodes:] * decay).baddbmm_(overlap[:, nodes:], updates)
    return y.view(batch, heads, nodes, -1).transpose(1, 2)


@kernels.operation(in_place(_check))
def commit_delta(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along a path, in place; arguments as for ``tree_delta``, path and errors as for
    ``commit_scan``. Source: Gated DeltaNet (arXiv 2412.06464), section 3.

        S = exp(G_n) S0 + sum_{j on the path} exp(G_n - G_j) k_j (x) u_j
    """
    (batch, depth), heads = path.shape, g.shape[2]
    row = torch.arange(batch, device=path.device)[:, None]
    k, v, g, beta = (x[row, path.clamp(min=0)] for x in (k, v, g, beta))
    g, beta = (x * (path >= 0)[..., None] for x in (g, beta))  # padding neither decays nor updates
    keys, values = _heads_first(k, heads), _heads_first(v, heads)
    reach = log2_decay(g).cumsum(1).transpose(1, 2)
    decay = exp2(reach).reshape(batch * heads, depth, 1)
    updates = torch.addcmul(values, _read(keys, state), decay, value=-1).mul_(_scalars(beta))
    if depth > 1:
        chain = torch.ones(1, depth, depth, dtype=torch.bool, device=path.device).tril()
        overlap = torch.bmm(keys, keys.transpose(1, 2)).mul_(_decays(reach, chain))
        updates = _solve(overlap, _scalars(beta), updates)
    keys = keys * exp2(reach[:, :, -1:] - reach).reshape(batch * heads, depth, 1)
    state.view(batch * heads, *state.shape[2:]).mul_(decay[:, -1:]).baddbmm_(keys.transpose(1, 2), updates)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """(batch, nodes, groups, dim) -> (batch * heads, nodes, dim) float32."""
    x = x.transpose(1, 2).float()
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)).flatten(0, 1)


def _scalars(x: Tensor) -> Tensor:
    """(batch, nodes, heads) -> (batch * heads, nodes, 1)"""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def _read(rows: Tensor, state: Tensor) -> Tensor:
    """(batch * heads, rows, key_dim) times the state; by sequence, as a layer's states are not contiguous."""
    return torch.cat([torch.bmm(x, s) for x, s in zip(rows.view(len(state), -1, *rows.shape[1:]), state, strict=True)])


def _decays(reach: Tensor, ancestors: Tensor) -> Tensor:
    """Decay from node j to node i, (batch * heads, nodes, nodes) [i, j]; 0 if j is not an ancestor."""
    # Mask before exp2, which could overflow for non-ancestors.
    exponent = (reach.unsqueeze(3) - reach.unsqueeze(2)).float()
    return exp2(exponent.masked_fill(~ancestors.unsqueeze(1), -torch.inf)).flatten(0, 1)


def _solve(overlap: Tensor, beta: Tensor, right: Tensor) -> Tensor:
    """Solve for the updates; only entries of ``overlap`` below the diagonal are read."""
    # Transposed because the library is column-major: several times faster than with copies.
    return torch.linalg.solve_triangular((overlap * beta).mT, right.mT, upper=True, left=False, unitriangular=True).mT


@kernels.operation(_check_channels)
def tree_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor) -> Tensor:
    """Output of KDA at every node of a tree.

    With M the ancestors, ``G = M g``, d a key channel, and S0 the state before the tree, the updates U solve the first
    equation, in which L has the entries for i != j:

        (I + L) U = diag(beta) (V - (exp(G) * K) S0),  L_ij = beta_i M_ij sum_d k_id k_jd exp(G_id - G_jd)
        Y = (exp(G) * Q) S0 + W U,                     W_ij = M_ij sum_d q_id k_jd exp(G_id - G_jd)

    Arguments and result are as for ``tree_delta``, but ``g`` is (batch, nodes, heads, key_dim), and queries and keys
    have as many heads as values. Source: Kimi Linear (arXiv 2510.26692), section 3, with the mask of a tree.
    """
    batch, nodes, heads = beta.shape
    start, overlap = _overlaps((k.float(), q.float()), k, g, _lineages(ancestors))
    both = torch.cat([_heads_first(x * start, heads) for x in (k, q)], dim=1)
    before = _read(both, state)
    updates = torch.sub(_heads_first(v, heads), before[:, :nodes]).mul_(_scalars(beta))
    if nodes > 1:
        updates = _solve(overlap[0], _scalars(beta), updates)
    y = before[:, nodes:].baddbmm(overlap[1], updates)
    return y.view(batch, heads, nodes, -1).transpose(1, 2)


@kernels.operation(in_place(_check_channels))
def commit_kda(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along a path, in place; arguments and errors as for ``commit_delta``, with ``k`` and ``g`` as
    for ``tree_kda``. Source: Kimi Linear (arXiv 2510.26692), section 3.

        S = exp(G_n) * S0 + sum_{j on the path} (exp(G_n - G_j) * k_j) (x) u_j
    """
    (batch, depth), heads = path.shape, beta.shape[2]
    row, index = torch.arange(batch, device=path.device)[:, None], torch.arange(depth, device=path.device)
    k, v, g, beta = (x[row, path.clamp(min=0)].float() for x in (k, v, g, beta))
    live = (path >= 0)[..., None]
    g, beta = g * live[..., None], beta * live  # padding neither decays nor updates
    lineages = (index[:, None] - index).clamp(min=-1).expand(batch, -1, -1)
    start, overlap = _overlaps((k,), k, g, lineages)
    updates = torch.sub(_heads_first(v, heads), _read(_heads_first(k * start, heads), state)).mul_(_scalars(beta))
    if depth > 1:
        updates = _solve(overlap[0], _scalars(beta), updates)
    later = base2(F.pad(g[:, 1:], (0, 0, 0, 0, 0, 1))).flip(1).cumsum(1).flip(1)
    keys = _heads_first(k * exp2(later), heads)
    decay = _heads_first(start[:, -1:], heads).transpose(1, 2)
    state.view(batch * heads, *state.shape[2:]).mul_(decay).baddbmm_(keys.transpose(1, 2), updates)


def _lineages(ancestors: Tensor) -> Tensor:
    """(batch, nodes, generations) int64: each node, its parent, and so on to the root, padded with -1."""
    nodes = ancestors.shape[1]
    fixed = kernels.static_shapes(ancestors.device)
    generations = nodes if fixed or nodes == 1 else int(ancestors.sum(-1).max())
    index = torch.where(ancestors, torch.arange(nodes, device=ancestors.device), -1)
    return index.sort(-1, descending=True).values[..., :generations]


def _overlaps(rows: tuple[Tensor, ...], k: Tensor, g: Tensor, lineages: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Decays from the initial state, and products of each node's rows with the decayed keys of its ancestors.

    Args:
        rows: (batch, nodes, heads, key_dim) float32 each.

    Returns:
        (batch, nodes, heads, key_dim), and (batch * heads, nodes, nodes) [i, j] for each of ``rows``, 0 if j is not an
        ancestor of i.
    """
    (batch, nodes, heads, _), g = g.shape, base2(g)
    row = torch.arange(batch, device=g.device)[:, None]
    reach, products = torch.zeros_like(g), []
    for at in lineages.unbind(2):
        live, at = (at >= 0)[..., None, None], at.clamp(min=0)
        decayed = k[row, at] * exp2(reach).mul_(live)
        products.append(torch.stack([(decayed * x).sum(-1) for x in rows]))
        reach += g[row, at] * live
    index = lineages.clamp(min=0)[None, :, None].expand(len(rows), -1, heads, -1, -1)
    overlaps = torch.stack(products, dim=-1).transpose(2, 3)  # (rows, batch, heads, nodes, generations)
    overlap = overlaps.new_zeros(*overlaps.shape[:4], nodes).scatter_add_(4, index, overlaps)
    return exp2(reach), overlap.view(len(rows), batch * heads, nodes, nodes).unbind()
