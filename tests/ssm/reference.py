"""Reference implementations of ``mmspec.ssm.ops`` by loops over nodes.

Papers: Mamba-2 (arXiv 2405.21060), Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692), Mamba (arXiv
2312.00752) and Griffin (arXiv 2402.19427), whose recurrences these are; STree (arXiv 2505.14969), which runs the first
over a tree.

    x      (batch, nodes, heads, head_dim)   X, the convolution's output
    dt     (batch, nodes, heads)             Delta, the step sizes, after softplus
    a      (heads,)                          A, one negative number per head
    b, c   (batch, nodes, groups, state)     B and C, one pair for all heads of a group
    d      (heads,)                          D, the skip connection
    state  (batch, heads, head_dim, state)   h, here S: one matrix per head

One step of the recurrence, for one head with A = a:

    S <- exp(dt a) S + dt x (outer product) B
    y  = S C + D x

Gated DeltaNet:

    q, k   (batch, nodes, groups, key_dim)   queries and keys, normalised
    v      (batch, nodes, heads, value_dim)  values
    g      (batch, nodes, heads)             log of the decay alpha
    beta   (batch, nodes, heads)             rates, from 0 to 1, or to 2 where eigenvalues may be negative
    state  (batch, heads, key_dim, value_dim)

    S <- exp(g) S
    S <- S + k (outer product) beta (v - S^T k)
    y  = S^T q

Kimi Delta Attention is the same with a g per key channel, (batch, nodes, heads, key_dim), and is computed by the same
functions. Mamba-1, for one channel with its own decays A = a (state,):

    x, dt  (batch, nodes, channels)          X and Delta
    a      (channels, state)                 A, one negative number per channel and state element
    b, c   (batch, nodes, groups, state)     B and C, one pair for all channels of a group
    d      (channels,)                       D
    state  (batch, channels, state)          h, here S: one vector per channel

    S <- exp(dt a) S + dt x B
    y  = S . C + D x

RG-LRU of Griffin, for one channel:

    x, a   (batch, nodes, channels)          gated and scaled inputs, and decays
    state  (batch, channels)                 h, here S: one number per channel

    S <- a S + x
    y  = S

All but the first compute in the dtype of the state, float64 included.

Every node's state is materialised: a node starts from a copy of its parent's state, the root from the state before the
tree. Signatures are those of ``mmspec.ssm.ops``, with ``parents`` (batch, nodes), -1 at the root, instead of
``ancestors`` and ``window``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor


def tree_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, parents: Tensor
) -> Tensor:
    """Output at every node, (batch, nodes, heads, head_dim) float32."""
    y = torch.empty(x.shape)
    for row, node, head, after in _states(partial(_step, x, dt, a, b), state, parents):
        y[row, node, head] = after @ c[row, node, _group(head, x, c)].float()
        if d is not None:
            y[row, node, head] += d[head] * x[row, node, head].float()
    return y


def commit_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along each row's path, in place."""
    _advance(partial(_step, x, dt, a, b), state, path)


def tree_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor) -> Tensor:
    """Output at every node, (batch, nodes, heads, value_dim), in the dtype of the state."""
    y = torch.empty(v.shape, dtype=state.dtype)
    for row, node, head, after in _states(partial(_corrected, k, v, g, beta), state, parents):
        y[row, node, head] = q[row, node, _group(head, v, q)].to(state.dtype) @ after
    return y


def commit_delta(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along each row's path, in place."""
    _advance(partial(_corrected, k, v, g, beta), state, path)


tree_kda, commit_kda = tree_delta, commit_delta


def tree_selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, parents: Tensor
) -> Tensor:
    """Output at every node, (batch, nodes, channels), in the dtype of the state."""
    y = torch.empty(x.shape, dtype=state.dtype)
    for row, node, channel, after in _states(partial(_selected, x, dt, a, b), state, parents):
        y[row, node, channel] = after @ c[row, node, _group(channel, x, c)].to(state.dtype)
        if d is not None:
            y[row, node, channel] += d[channel] * x[row, node, channel].to(state.dtype)
    return y


def commit_selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along each row's path, in place."""
    _advance(partial(_selected, x, dt, a, b), state, path)


