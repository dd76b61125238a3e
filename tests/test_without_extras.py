"""A checkout on Python's path where neither mmspec nor an optional package is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import without_extras
from tests.process import run as in_new_process

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return without_extras.variables(tmp_path_factory.mktemp("startup"))


@pytest.fixture(scope="module")
def found(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed = in_new_process("tests.without_extras", str(tmp_path_factory.mktemp("home")), **variables)
    return json.loads(printed.splitlines()[-1])  # type: ignore[no-any-return]


def test_what_needs_a_package_says_so_in_one_line(found: dict[str, Any]) -> None:
    clip = ROOT / "mmspec/vision/embedded/samples/clip.mp4"
    assert found["refusals"] == {
        command: [2, f"error: {purpose} needs the package {package}, which is not installed: run {install}\n"]
        for command, purpose, package, extra in (
            *((f"train {name}", "this command", "accelerate", "train") for name in without_extras.TRAINED),
            ("demo", "the demo", "gradio", "demo"),
            ("serve", "this command", "uvicorn", "serve"),
            ("generate --regex", "structured output", "llguidance", "structured"),
            ("caption FILE", f"{clip}: reading a video", "av", None),
            ("caption FILE --video-backend decord", f"{clip}: reading a video", "av", None),
            ("caption FOLDER --video-backend decord", "this command", "av", None),
            ("caption FOLDER --engine ray", "engine ray", "ray", "ray"),
        )
        for install in [
            f"pip install -e '.[{extra}]' in the source folder of mmspec" if extra else f"pip install {package}"
        ]
    }


def test_plug_ins_and_studies_are_imported_and_commands_have_help(found: dict[str, Any]) -> None:
    assert found["failures"] == []


def test_media_in_memory_are_described(found: dict[str, Any]) -> None:
    image, video = found["captions"]
    assert image != video
    assert [image, video] == without_extras.captions()


def run_pytest(variables: dict[str, str], *options: str) -> list[str]:
    """The lines that pytest prints about the tests for a GPU."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_tests_are_collected(variables: dict[str, str]) -> None:
    """Modules that need a package are skipped; of those with tests for a GPU, none is."""
    modules = {line.partition("::")[0] for line in run_pytest(variables, "--collect-only") if "::" in line}
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu\n" in path.read_text()}
    assert modules == {str(path.relative_to(ROOT)) for path in marked} != set()


def test_tests_for_a_gpu_are_skipped_without_one(variables: dict[str, str]) -> None:
    options = ("-v", "-k", "compact", "tests/mmspec/ops/test_ops_triton.py")
    *_, last = run_pytest(variables | {"CUDA_VISIBLE_DEVICES": ""}, *options)
    assert re.search(r" \d+ skipped, \d+ deselected in ", last), last
