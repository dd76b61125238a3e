"""One grid of awkward cases for every implementation of ``mmspec.ssm.ops``, compared with recurrences step by step.

``python -m tests.ssm.ops_grid`` runs it on a CPU with the implementation that ``MMSPEC_KERNELS`` names. The Triton
kernels need ``TRITON_INTERPRET=1`` from the start of the process for that, so tests run them in one of their own.

Papers: Mamba-2 (arXiv 2405.21060), Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692), Mamba (arXiv
2312.00752) and Griffin (arXiv 2402.19427), whose recurrences these are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.tree import TokenTree
from mmspec.ssm import ops
from tests.interpreter import filled_memory, run_grid
from tests.tiny import random_tree, root_path


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        shape: of the trees: random, chain or star.
        batch, nodes: rows are padded behind a random length where there are several.
        heads, groups, head_dim, state: of the mixer; the gated delta rules have keys as wide as ``state``.
        dtype: of inputs and of the convolution's state.
        steep: the greatest ``-dt a``, and ``-g``: from 90 on, exp of a difference between different paths overflows.
        width, entries: taps of the convolution, and what its state keeps.
        skip: whether there is a D, and a bias.
        strided: whether inputs are slices of wider tensors, as those that a mixer splits.
    """

    shape: str = "random"
    batch: int = 2
    nodes: int = 16
    heads: int = 2
    groups: int = 1
    head_dim: int = 16
    state: int = 16
    dtype: torch.dtype = torch.float32
    steep: float = 2.0
    width: int = 4
    entries: int = 4
    skip: bool = True
    strided: bool = True


CASES = [
    Case(nodes=1, batch=1, heads=4, head_dim=64, state=128),
    Case(nodes=1, batch=3, heads=4, groups=2, head_dim=48, state=40, skip=False, entries=3),
    Case("chain", nodes=17, entries=6),
    Case("chain", nodes=63, batch=1, steep=200.0),
    Case("star", nodes=16, batch=1, groups=2, strided=False),
    Case("star", nodes=33, steep=200.0, dtype=torch.bfloat16),
    Case(nodes=3, heads=3, groups=3, head_dim=48, state=40, entries=3),
    Case(nodes=2, batch=1, heads=6, groups=2, head_dim=64, state=16, width=2),
    Case(nodes=63, batch=1, heads=2, head_dim=64, state=128, dtype=torch.bfloat16),
    Case(nodes=64, batch=1, heads=1, head_dim=16, state=128, steep=90.0),
    Case(nodes=70, batch=1, groups=2, width=3, entries=2),
    Case(nodes=20, batch=3, heads=6, groups=2, head_dim=20, state=16, steep=200.0, width=7, entries=6),
    Case(nodes=31, heads=4, groups=1, head_dim=48, state=40, dtype=torch.bfloat16, entries=3, skip=False),
    Case(nodes=5, batch=1, heads=2, head_dim=16, state=256, dtype=torch.float16, width=1),
]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case, under the names of ``mmspec.ssm.ops``; ``path`` has the longest path of a row, but none of
    the second and the beginning of one of the others."""

    tree: TokenTree
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    state: Tensor
    channels: Tensor
    conv_state: Tensor
    weight: Tensor
    bias: Tensor | None
    path: Tensor

    @property
    def scan(self) -> tuple[Tensor | None, ...]:
        return self.x, self.dt, self.a, self.b, self.c, self.d

    @property
    def delta(self) -> tuple[Tensor, ...]:
        """q, k, v, g and beta of the gated delta rule: most decays are weak, rates go up to 2."""
        k, q = (F.normalize(t.float(), dim=-1) for t in (self.b, self.c))
        return q, k, self.x, self.a * self.dt**6, 2 * self.dt.flip(1)

    @property
    def kda(self) -> tuple[Tensor, ...]:
        """The same with keys and queries for each head, and decays that differ by channel."""
        q, k, v, g, beta = self.delta
        each = v.shape[2] // k.shape[2]
        channels = torch.linspace(0.0, 1.0, k.shape[3], device=k.device)
        q, k = (_strided(x.repeat_interleave(each, 2)) for x in (q, k))
        return q, k, v, _strided(g[..., None] * (channels + v[..., :1].float().sigmoid()) / 2), beta

    @property
    def selective(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """x, dt, a, b, c and d of Mamba-1's scan: steps differ by channel, decays by channel and state element."""
        per_head, size = self.x.shape[3], self.b.shape[3]
        x = self.x.flatten(2)
        dt = _strided(self.dt.repeat_interleave(per_head, 2) * x.float().sigmoid())
        a = self.a.repeat_interleave(per_head)[:, None] * torch.linspace(0.01, 1.0, size, device=x.device)
        return x, dt, a, self.b, self.c, None if self.d is None else self.d.repeat_interleave(per_head)

    @property
    def lru(self) -> tuple[Tensor, Tensor]:
        """x and a of the gated linear recurrence: decays differ by channel, and most are weak; the first is 0."""
        x = self.x.flatten(2)
        a = torch.exp(-2 * self.dt.repeat_interleave(self.x.shape[3], 2) ** 6 * x.float().sigmoid()).to(x.dtype)
        a[..., 0] = 0.0
        return x, _strided(a)


