"""The Triton kernels of a step: through the interpreter, compiled without a GPU, and on one."""

import json

import pytest

from tests.mmspec.ops.ops_grid import CHECKS, name
from tests.process import run
from tests.tiny.configs import REFUSED

pytest.importorskip("triton")
from tests.compiling import SHARED


@pytest.mark.long
def test_interpreted_kernels_agree_with_loops():
    out = run("tests.mmspec.ops.ops_grid", TRITON_INTERPRET="1", MMSPEC_KERNELS="triton")
    assert out.splitlines()[-1] == f"{len(CHECKS)} passed, 0 failed"


@pytest.mark.long
def test_interpreted_kernels_say_what_generate_says():
    """Whole answers: every pass of the target, and of the drafter, goes through the kernels."""
    llava, *hybrids = run("tests.mmspec.ops.interpreted", TRITON_INTERPRET="1", MMSPEC_KERNELS="triton").splitlines()
    assert [part.split("=")[0] for part in llava.split()] == [
        "llava",
        "accepted_path",
        "compact_kv",
        "keep_best",
        "next_beam",
        "top_log_probs",
        "tree_attention",
    ]
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
        ran = sorted([*own, "compact_kv", "accepted_path", "tree_attention"])
        assert [part.split("=")[0] for part in hybrid.split()] == [model, *ran]


@pytest.mark.long
def test_kernels_compile_without_a_gpu(tmp_path):
    out = run("tests.mmspec.ops.ops_compile", "80", "90", "100", TRITON_CACHE_DIR=str(tmp_path))
    built = [json.loads(line) for line in out.splitlines()]
    kernels = {
        f"_{part}_kernel"
        for part in ("attend", "merge", "path", "choose", "sum", "quantile", "compact", "rank", "top", "beam", "keep")
    }
    for capability in (80, 90, 100):
        here = [entry for entry in built if entry["capability"] == capability]
        assert {entry["kernel"] for entry in here} == kernels
        check_fits(here)
        # Without loads ahead of their use, attention would wait for memory at every tile.
        assert all(entry["ahead"] for entry in here if entry["kernel"] == "_attend_kernel")
    # Attention takes 32-bit products within one row's queries only, which are few.
    assert not any(entry["narrow"] for entry in built if entry["kernel"] != "_attend_kernel")


def check_fits(built):
    """Into the memory of a processor, and into its registers, or nearly so: what does not goes to slower memory."""
    for entry in built:
        assert entry["ptx"], entry
        assert entry["cubin"], entry
        assert entry["shared"] <= SHARED[entry["capability"]], entry
        # The oldest has no tensor cores that read shared memory.
        spilt = 300 if entry["capability"] == 80 else 160
        # Releases of Triton differ by some registers: 3.5 to 3.9 spill at most 40 bytes of the others.
        assert entry["stack"] <= (spilt if entry["kernel"] == "_attend_kernel" else 64), entry


@pytest.mark.slow
def test_attention_fits_at_many_shapes(tmp_path):
    out = run("tests.mmspec.ops.ops_compile", "80", "90", "100", "attention", TRITON_CACHE_DIR=str(tmp_path))
    built = [json.loads(line) for line in out.splitlines()]
    assert len(built) == 60
    check_fits(built)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("check", CHECKS, ids=name)
def test_on_a_gpu(check, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    check("cuda")
