"""The Triton kernels: through the interpreter, compiled without a GPU, and on one."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from mmspec import TokenTree, ops
from tests.mmspec.ops import ops_grid
from tests.process import run
from tests.ssm import ops_grid as ssm_grid
from tests.tiny import random_tree
from tests.tiny.configs import REFUSED

pytest.importorskip("triton")
from mmspec.ops import triton_attention
from tests.compiling import SHARED, Launch, compiled, launches

INTERPRETED = {"TRITON_INTERPRET": "1", "MMSPEC_KERNELS": "triton"}
LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.long
@pytest.mark.parametrize("grid", [ops_grid, ssm_grid], ids=lambda grid: grid.__name__)
def test_interpreted_kernels_agree_with_loops(grid):
    assert run(grid.__name__, **INTERPRETED).splitlines()[-1].endswith(" passed, 0 failed")


@pytest.mark.long
def test_interpreted_kernels_say_what_generate_says():
    """Whole answers: every pass of the target, and of the drafter, goes through the kernels."""
    llava, *hybrids = run("tests.mmspec.ops.interpreted", **INTERPRETED).splitlines()
    greedy = sorted({*ops.__all__} - {"Beam", "choose_drawn", "greedy", "quantile", "sample"})
    assert [part.split("=")[0] for part in llava.split()] == ["llava", *greedy]
    operations = {
        "bamba": ("conv", "scan"),
        "olmo_hybrid": ("conv", "delta"),
        "jamba": ("conv", "selective"),
        "minimax": ("scan",),
        "recurrent_gemma": ("conv", "lru"),
    }
    expected = [(model, names) for model, names in operations.items() if model not in REFUSED]
    for hybrid, (model, names) in zip(hybrids, expected, strict=True):
        own = [f"{part}_{name}" for part in ("commit", "tree") for name in names]
        ran = sorted([*own, "compact_kv", "accepted_path", "tree_ancestors", "tree_attention"])
        assert [part.split("=")[0] for part in hybrid.split()] == [model, *ran]


def attention(
    rows: int, head_dim: int, value_dim: int | None = None, dtype: torch.dtype = LOW, slots: int = 2048, **options: int
) -> Callable[[], object]:
    """Attention of as many rows of queries for each of two KV heads; fewer than 128 slots are not split."""
    group = 4 if rows % 4 == 0 else 1
    nodes = rows // group
    query = torch.empty(1, 2 * group, nodes, head_dim, dtype=dtype)
    key, value = (torch.empty(1, 2, slots, width, dtype=dtype) for width in (head_dim, value_dim or head_dim))
    mask, depth = torch.ones(1, nodes, nodes, dtype=torch.bool), torch.zeros(1, nodes, dtype=torch.long)
    given = query, key, value, torch.tensor([9]), mask
    return lambda: ops.tree_attention(*given, start=torch.tensor([9]), depth=depth, **options)


def attentions() -> list[Callable[[], object]]:
    """At the shapes of 1B, 7B and 8B models and of latent attention (DeepSeek V2 and V3, MiniCPM3), of one node and of
    60, and at those that take most."""
    groups = [(rows, slots) for rows in (1, 60, 240) for slots in (2048, 100)]
    return [
        *(attention(rows, 128, slots=slots) for rows, slots in groups),
        *(attention(rows, 64) for rows in (8, 480)),
        attention(60, 96, window=100),
        *(attention(60, head_dim, dtype=FULL) for head_dim in (64, 80, 256)),
        *(attention(rows, 192, 128, slots=slots) for rows, slots in groups),
        attention(60, 96, 64),
        attention(60, 192, 128, FULL),
    ]


def between(
    hidden: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    dtype: torch.dtype = LOW,
    head_dim: int = 128,
    plus: float = 0.0,
) -> list[Callable[[], object]]:
    """Operations between the matrix products of a layer; ``plus`` is that of Gemma 3, with all of its norms."""
    x, weight = torch.empty(1, 16, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    qkv = torch.empty(1, 16, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    rotation = torch.empty(2, 1, 16, head_dim, dtype=dtype)
    keys, values = torch.empty(2, 1, kv_heads, 2048, head_dim, dtype=dtype)
    norms = tuple(torch.empty(2, head_dim, dtype=dtype)) if plus else ()
    return [
        lambda: ops.add_norm(x, None, weight, 1e-5, plus),
        lambda: ops.add_norm(x, x, weight, 1e-5, plus, weight if plus else None),
        lambda: ops.rotate_and_cache(qkv, tuple(rotation), keys, values, torch.tensor([9]), 0, norms, 1e-5, plus),
        lambda: ops.act_and_mul(torch.empty(1, 16, 2 * mlp, dtype=dtype), bool(plus)),
    ]


def operations() -> list[Callable[[], object]]:
    """Every operation at the shapes of 7B and 8B models, an 8B hybrid, Qwen3-Next, Kimi-Linear, MiniMax, Falcon-Mamba
    and RecurrentGemma, with trees of 16, 32 and 64 nodes, and at those that take most."""
    tree = random_tree(torch.Generator().manual_seed(0), 2, 60, 99)
    assert tree.max_depth  # known before nothing is computed
    probs, choices, vocab = torch.rand(2, 60, 5000), torch.zeros(2, 60, dtype=torch.long), 256_000
    bare = TokenTree(tree.tokens, tree.parents, None, probs, check=False)
    path, draws = torch.zeros(2, 16, dtype=torch.long), torch.rand(2, 60)
    storage, mask = torch.empty(4, 2, 8, 100, 80, dtype=LOW), torch.ones(2, 10, 30, dtype=torch.bool)
    origin = torch.zeros(2, 10, dtype=torch.long)
    found = [
        *(attention(60, 128), attention(240, 128, slots=100), attention(60, 192, 128), attention(60, 128, dtype=FULL)),
        attention(240, 256, dtype=torch.float16, softcap=5.0, window=100),
        *between(4096, 32, 8, 14336),
        *between(4096, 32, 32, 11008, torch.float16),
        *between(3584, 28, 4, 18944, FULL),
        *between(2560, 8, 4, 10240, head_dim=256, plus=1.0),
        lambda: ops.accepted_path(tree, choices),
        lambda: ops.tree_ancestors(tree.parents),
        lambda: ops.choose_drawn(bare, probs, draws, draws),
        lambda: ops.quantile(torch.empty(1, 1, vocab), torch.rand(1, 1)),
        lambda: ops.compact_kv(storage, path, torch.tensor([9]), torch.tensor([9, 9])),
        lambda: ops.top_log_probs(torch.empty(2, vocab, dtype=LOW), 10),
        *(
            lambda above=above: ops.next_beam(above, torch.rand(2, 10, 10), torch.zeros(2, 10, 10).long(), 10, 11)
            for above in (None, torch.rand(2, 10))
        ),
        *(
            lambda places=places: ops.keep_best(choices[:, 0], choices, places, 10, draws, 59)
            for places in (None, torch.zeros(2, 5).long())
        ),
        lambda: ops.extend_reach(mask, origin),
        *(
            lambda ids=ids: ops.node_inputs(storage[0, 0, 0], origin, torch.empty(2, 10, 4096, dtype=LOW), origin, ids)
            for ids in (None, torch.arange(99))
        ),
        lambda: ops.write_last(torch.empty(2, 4096, dtype=LOW), torch.empty(2, 9, 4096, dtype=LOW), path[:, 0]),
    ]
    cases = [{"nodes": nodes, "dtype": LOW} for nodes in (1, 16, 32, 64, 100)]
    for case in (*cases, {"nodes": 32}, {"nodes": 32, "dtype": LOW, "skip": False}):
        wide = ssm_grid.draw(ssm_grid.Case(batch=1, heads=16, groups=8, head_dim=64, state=128, strided=False, **case))
        narrow = ssm_grid.draw(ssm_grid.Case(batch=1, heads=16, head_dim=64, state=16, strided=False, **case))
        for rule in ssm_grid.RULES:
            i = narrow if rule.levels else wide
            found += [
                lambda rule=rule, i=i: rule.tree(rule.inputs(i), rule.state(i), i.tree.ancestors),
                lambda rule=rule, i=i: rule.commit(rule.inputs(i), rule.state(i), i.path),
            ]
        found += [
            lambda i=wide: ssm_grid.ops.tree_conv(
                i.channels, i.conv_state, i.weight, i.bias, ssm_grid.ops.conv_window(i.tree.parents, 4)
            ),
            lambda i=wide: ssm_grid.ops.commit_conv(i.channels, i.conv_state, i.path),
        ]
    return found


def check_compiled(capability: int, ran: list[Callable[[], object]]) -> set[str]:
    """Compile what operations launch; returns the names of kernels.

    Programs fit into the memory of a processor, and into its registers, or nearly so: what does not goes to slower
    memory. Releases of Triton differ by some registers.
    """
    device = triton_attention._Device(132, SHARED[capability])
    with patch.object(triton_attention, "_device", lambda *_: device):
        programs: dict[str, Launch] = {}
        for one in (launch for operation in ran for launch in launches(operation)):
            programs.setdefault(f"{one.kernel.__name__} {one.signature()} {one.options}", one)
    names = set()
    for launch in programs.values():
        entry = compiled(launch, capability)
        name, of_scan = entry["kernel"], ".ssm." in launch.kernel.__module__
        names.add(name)
        assert entry["ptx"], entry
        assert entry["cubin"], entry
        # Little enough for recurrences that several programs run at a time (Triton 3.8 takes most: 24,576 bytes).
        assert entry["shared"] <= (25_000 if of_scan else SHARED[capability]), entry
        # The oldest has no tensor cores that read shared memory.
        spilt = {80: 300}.get(capability, 160)
        assert entry["stack"] <= (spilt if name == "_attend_kernel" else 64), entry
        # Without loads ahead of their use, attention and scans would wait for memory at every tile.
        if name in ("_attend_kernel", "_tree_scan_kernel", "_tree_delta_kernel"):
            assert entry["ahead"], entry
        # Attention takes 32-bit products within one row's queries only, which are few.
        assert of_scan or name == "_attend_kernel" or not entry["narrow"], entry
    return names


@pytest.fixture
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.long
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_a_gpu(capability):
    of_step = ("attend", "merge", "path", "choose", "sum", "quantile", "compact", "rank", "top", "beam", "keep")
    of_step += ("ancestors", "norm", "rotate", "gate", "reach", "inputs", "last")
    rules = ("scan", "delta", "selective", "lru", "conv")
    names = {f"_{name}_kernel" for name in (*of_step, "overlap_kda")}
    names |= {f"_{part}_{rule}_kernel" for part in ("tree", "commit") for rule in rules}
    assert check_compiled(capability, operations()) == names


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_attention_fits_at_many_shapes(capability):
    assert check_compiled(capability, attentions()) == {"_attend_kernel", "_merge_kernel"}


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("check", ops_grid.CHECKS.values(), ids=ops_grid.CHECKS)
def test_on_a_gpu(check, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    check(device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("case", ssm_grid.CASES, ids=str)
@pytest.mark.parametrize("check", ssm_grid.CHECKS.values(), ids=ssm_grid.CHECKS)
def test_recurrences_on_a_gpu(check, case, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    check(case, "cuda")