def draw(case: Case, device: str = "cpu") -> Inputs:
    """Random inputs. What lies around and between them in memory is NaN."""
    g = torch.Generator().manual_seed(0)
    rows = (case.batch, case.nodes)
    wide = case.heads * case.head_dim + 2 * case.groups * case.state
    channels = torch.randn(*rows, wide, generator=g).to(case.dtype)
    channels = _strided(channels.to(device)) if case.strided else channels.to(device)
    x, b, c = channels.split([case.heads * case.head_dim, *[case.groups * case.state] * 2], dim=-1)
    dt = torch.rand(*rows, case.heads, generator=g).to(device)
    tree = random_tree(g, case.batch, case.nodes, 99, shape=case.shape, ragged=case.batch > 1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return Inputs(
        tree=TokenTree(*(t.to(device) for t in (tree.tokens, tree.parents)), check=False),
        x=x.unflatten(2, (case.heads, case.head_dim)),
        dt=_strided(dt) if case.strided else dt,
        a=(-case.steep * torch.rand(case.heads, generator=g).clamp(min=0.5)).to(device),
        b=b.unflatten(2, (case.groups, case.state)),
        c=c.unflatten(2, (case.groups, case.state)),
        d=numbers(case.heads).to(device) if case.skip else None,
        state=_inside_nan(numbers(case.batch, case.heads, case.head_dim, case.state).to(device)),
        channels=channels,
        conv_state=_inside_nan(numbers(case.batch, wide, case.entries).to(case.dtype).to(device)),
        weight=numbers(wide, case.width).to(case.dtype).to(device),
        bias=numbers(wide).to(case.dtype).to(device) if case.skip else None,
        path=_paths(tree).to(device),
    )


def _paths(tree: TokenTree) -> Tensor:
    """(batch, depth) int64, padded with -1; see ``Inputs``."""
    paths = [root_path(tree, row, int(depth.argmax())) for row, depth in enumerate(tree.depth)]
    paths[1:] = [path[: 2 * place] for place, path in enumerate(paths[1:])]
    return torch.tensor([path + [-1] * (max(map(len, paths)) - len(path)) for path in paths])


Values = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Rule:
    """A recurrence: its operations on a tree and along a path, and one step by its definition.

    Attributes:
        name: of the operations: ``tree_NAME`` and ``commit_NAME``.
        step: state of one row after a node, from the state before and what ``commit_NAME`` is given of the node.
        read: output at a node, from the state after it and what ``tree_NAME`` is given of the node.
        committed: indices of the inputs that ``commit_NAME`` is given.
        constant: indices of the inputs that are not per node.
        levels: whether the tree is given by its levels.
        checked: indices of inputs whose shapes are checked, by the names in messages.
        before: the state before the tree, from a state of (batch, heads, head_dim, state).
    """

    name: str
    step: Callable[..., Tensor]
    read: Callable[..., Tensor]
    committed: slice
    checked: dict[str, int]
    before: Callable[[Tensor], Tensor] = lambda state: state
    constant: tuple[int, ...] = ()
    levels: bool = False

    def inputs(self, i: Inputs) -> Values:
        """What ``tree_NAME`` is given before the state."""
        return getattr(i, self.name)

    def state(self, i: Inputs) -> Tensor:
        """A new copy of the state before the tree."""
        return _inside_nan(self.before(i.state).contiguous())

    def tree(self, values: Values, state: Tensor, ancestors: Tensor) -> Tensor:
        """Outputs at every node."""
        given = ops.DepthIndex(ancestors) if self.levels else ancestors
        return getattr(ops, f"tree_{self.name}")(*values, state, given)

    def commit(self, values: Values, state: Tensor, path: Tensor) -> None:
        """Advance the state along each row's path."""
        getattr(ops, f"commit_{self.name}")(*values[self.committed], state, path)

    def _after(self, values: Values, before: Tensor, row: int, node: int) -> tuple[Tensor, Values]:
        own = [t if t is None or place in self.constant else t[row, node] for place, t in enumerate(values)]
        at = tuple(None if t is None else t.double() for t in own)
        return self.step(before, *at[self.committed]), at

    def expected_tree(self, values: Values, state: Tensor, parents: Tensor) -> Tensor:
        """``tree`` by the definition, in float64: a node starts from its parent's state."""
        rows = []
        for row, above in enumerate(parents.tolist()):
            states, outputs = [], []
            for node, parent in enumerate(above):
                before = state[row].double() if parent < 0 else states[parent]
                after, at = self._after(values, before, row, node)
                states.append(after)
                outputs.append(self.read(after, *at))
            rows.append(torch.stack(outputs))
        return torch.stack(rows).float()

    def expected_commit(self, values: Values, state: Tensor, path: Tensor) -> Tensor:
        """The state after ``commit``, by the definition, in float64."""
        states = list(state.double())
        for row, nodes in enumerate(path.tolist()):
            for node in nodes:
                states[row] = states[row] if node < 0 else self._after(values, states[row], row, node)[0]
        return torch.stack(states).float()


def _each(grouped: Tensor, heads: Tensor) -> Tensor:
    """One entry per head, of which consecutive ones share a group's."""
    return grouped.repeat_interleave(len(heads) // len(grouped), 0)


def _delta_step(s: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    k, s = _each(k, v)[:, :, None], torch.exp(g).view(len(v), -1, 1) * s
    return s + k * (beta[:, None] * (v - (s * k).sum(1)))[:, None]


def _delta_read(s: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return (s * _each(q, v)[:, :, None]).sum(1)


def _scan_read(s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
    each = (len(x), *[1] * (x.ndim - 1))  # heads of channels, or channels
    y = (s * _each(c, x).view(*each, -1)).sum(-1)
    return y if d is None else y + d.view(each) * x


RULES = (
    Rule(
        "scan",
        lambda s, x, dt, a, b: (
            torch.exp(dt * a)[:, None, None] * s + (dt[:, None] * x)[:, :, None] * _each(b, x)[:, None]
        ),
        _scan_read,
        slice(4),
        {"dt": 1},
        constant=(2, 5),
    ),
    Rule("delta", _delta_step, _delta_read, slice(1, 5), {"beta": 4}, lambda state: state.mT),
    Rule("kda", _delta_step, _delta_read, slice(1, 5), {"k": 1, "g": 3, "beta": 4}, lambda state: state.mT),
    Rule(
        "selective",
        lambda s, x, dt, a, b: torch.exp(dt[:, None] * a) * s + (dt * x)[:, None] * _each(b, x),
        _scan_read,
        slice(4),
        {"dt": 1, "a": 2},
        lambda state: state.flatten(1, 2),
        constant=(2, 5),
        levels=True,
    ),
    Rule(
        "lru",
        lambda s, x, a: a * s + x,
        lambda s, x, a: s,
        slice(2),
        {"a": 1},
        lambda state: state.sum(3).flatten(1),
        levels=True,
    ),
)


def check_tree(rule: Rule, case: Case, device: str = "cpu") -> None:
    """Outputs at every node; the state is only read."""
    i = draw(case, device)
    state = rule.state(i)
    with filled_memory():
        y = rule.tree(rule.inputs(i), state, i.tree.ancestors)
    on = _on_cpu(i)
    assert y.dtype == torch.float32
    _close(y, rule.expected_tree(rule.inputs(on), rule.state(on), on.tree.parents), case)
    assert torch.equal(state, rule.state(i))


def check_commit(rule: Rule, case: Case, device: str = "cpu") -> None:
    """The state after a path of each row, the second row having none."""
    i = draw(case, device)
    on, state = _on_cpu(i), rule.state(i)
    rule.commit(rule.inputs(i), state, i.path)
    _close(state, rule.expected_commit(rule.inputs(on), rule.state(on), on.path), case)
    if case.batch > 1:
        assert torch.equal(state[1].cpu(), rule.state(on)[1])


def check_conv(case: Case, device: str = "cpu") -> None:
    """The convolution at every node, with and without its activation; the state is only read."""
    i = draw(case, device)
    on, window = _on_cpu(i), ops.conv_window(i.tree.parents, case.width)
    expected = torch.empty(on.channels.shape)
    for row in range(case.batch):
        for node in range(case.nodes):
            inputs = torch.cat([on.conv_state[row].T, on.channels[row, root_path(on.tree, row, node)]])
            expected[row, node] = (inputs[len(inputs) - case.width :] * on.weight.T.float()).sum(0)
    expected += 0 if on.bias is None else on.bias
    for activation, y in (("silu", F.silu(expected)), (None, expected)):
        with filled_memory():
            found = ops.tree_conv(i.channels, i.conv_state, i.weight, i.bias, window, activation=activation)
        _close(found, y.to(case.dtype), case)
    assert torch.equal(i.conv_state.cpu(), on.conv_state)


def check_conv_commit(case: Case, device: str = "cpu") -> None:
    """The convolution's state after a path of each row: the last inputs."""
    i = draw(case, device)
    on = _on_cpu(i)
    ops.commit_conv(i.channels, i.conv_state, i.path)
    for row, path in enumerate(on.path):
        inputs = torch.cat([on.conv_state[row].T, on.channels[row, path[path >= 0]]])
        assert torch.equal(i.conv_state[row].cpu(), inputs[-case.entries :].T)


CHECKS: dict[str, Callable[..., None]] = {
    **{f"tree {rule.name}": partial(check_tree, rule) for rule in RULES},
    **{f"commit {rule.name}": partial(check_commit, rule) for rule in RULES},
    "tree conv": check_conv,
    "commit conv": check_conv_commit,
}


def _close(found: Tensor, expected: Tensor, case: Case) -> None:
    # Sums have as many terms as the state is wide; what is rounded at the end may be one step apart.
    allowed = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=allowed, atol=allowed * case.state**0.5)


def _on_cpu(i: Inputs) -> Inputs:
    """Copies, so that what is changed in place stays known."""
    copies: dict[str, Any] = {"tree": TokenTree(i.tree.tokens.cpu(), i.tree.parents.cpu(), check=False)}
    for field in fields(i)[1:]:
        value = getattr(i, field.name)
        copies[field.name] = None if value is None else value.cpu().clone()
    return replace(i, **copies)


def _strided(t: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor."""
    wider = t.new_full((*t.shape[:-1], t.shape[-1] + 5), torch.nan)
    wider[..., 3:-2] = t
    return wider[..., 3:-2]


def _inside_nan(t: Tensor) -> Tensor:
    """The same values, contiguous, amid a larger piece of memory."""
    around = t.new_full((t.numel() + 64,), torch.nan)
    around[32:-32] = t.flatten()
    return around[32:-32].view(t.shape)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        from mmspec.ssm.ops import triton_selective

        triton_selective._TREE_TILE = 4096  # the interpreter takes as long for a program of any size
    run_grid({f"{name} {case}": partial(check, case) for case in CASES for name, check in CHECKS.items()})
