"""The record of the slow tests: written after a run that passed, left alone by any other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PASSING = "import pytest\n@pytest.mark.slow\ndef test_it():\n    pass\n"
SKIPPED = "@pytest.mark.slow\ndef test_other():\n    pytest.skip('never here')\n"
FAILING = "@pytest.mark.slow\ndef test_third():\n    assert False\n"


def run_slow(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_one.py").write_text(source)
    code = "import sys, pathlib, tests.slow as s; p = pathlib.Path(sys.argv[1]); sys.exit(s.run(p, p / 'slow.json'))"
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_run_that_passes_is_recorded(tmp_path: Path) -> None:
    done = run_slow(tmp_path, PASSING + SKIPPED)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "slow.json").read_text())
    assert record["passed"] == 1
    assert [name.rpartition("::")[2] for name in record["skipped"]] == ["test_other"]
    assert f"last passed {record['date']} at {record['commit']}: 1 passed, 1 skipped" in done.stdout


@pytest.mark.parametrize("source", [PASSING + FAILING, "def test_fast():\n    pass\n"], ids=["failed", "none"])
def test_any_other_run_leaves_the_record(tmp_path: Path, source: str) -> None:
    before = {"passed": 3, "skipped": [], "seconds": 2, "date": "2026-01-01T00:00:00+00:00", "commit": "abc"}
    (tmp_path / "slow.json").write_text(json.dumps(before))
    done = run_slow(tmp_path, source)
    assert done.returncode != 0
    assert json.loads((tmp_path / "slow.json").read_text()) == before
    assert "last passed 2026-01-01T00:00:00+00:00 at abc: 3 passed in 2 s" in done.stdout
