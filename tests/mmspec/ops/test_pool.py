"""The kernels' pool of threads: a loop ends whatever becomes of the helpers, and computes each item once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mmspec.ops import compiler

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pool") / "pool"
    source = Path(__file__).with_name("pool.cpp")
    options = ["-std=c++17", "-O2", "-pthread", "-o", str(file), str(source)]
    compiler.run_compiler([compiler.find_compiler(), *options], [file.parent])
    return file


@pytest.mark.parametrize(
    "case",
    ["loops", "chunks", "several callers", "stopped helper", "other teams", "late helper", "no helpers", "forked"],
)
def test_each_item_is_computed_once(program, case):
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("this system starts threads beyond the limit")
    assert done.returncode == 0, done.stderr
