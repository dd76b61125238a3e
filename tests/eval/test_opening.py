"""Load times of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import mmspec
from mmspec.eval import opening
from tests.compiled import needs_kernels
from tests.model_folders import save_gguf


@pytest.mark.long
@needs_kernels
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    file = save_gguf(tmp_path / "a.gguf")
    mmspec.load(str(file), drafter=None)  # compiles the kernels
    done = CliRunner().invoke(opening.main, ["--model", str(file), "--rounds", "1", "--threads", "1"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["model"], row["by"]) for row in rows] == [("a.gguf", opening.FIRST), ("a.gguf", opening.LATER)]
    for row in rows:
        assert 0 < row["seconds"] < row["imports"] + 60
        assert 1e8 < row["resident"] <= row["peak"]
        assert 1000 < row["written"] < 1e6
