"""Kernels that Triton cannot build: the references run in their place, eagerly and where passes are captured."""

import re
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mmspec import TokenTree, ops
from mmspec.cli import info
from mmspec.ops import kernels, verify
from mmspec.ops.graphs import Graphed
from mmspec.ssm import ops as ssm
from tests.mmspec.ops.ops_grid import TREES, check_follow
from tests.ssm.ops_grid import RULES, Case, draw
from tests.tiny import random_tree

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from tests.compiling import Launch, compiled
from tests.fake_cuda import fake_cuda, on_fake_cuda


@pytest.fixture(autouse=True)
def _new_process(monkeypatch):
    monkeypatch.setattr(kernels, "_failed", {})
    monkeypatch.delenv("MMSPEC_KERNELS", raising=False)


@triton.jit
def _misshapen_kernel(x):
    tl.store(x + tl.arange(0, 4), tl.arange(0, 8))


@triton.jit
def _sound_kernel(x):
    tl.store(x, 7)


X = {"x": torch.empty(4, dtype=torch.int32)}


def compile_what_is_wrong(_):
    compiled(Launch(_misshapen_kernel, X, {}), 90)


def compile_without_ptxas(monkeypatch):
    def refused(command, **_):
        raise PermissionError(f"{command[0]} may not run")

    monkeypatch.setattr("triton.backends.nvidia.compiler.subprocess.run", refused)
    compiled(Launch(_sound_kernel, X, {}), 90)


def build_a_launcher_without_compiler(monkeypatch):
    monkeypatch.setenv("CC", "false")
    compile_module_from_src("int nothing;", "nothing")


def launch_with_too_much_memory(_):
    raise OutOfResources(300_000, 232_448, "shared memory")


FAILURES = {
    compile_what_is_wrong: "CompilationError: .*shape",
    compile_without_ptxas: "PermissionError: .*ptxas.* may not run",
    build_a_launcher_without_compiler: "CalledProcessError: Command .*false.* returned non-zero exit status",
    launch_with_too_much_memory: "OutOfResources: out of resource: shared memory, Required: 300000, Hardware limit",
}


@pytest.fixture
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("failure", FAILURES)
def test_the_reference_runs_from_the_first_failure_on(failure, monkeypatch, recwarn):
    tried = []
    monkeypatch.setattr(kernels, "in_use", lambda device: "triton")
    monkeypatch.setattr("mmspec.ops.triton_verify.quantile", lambda *_: tried.append(1) or failure(monkeypatch))
    probs, uniform = torch.rand(3, 9), torch.rand(3)
    for _ in range(3):
        assert torch.equal(ops.quantile(probs, uniform), ops.quantile.__wrapped__(probs, uniform))
    assert len(tried) == 1
    (warned,) = [str(w.message) for w in recwarn if (w.category, w.filename) == (RuntimeWarning, __file__)]
    assert re.match(f"Triton cannot build quantile, plain torch runs instead: {FAILURES[failure]}", warned)
    assert kernels.failed() == {"quantile": warned.partition("instead: ")[2]}
    assert kernels.static_shapes(probs.device)  # as before

    monkeypatch.setattr(info, "_devices", lambda: [{"name": "cuda:0"}])
    assert info._kernels()["cuda:0"] == f"triton; reference for quantile ({kernels.failed()['quantile']})"

    monkeypatch.setenv("MMSPEC_KERNELS", "triton")
    with pytest.raises(Exception, match=FAILURES[failure].partition(": ")[2]):
        ops.quantile(probs, uniform)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("expected something else"),
    ],
)
def test_other_errors_are_raised(error, monkeypatch):
    def launch(*_):
        raise error

    monkeypatch.setattr(kernels, "in_use", lambda device: "triton")
    monkeypatch.setattr("mmspec.ops.triton_verify.quantile", launch)
    with pytest.raises(type(error), match=str(error)):
        ops.quantile(torch.rand(3, 9), torch.rand(3))
    assert not kernels.failed()


@pytest.mark.usefixtures("_own_cache")
def test_errors_of_the_device_are_raised_where_a_kernel_is_loaded(monkeypatch):
    """The kernel is compiled by then; an earlier launch may have caused the error."""
    device = mock.Mock(**{"utils.load_binary.side_effect": RuntimeError("CUDA error: an illegal memory access")})
    monkeypatch.setattr("triton.compiler.compiler.driver", mock.Mock(active=device))
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda _: 1 << 18)
    source = ASTSource(fn=_sound_kernel, signature={"x": "*i32"}, constexprs={})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    monkeypatch.setattr(kernels, "in_use", lambda device: "triton")
    monkeypatch.setattr("mmspec.ops.triton_verify.quantile", lambda *_: built.run)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ops.quantile(torch.rand(3, 9), torch.rand(3))
    device.utils.load_binary.assert_called_once()
    assert not kernels.failed()


# ---------------------------------------------------------------------- every operation


