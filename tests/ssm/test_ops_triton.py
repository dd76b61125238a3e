"""The Triton kernels of the scan and the convolution: through the interpreter, compiled without a GPU, and on one."""

import json

import pytest

from tests.process import run
from tests.ssm.ops_grid import CASES, CHECKS

pytest.importorskip("triton")


@pytest.mark.long
def test_interpreted_kernels_agree_with_the_reference():
    out = run("tests.ssm.ops_grid", TRITON_INTERPRET="1", MMSPEC_KERNELS="triton")
    assert out.splitlines()[-1] == f"{len(CASES) * len(CHECKS)} passed, 0 failed"


@pytest.mark.long
def test_kernels_compile_without_a_gpu(tmp_path):
    out = run("tests.ssm.ops_compile", "80", "90", "100", TRITON_CACHE_DIR=str(tmp_path))
    built = [json.loads(line) for line in out.splitlines()]
    names = {
        f"_{kind}_{op}_kernel" for kind in ("tree", "commit") for op in ("scan", "delta", "selective", "lru", "conv")
    }
    names |= {"_overlap_kda_kernel", "_tree_kda_kernel"}
    for capability in (80, 90, 100):
        here = [entry for entry in built if entry["capability"] == capability]
        assert {entry["kernel"] for entry in here} == names
        assert all(entry["ptx"] and entry["cubin"] for entry in here)
        # Little enough that several programs run at a time (Triton 3.8 takes most: 24,576 bytes), and hardly a register
        # short in any release of Triton.
        assert all(entry["shared"] <= 25_000 for entry in here)
        assert all(entry["stack"] <= 64 for entry in here)
        # Parts of the state are loaded ahead of their use.
        streaming = ("_tree_scan_kernel", "_tree_delta_kernel", "_tree_kda_kernel")
        assert all(entry["ahead"] for entry in here if entry["kernel"] in streaming)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_on_a_gpu(check, case, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    check(case, "cuda")
