"""Recurrences and convolutions over trees in torch, against single steps by their definitions."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels
from mmspec.ssm import ops
from mmspec.ssm.ops import scan, selective
from mmspec.ssm.ops.delta import _lineages
from tests.ssm.ops_grid import CASES, CHECKS, RULES, Case, check_commit, check_tree, draw

SCAN, DELTA, KDA, SELECTIVE, LRU = RULES


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")


def by_rule(*rules):
    return pytest.mark.parametrize("rule", rules, ids=lambda rule: rule.name)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trees_and_commits_follow_parents(case, check):
    check(case)


@pytest.mark.parametrize("nodes", [1, 9])
def test_rows_of_a_large_batch_are_computed_one_by_one(nodes, monkeypatch):
    monkeypatch.setattr(scan, "_LARGE", 1)
    check_tree(SCAN, Case(batch=3, nodes=nodes, heads=4, groups=2))


def test_tiles_of_channels(monkeypatch):
    """Several tiles per group, the last narrower."""
    monkeypatch.setattr(selective, "_TILE", (1, 1))
    monkeypatch.setattr(selective, "_NARROWEST", 5)
    case = Case(batch=2, nodes=9, heads=4, groups=2)
    check_tree(SELECTIVE, case)
    check_commit(SELECTIVE, case)


@by_rule(KDA, SELECTIVE, LRU)
def test_with_static_shapes_the_host_does_not_read_the_tree(rule, monkeypatch):
    """Otherwise there are as many levels as the deepest path has nodes."""
    i = draw(Case(nodes=20, batch=3))
    ancestors, depth = i.tree.ancestors, int(i.tree.depth.max()) + 1
    assert len(ops.DepthIndex(ancestors).nodes) == _lineages(ancestors).shape[2] == depth < 20
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    assert len(ops.DepthIndex(ancestors).nodes) == _lineages(ancestors).shape[2] == 20
    check_tree(rule, Case(nodes=20, batch=3))


@by_rule(SCAN, DELTA, KDA)
def test_great_sums_along_a_path_keep_small_differences(rule):
    """Two steps that forget everything come before ones that forget little: the sums differ by a millionth part."""
    i = draw(Case("chain", batch=1, nodes=8, heads=1, strided=False))
    great = torch.tensor([3e4, 2e4, 0.01, 0.02, 0.03, 0.01, 0.02, 0.01])
    i.a.fill_(-1.0)
    values = rule.inputs(i)
    if rule is SCAN:
        i.dt[0, :, 0] = great
    else:
        g = values[3]
        g[0, :, 0] = -great if g.ndim == 3 else -great[:, None]
    parents, state, path = (torch.arange(8) - 1)[None], rule.state(i), torch.arange(8)[None]
    close = dict(rtol=2e-6, atol=0.05 if rule is SCAN else 2e-6)  # D x and dt x reach 1e5
    y = rule.tree(values, state, TokenTree(i.tree.tokens, parents, check=False).ancestors)
    torch.testing.assert_close(y, rule.expected_tree(values, state, parents), **close)
    rule.commit(values, state, path)
    torch.testing.assert_close(state, rule.expected_commit(values, rule.state(i), path), **close)


@by_rule(DELTA, KDA)
def test_equal_keys_and_the_highest_rates(rule):
    """The system's inverse stays small, but not the powers of which a series would consist."""
    i = draw(Case("chain", batch=1, nodes=63, heads=1))
    q, k, v, g, beta = rule.inputs(i)
    values = q, k[:, :1].expand_as(k), v, torch.zeros_like(g), torch.full_like(beta, 2.0)
    parents, state = (torch.arange(63) - 1)[None], rule.state(i)
    y = rule.tree(values, state, TokenTree(i.tree.tokens, parents, check=False).ancestors)
    torch.testing.assert_close(y, rule.expected_tree(values, state, parents), rtol=1e-5, atol=1e-4)