def operations():
    """Each operation with its inputs."""
    g = torch.Generator().manual_seed(0)
    tree = random_tree(g, 2, 9, 50)
    mask, lengths, path = tree.ancestors, torch.tensor([9, 7]), torch.tensor([[0, 1, 3], [0, 2, -1]])
    q, kv = torch.randn(2, 4, 9, 16, generator=g), torch.randn(2, 2, 30, 16, generator=g)
    probs = torch.rand(2, 9, 50, generator=g)
    drawn = TokenTree(tree.tokens, tree.parents, tree.valid, probs.flip(1).softmax(-1), check=False)
    drawn.max_depth = tree.max_depth
    chances, last = torch.rand(2, 2, 9, generator=g)
    places = torch.tensor([[1, 2], [1, 3]])
    rotated = torch.rand(2, 5, 128), tuple(torch.rand(2, 2, 5, 16)), *torch.rand(2, 2, 2, 30, 16), lengths[:1], 0
    scores = torch.rand(2, 5, generator=g).sort(descending=True).values
    tokens = torch.arange(10).view(2, 5)
    found = [
        (ops.tree_attention, (q, kv, kv + 1, lengths, mask)),
        (ops.compact_kv, (torch.randn(6, 2, 2, 30, 16), path, 9, lengths)),
        (ops.top_log_probs, (probs, 4)),
        (ops.next_beam, (scores[:, :1], scores[:, None], tokens[:, None], 3)),
        (ops.keep_best, (tokens[:, 0], tokens, places, 2, scores, 4)),
        (ops.extend_reach, (mask, tokens % 9)),
        (ops.node_inputs, (torch.rand(50, 8), tokens, torch.rand(2, 10, 8), tokens % 9)),
        (ops.write_last, (torch.rand(2, 8), torch.rand(2, 3, 8), lengths // 4)),
        (ops.add_norm, (torch.rand(2, 5, 8), torch.rand(2, 5, 8), torch.rand(8), 1e-5)),
        (ops.rotate_and_cache, rotated),
        (ops.act_and_mul, (torch.rand(2, 5, 8), False)),
        (ops.accepted_path, (tree, tree.tokens)),
        (ops.choose_drawn, (drawn, probs.softmax(-1), chances, last)),
        (ops.tree_ancestors, (tree.parents,)),
        (ops.quantile, (probs, chances)),
    ]
    inputs = draw(Case())
    for rule in RULES:
        values, state = rule.inputs(inputs), rule.state(inputs)
        given = ssm.DepthIndex(inputs.tree.ancestors) if rule.levels else inputs.tree.ancestors
        found.append((getattr(ssm, f"tree_{rule.name}"), (*values, state, given)))
        found.append((getattr(ssm, f"commit_{rule.name}"), (*values[rule.committed], state, inputs.path)))
    window = ssm.conv_window(inputs.tree.parents, 4)
    conv = inputs.channels, inputs.conv_state
    found.append((ssm.tree_conv, (*conv, inputs.weight, inputs.bias, window)))
    found.append((ssm.commit_conv, (*conv, inputs.path)))
    return found


def tensors(*values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def copied(values, copy):
    """Arguments with copies of their tensors, tensors of trees included."""
    kinds = {TokenTree: ("tokens", "parents", "valid", "draft_probs"), ssm.DepthIndex: ("ancestors",)}

    def anew(value):
        if isinstance(value, torch.Tensor):
            return copy(value)
        if isinstance(value, tuple):
            return tuple(map(anew, value))
        if type(value) not in kinds:
            return value
        parts = [getattr(value, name) for name in kinds[type(value)]]
        parts = [None if part is None else copy(part) for part in parts]
        if isinstance(value, TokenTree):
            tree = TokenTree(*parts, check=False)
            tree.max_depth = value.max_depth
            return tree
        return ssm.DepthIndex(*parts)

    return tuple(map(anew, values))


class Failing:
    """In place of launches: they fail, from the first one on or only while a pass is captured."""

    def __init__(self, device, captured):
        self.device, self.captured = device, captured
        with pytest.raises(triton.CompilationError) as failure:
            compile_what_is_wrong(None)
        self.error = failure.value

    def __call__(self, *_, **__):
        if self.device.capturing or not self.captured:
            raise self.error


@pytest.mark.filterwarnings("ignore:Triton cannot build")
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("operation", "inputs"), operations(), ids=lambda value: getattr(value, "__name__", ""))
def test_references_are_captured(operation, inputs, captured, monkeypatch):
    """Without host syncs and copies of the host's numbers, whether kernels fail before the capture or in it."""
    with fake_cuda(monkeypatch) as device:
        monkeypatch.setattr(JITFunction, "run", Failing(device, captured))
        inputs = copied(inputs, on_fake_cuda)
        step = Graphed(lambda _: tuple(tensors(operation(*copied(inputs, lambda x: x)))))
        for called in range(3):
            assert bool(kernels.failed()) == (called > captured)
            step(torch.zeros(1, device="cuda"))
        assert operation.__name__ in kernels.failed()
        assert step.captured == 1
        assert (device.reads, device.copies) == ({}, 0)


@pytest.mark.parametrize("case", TREES, ids=str)
def test_paths_are_followed_without_the_host(case, monkeypatch):
    monkeypatch.setattr(verify, "_path_on_host", verify._path_on_device)
    check_follow(case)
