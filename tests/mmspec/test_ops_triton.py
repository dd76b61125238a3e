"""The Triton kernels of a step: through the interpreter, compiled without a GPU, and on one."""

import json

import pytest

from tests.mmspec.ops_grid import CHECKS, name
from tests.process import run

pytest.importorskip("triton")


def test_interpreted_kernels_agree_with_loops():
    out = run("tests.mmspec.ops_grid", TRITON_INTERPRET="1", MMSPEC_KERNELS="triton")
    assert out.splitlines()[-1] == f"{len(CHECKS)} passed, 0 failed"


def test_interpreted_kernels_say_what_generate_says():
    """Whole answers: every pass of the target, and of the drafter, goes through the kernels."""
    llava, bamba = run("tests.mmspec.interpreted", TRITON_INTERPRET="1", MMSPEC_KERNELS="triton").splitlines()
    assert [part.split("=")[0] for part in llava.split()] == [
        "llava",
        "compact_kv",
        "follow",
        "keep_best",
        "next_beam",
        "top_log_probs",
        "tree_attention",
    ]
    scans = ["commit_conv", "commit_scan", "compact_kv", "follow", "tree_attention", "tree_conv", "tree_scan"]
    assert [part.split("=")[0] for part in bamba.split()] == ["bamba", *scans]


def test_kernels_compile_without_a_gpu(tmp_path):
    out = run("tests.mmspec.ops_compile", "80", "90", "100", TRITON_CACHE_DIR=str(tmp_path))
    built = [json.loads(line) for line in out.splitlines()]
    kernels = {
        f"_{part}_kernel"
        for part in ("attend", "merge", "follow", "choose", "quantile", "compact", "rank", "top", "beam", "keep")
    }
    for capability, shared in ((80, 166912), (90, 232448), (100, 232448)):
        here = [entry for entry in built if entry["capability"] == capability]
        assert {entry["kernel"] for entry in here} == kernels
        assert all(entry["ptx"] and entry["cubin"] and entry["shared"] <= shared for entry in here)
        # Without loads ahead of their use, attention would wait for memory at every tile.
        assert all(entry["ahead"] for entry in here if entry["kernel"] == "_attend_kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("check", CHECKS, ids=name)
def test_on_a_gpu(check, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    check("cuda")
