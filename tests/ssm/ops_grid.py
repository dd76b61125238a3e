"""One grid of awkward cases for every implementation of ``mmspec.ssm.ops``, compared with loops that follow parents.

``python -m tests.ssm.ops_grid`` runs it on a CPU with the implementation that ``MMSPEC_KERNELS`` names. The Triton
kernels need ``TRITON_INTERPRET=1`` from the start of the process for that, so tests run them in one of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec.core.tree import TokenTree
from mmspec.ssm import ops
from tests.interpreter import mend_interpreter
from tests.ssm import reference
from tests.tiny import random_tree


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
    """The tensors of a case, under the names of ``mmspec.ssm.ops``; ``deepest`` holds the longest path of each row."""

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
    deepest: Tensor

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
    def delta_state(self) -> Tensor:
        """(batch, heads, key_dim, value_dim)"""
        return _inside_nan(self.state.transpose(2, 3).contiguous())

    @property
    def selective(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """x, dt, a, b, c and d of Mamba-1's scan: steps differ by channel, decays by channel and state element."""
        per_head, size = self.x.shape[3], self.b.shape[3]
        x = self.x.flatten(2)
        dt = _strided(self.dt.repeat_interleave(per_head, 2) * x.float().sigmoid())
        a = self.a.repeat_interleave(per_head)[:, None] * torch.linspace(0.01, 1.0, size, device=x.device)
        return x, dt, a, self.b, self.c, None if self.d is None else self.d.repeat_interleave(per_head)

    @property
    def selective_state(self) -> Tensor:
        """(batch, channels, state)"""
        return _inside_nan(self.state.flatten(1, 2))

    @property
    def lru(self) -> tuple[Tensor, Tensor]:
        """x and a of the gated linear recurrence: decays differ by channel, and most are weak; the first is 0."""
        x = self.x.flatten(2)
        a = torch.exp(-2 * self.dt.repeat_interleave(self.x.shape[3], 2) ** 6 * x.float().sigmoid()).to(x.dtype)
        a[..., 0] = 0.0
        return x, _strided(a)

    @property
    def lru_state(self) -> Tensor:
        """(batch, channels)"""
        return _inside_nan(self.state.sum(3).flatten(1))


