"""The mutation run: its list names what is there, its sample is seeded, and it scores without changing the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.mutation import CONFIG, ROOT, add_deletion, change, sample

CODE = """\
def larger(a: int, b: int | None = 3) -> int | None:
    return a if a > 2 * b else b + 0
"""
STATEMENTS = """\
class Thing:
    size: int = 4

    def add(self, a: int) -> None:
        \"\"\"Adds.\"\"\"
        count: int
        assert a
        for b in range(a):
            self.size += b; print(b)
            continue
        self.all.append(a)
        return None
"""


def test_what_is_listed_is_there() -> None:
    config = tomllib.loads(CONFIG.read_text())
    for file, tests in config["files"].items():
        assert tests
        assert all((ROOT / path.partition("::")[0]).is_file() for path in (file, *tests))
    for one in config["equivalent"]:
        assert one["file"] in config["files"]
        assert one["reason"].strip()
        before, _, _ = one["change"].partition(" -> ")
        assert before in " ".join(map(str.strip, (ROOT / one["file"]).read_text().splitlines()))


def test_a_sample_is_seeded_and_deletes_statements() -> None:
    pytest.importorskip("cosmic_ray")
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    code = CODE + "\n\ndef pairs(a: list, b: list) -> zip:\n    return zip(a, b, strict=True)\n"
    drawn = sample("code.py", code, 99, 0)
    assert sample("code.py", code, 2, 0) == drawn[:2] != sample("code.py", code, 2, 1)
    # Places: 3, the comparison and the conditional, 2, the product, the sum, 0, two statements; annotations are none.
    assert 7 <= len(drawn) <= 10
    assert all("int | None" in one.code for one in drawn)
    assert {one.change for one in drawn if "zip" in one.change} == {"return zip(a, b, strict=True) -> pass"}
    add_deletion()
    operator, found = get_operator("mmspec/Deletion")(), []
    while (mutated := mutate_code(STATEMENTS, operator, len(found))) is not None:
        found.append(change(STATEMENTS, mutated))
    assert found == [
        "self.size += b; print(b) -> pass; print(b)",
        "continue -> pass",
        "self.all.append(a) -> pass",
        "return None -> pass",
    ]


@pytest.mark.slow
def test_a_run_scores_goes_on_and_changes_nothing(tmp_path: Path) -> None:
    """On a tree of one file, whose folder is elsewhere than its package."""
    pytest.importorskip("cosmic_ray")
    for folder in ("tests", "mmspec", "part"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "tests" / "mutation.py", tmp_path / "tests")
    (tmp_path / "mmspec" / "__init__.py").touch()
    (tmp_path / "mmspec" / "part").symlink_to("../part")
    (tmp_path / "part" / "thing.py").write_text(CODE)
    (tmp_path / "tests" / "mutation.toml").write_text(
        'mutants = 99\nseed = 0\n[files]\n"part/thing.py" = ["tests/test_thing.py"]\n'
    )
    for test, options, status, said in (
        ("assert larger(1) == 4", (), 1, "must pass before it is mutated"),
        ("larger(1)", ("--minutes", "0.0001"), 1, "not tried"),
        ("assert larger(1) == 3", (), 1, "line 2: "),
        ("assert [larger(*p) for p in ((6,), (7,), (1,), (3, 1), (2, 1))] == [3, 7, 3, 3, 1]", (), 0, ": 100%"),
    ):
        source = f"from mmspec.part.thing import larger\n\n\ndef test():\n    {test}"
        (tmp_path / "tests" / "test_thing.py").write_text(source)
        command = [sys.executable, "tests/mutation.py", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, said in done.stdout + done.stderr) == (status, True), test
    assert (tmp_path / "part" / "thing.py").read_text() == CODE