def tree_lru(x: Tensor, a: Tensor, state: Tensor, parents: Tensor) -> Tensor:
    """State at every node, (batch, nodes, channels), in the dtype of the state."""
    y = torch.empty(x.shape, dtype=state.dtype)
    for row, node, channel, after in _states(partial(_gated, x, a), state, parents):
        y[row, node, channel] = after
    return y


def commit_lru(x: Tensor, a: Tensor, state: Tensor, path: Tensor) -> None:
    """Advance the state along each row's path, in place."""
    _advance(partial(_gated, x, a), state, path)


def tree_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, parents: Tensor, activation: str | None = "silu"
) -> Tensor:
    """Causal convolution at every node, (batch, nodes, channels); the state precedes the root."""
    y = torch.empty(x.shape, dtype=torch.float32)
    for row in range(x.shape[0]):
        for node in range(x.shape[1]):
            inputs: list[Tensor] = []
            at = node
            while at >= 0:
                inputs.insert(0, x[row, at])
                at = int(parents[row, at])
            inputs = [*state[row].unbind(1), *inputs][-weight.shape[1] :]
            y[row, node] = sum(weight[:, tap].float() * value for tap, value in enumerate(inputs))
            if bias is not None:
                y[row, node] += bias
    return (torch.nn.functional.silu(y) if activation else y).to(x.dtype)


def commit_conv(x: Tensor, state: Tensor, path: Tensor) -> None:
    """Shift the inputs along each row's path into the state, one by one."""
    for row in range(x.shape[0]):
        for node in path[row].tolist():
            if node >= 0:
                state[row] = torch.cat([state[row, :, 1:], x[row, node, :, None].to(state.dtype)], dim=1)


_Recurrence = Callable[[Tensor, int, int, int], Tensor]
"""State of a head, or channel, after a node: from the state before it, and the row, node and head."""


def _states(recurrence: _Recurrence, state: Tensor, parents: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yields row, node, head and the head's state after the node, for all nodes of a tree."""
    for row, head in product(*map(range, state.shape[:2])):
        states: list[Tensor] = []
        for node, parent in enumerate(parents[row].tolist()):
            before = state[row, head] if parent < 0 else states[parent]
            states.append(recurrence(before, row, node, head))
            yield row, node, head, states[node]


def _advance(recurrence: _Recurrence, state: Tensor, path: Tensor) -> None:
    """Advance the state of every head along each row's path, in place."""
    for row, head in product(*map(range, state.shape[:2])):
        for node in path[row].tolist():
            if node >= 0:
                state[row, head] = recurrence(state[row, head], row, node, head)


def _step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, before: Tensor, row: int, node: int, head: int) -> Tensor:
    """One head's state after a node, (head_dim, state)."""
    step = dt[row, node, head]
    entering = step * torch.outer(x[row, node, head].float(), b[row, node, _group(head, x, b)].float())
    return torch.exp(step * a[head]) * before + entering


def _corrected(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, before: Tensor, row: int, node: int, head: int) -> Tensor:
    """One head's state after a node, (key_dim, value_dim)."""
    key, value, rate, decay = (
        x.to(before.dtype)
        for x in (k[row, node, _group(head, v, k)], v[row, node, head], beta[row, node, head], g[row, node, head])
    )
    decayed = torch.exp(decay).view(-1, 1) * before
    return decayed + torch.outer(key, rate * (value - key @ decayed))


def _selected(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, before: Tensor, row: int, node: int, channel: int) -> Tensor:
    """One channel's state after a node, (state,)."""
    step = dt[row, node, channel].to(before.dtype)
    entering = x[row, node, channel].to(before.dtype) * b[row, node, _group(channel, x, b)].to(before.dtype)
    return torch.exp(step * a[channel].to(before.dtype)) * before + step * entering


def _gated(x: Tensor, a: Tensor, before: Tensor, row: int, node: int, channel: int) -> Tensor:
    """One channel's state after a node, ()."""
    return a[row, node, channel].to(before.dtype) * before + x[row, node, channel].to(before.dtype)


def _group(head: int, x: Tensor, b: Tensor) -> int:
    """Consecutive heads share a group."""
    return head // (x.shape[2] // b.shape[2])