def draw(case: Case, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random inputs. What lies around and between them in memory is NaN."""
    g = torch.Generator().manual_seed(seed)
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
        deepest=paths_to(tree.parents, tree.depth.argmax(1)).to(device),
    )


def paths_to(parents: Tensor, nodes: Tensor) -> Tensor:
    """(batch, depth) int64: each row's path from its root to a node, padded with -1; -1 as the node: no path."""
    paths = []
    for row, end in enumerate(nodes.tolist()):
        path: list[int] = []
        while end >= 0:
            path.insert(0, end)
            end = int(parents[row, end])
        paths.append(path)
    depth = max(1, *map(len, paths)) if len(paths) > 1 else max(1, len(paths[0]))
    return torch.tensor([path + [-1] * (depth - len(path)) for path in paths])


Values = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Rule:
    """A recurrence: its operations on a tree and along a path, with their references.

    Attributes:
        name: of the operations: ``tree_NAME`` and ``commit_NAME``.
        inputs: what ``tree_NAME`` is given before the state.
        state: a new copy of the state before the tree.
        committed: indices of the inputs that ``commit_NAME`` is given.
        constant: indices of the inputs that are not per node.
        levels: whether the tree is given by its levels.
        dtype: that the reference computes in.
    """

    name: str
    inputs: Callable[[Inputs], Values]
    state: Callable[[Inputs], Tensor]
    committed: slice
    constant: tuple[int, ...] = ()
    levels: bool = False
    dtype: torch.dtype = torch.float64

    def tree(self, values: Values, state: Tensor, ancestors: Tensor) -> Tensor:
        """Outputs at every node."""
        given = ops.depth_index(ancestors) if self.levels else ancestors
        return getattr(ops, f"tree_{self.name}")(*values, state, given)  # type: ignore[no-any-return]

    def commit(self, values: Values, state: Tensor, path: Tensor) -> None:
        """Advance the state along each row's path."""
        getattr(ops, f"commit_{self.name}")(*values[self.committed], state, path)

    def expected_tree(self, values: Values, state: Tensor, parents: Tensor) -> Tensor:
        """``tree`` by the reference."""
        return getattr(reference, f"tree_{self.name}")(*values, state.to(self.dtype), parents).float()  # type: ignore[no-any-return]

    def expected_commit(self, values: Values, state: Tensor, path: Tensor) -> Tensor:
        """The state after ``commit``, by the reference."""
        after = state.to(self.dtype, copy=True)
        getattr(reference, f"commit_{self.name}")(*values[self.committed], after, path)
        return after.float()

    def nodes(self, values: Values, first: int, last: int) -> Values:
        """The inputs of some nodes."""
        return tuple(t if t is None or k in self.constant else t[:, first:last] for k, t in enumerate(values))


RULES = (
    Rule(
        "scan",
        lambda i: (i.x, i.dt, i.a, i.b, i.c, i.d),
        lambda i: _inside_nan(i.state),
        slice(4),
        constant=(2, 5),
        dtype=torch.float32,
    ),
    Rule("delta", lambda i: i.delta, lambda i: i.delta_state, slice(1, 5)),
    Rule("kda", lambda i: i.kda, lambda i: i.delta_state, slice(1, 5)),
    Rule("selective", lambda i: i.selective, lambda i: i.selective_state, slice(4), constant=(2, 5), levels=True),
    Rule("lru", lambda i: i.lru, lambda i: i.lru_state, slice(2), levels=True),
)


def check_tree(rule: Rule, case: Case, device: str = "cpu") -> None:
    """Outputs at every node; the state is only read."""
    i = draw(case, device)
    state = rule.state(i)
    with patch("torch.empty", _nan_filled):
        y = rule.tree(rule.inputs(i), state, i.tree.ancestors)
    on = _on_cpu(i)
    assert y.dtype == torch.float32
    _close(y, rule.expected_tree(rule.inputs(on), rule.state(on), on.tree.parents), case)
    assert torch.equal(state, rule.state(i))


def check_commit(rule: Rule, case: Case, device: str = "cpu") -> None:
    """The state after the deepest path of each row, the second row having none."""
    i, path = _with_path(case, device)
    on, state = _on_cpu(i), rule.state(i)
    rule.commit(rule.inputs(i), state, path)
    _close(state, rule.expected_commit(rule.inputs(on), rule.state(on), path.cpu()), case)
    if case.batch > 1:
        assert torch.equal(state[1].cpu(), rule.state(on)[1])


def check_conv(case: Case, device: str = "cpu") -> None:
    """The convolution at every node, with and without its activation; the state is only read."""
    i = draw(case, device)
    on = _on_cpu(i)
    for options in ({}, {"activation": None}):
        with patch("torch.empty", _nan_filled):
            window = ops.conv_window(i.tree.parents, case.width)
            z = ops.tree_conv(i.channels, i.conv_state, i.weight, i.bias, window, **options)
        conv = (on.channels, on.conv_state, on.weight, on.bias, on.tree.parents)
        _close(z, reference.tree_conv(*conv, **options), case)
    assert torch.equal(i.conv_state.cpu(), on.conv_state)


def check_conv_commit(case: Case, device: str = "cpu") -> None:
    """The convolution's state after the deepest path of each row."""
    i, path = _with_path(case, device)
    on = _on_cpu(i)
    ops.commit_conv(i.channels, i.conv_state, path)
    reference.commit_conv(on.channels, on.conv_state, path.cpu())
    assert torch.equal(i.conv_state.cpu(), on.conv_state)


def _with_path(case: Case, device: str) -> tuple[Inputs, Tensor]:
    i = draw(case, device)
    path = i.deepest.clone()
    if case.batch > 1:
        path[1] = -1
    return i, path


CHECKS: dict[str, Callable[..., None]] = {
    **{f"tree {rule.name}": partial(check_tree, rule) for rule in RULES},
    **{f"commit {rule.name}": partial(check_commit, rule) for rule in RULES},
    "tree conv": check_conv,
    "commit conv": check_conv_commit,
}


def _close(found: Tensor, expected: Tensor, case: Case) -> None:
    # Both sides compute in float32, sums of as many terms as the state is wide; what is rounded at the end may be one
    # step apart.
    allowed = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=allowed, atol=allowed * case.state**0.5)


def _on_cpu(i: Inputs) -> Inputs:
    """Copies, so that what is changed in place stays known."""
    tree = TokenTree(i.tree.tokens.cpu(), i.tree.parents.cpu(), check=False)
    rest = {name: value for name, value in vars(i).items() if name != "tree"}
    return Inputs(tree=tree, **{name: None if t is None else t.detach().cpu().clone() for name, t in rest.items()})


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


_empty = torch.empty


def _nan_filled(*args: object, **options: object) -> Tensor:
    return _empty(*args, **options).fill_(torch.nan)  # type: ignore[call-overload, no-any-return]


class Allocations(TorchDispatchMode):
    """The sizes, in elements, of what operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(values: Any) -> dict[int, Tensor]:
            flat = torch.utils._pytree.tree_leaves(values)
            return {t.untyped_storage().data_ptr(): t for t in flat if isinstance(t, Tensor)}

        result = func(*args, **(kwargs or {}))
        known = storages([args, kwargs])
        self.sizes += [t.untyped_storage().nbytes() // 4 for p, t in storages(result).items() if p not in known]
        return result


def main() -> int:
    """Run the grid, and name what fails."""
    failed = 0
    mend_interpreter()
    if os.environ.get("TRITON_INTERPRET"):
        from mmspec.ssm.ops import triton_selective

        triton_selective._TREE_TILE = 4096  # the interpreter takes as long for a program of any size
    for case in CASES:
        for name, check in CHECKS.items():
            try:
                check(case)
            except Exception as error:  # whatever it is, the other cases say more
                failed += 1
                print(f"{name} {case}:\n{error}\n")
    print(f"{len(CASES) * len(CHECKS) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
