"""The Triton kernels of the scan and the convolution: through the interpreter, compiled without a GPU, and on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ssm.ops_grid import CASES, CHECKS

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, **environment: str) -> str:
    """A process of its own: Triton decides at its import whether kernels are interpreted, for all that follows."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "MMSPEC_KERNELS"))
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted_kernels_agree_with_the_reference():
    out = run("tests.ssm.ops_grid", TRITON_INTERPRET="1", MMSPEC_KERNELS="triton")
    assert out.splitlines()[-1] == f"{len(CASES) * len(CHECKS)} passed, 0 failed"


def test_kernels_compile_without_a_gpu(tmp_path):
    out = run("tests.ssm.ops_compile", "80", "90", "100", TRITON_CACHE_DIR=str(tmp_path))
    built = [json.loads(line) for line in out.splitlines()]
    names = {"_tree_scan_kernel", "_commit_scan_kernel", "_tree_conv_kernel", "_commit_conv_kernel"}
    for capability in (80, 90, 100):
        here = [entry for entry in built if entry["capability"] == capability]
        assert {entry["kernel"] for entry in here} == names
        assert all(entry["ptx"] and entry["cubin"] for entry in here)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check, case, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    check(case, "cuda")