class Allocations(TorchDispatchMode):
    """The greatest size, in elements, of what operations allocate."""

    greatest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = ([x for x in tree_leaves(some) if isinstance(x, Tensor)] for some in ([args, kwargs], result))
        known, made = ([x.untyped_storage() for x in some] for some in tensors)
        places = {one.data_ptr() for one in known}
        self.greatest = max([self.greatest, *(one.nbytes() // 4 for one in made if one.data_ptr() not in places)])
        return result


@pytest.mark.parametrize(
    ("rule", "sizes", "scanned", "committed"),
    [
        (SCAN, {"head_dim": 64}, 16 * 8 * 64, 16 * 8 * 64),
        (DELTA, {"groups": 8, "head_dim": 128}, 2 * 16 * 8 * 128, 16 * 8 * 128),  # keys and queries
        (KDA, {"groups": 8, "head_dim": 128}, 2 * 16 * 8 * 128, 16 * 8 * 128),
        (SELECTIVE, {"groups": 2, "head_dim": 256, "state": 16}, 17 * 512 * 16, 16 * 2048),  # a tile's states
        (LRU, {"head_dim": 64}, 17 * 8 * 64, 16 * 8 * 64),  # outputs
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nothing_of_the_size_of_all_states_is_allocated(rule, sizes, scanned, committed, monkeypatch):
    monkeypatch.setattr(selective, "_TILE", (1, 1))
    i = draw(Case(batch=1, heads=8, strided=False, **{"state": 128, **sizes}))
    values, state = rule.inputs(i), rule.state(i)
    levels = ops.DepthIndex(i.tree.ancestors)
    assert len(levels.slots) == len(levels.sources)  # computed once, for all layers
    with Allocations() as in_scan:
        getattr(ops, f"tree_{rule.name}")(*values, state, levels if rule.levels else i.tree.ancestors)
    with Allocations() as in_commit:
        rule.commit(values, state, i.path)
    assert 0 < in_scan.greatest <= scanned
    assert 0 < in_commit.greatest <= committed


@by_rule(*RULES)
def test_wrong_shapes_are_named(rule):
    i = draw(Case())
    values, state, ancestors = rule.inputs(i), rule.state(i), i.tree.ancestors
    for wrong, received in ((state.bfloat16(), ".* torch.bfloat16"), (state[:, :1], r"\(2, 1.* torch.float32")):
        with pytest.raises(ValueError, match=rf"state must be \(2, .*\) torch.float32: got {received}"):
            rule.tree(values, wrong, ancestors)
    with pytest.raises(ValueError, match="state must be contiguous"):
        rule.commit(values, state.transpose(0, 1).contiguous().transpose(0, 1), i.path)
    for name, place in rule.checked.items():
        narrow = [] if name == "k" else [values[place][..., :1]]  # the width of keys is that of the state
        for part in (values[place][:, :3], *narrow):
            wrong = list(values)
            wrong[place] = part
            with pytest.raises(ValueError, match=rf"{name} must be \(.*\): got \("):
                rule.commit(tuple(wrong), state, i.path)
    if rule in (SCAN, DELTA, SELECTIVE):
        of_groups = 1 if rule is DELTA else 3
        wrong = [*values]
        wrong[of_groups] = wrong[of_groups].repeat(1, 1, 3, 1)
        with pytest.raises(ValueError, match=r"groups must divide \w+: got 3 groups of"):
            rule.tree(tuple(wrong), state, ancestors)


def test_wrong_convolutions_are_named():
    i = draw(Case())
    window = ops.conv_window(i.tree.parents, 4)
    for wrong in (i.conv_state[:, :, :2], i.conv_state[:1], i.conv_state[:, :3]):
        with pytest.raises(ValueError, match=r"of width 4 must be .* 3 or more"):
            ops.tree_conv(i.channels, wrong, i.weight, i.bias, window)
    same = [ops.tree_conv(i.channels, i.conv_state, i.weight, i.bias, window, activation=a) for a in ("silu", "swish")]
    assert torch.equal(*same)
    with pytest.raises(ValueError, match=r"activation must be .* got 'tanh'"):
        ops.tree_conv(i.channels, i.conv_state, i.weight, i.bias, window, activation="tanh")
