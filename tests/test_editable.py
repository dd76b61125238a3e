"""An editable install: a script beside the clone imports the package, and none of the repository's other folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta; print(build_meta.build_editable('..'))"
SCRIPT = """
import site; site.addsitedir({site!r})
from importlib.util import find_spec
import mmspec
print(mmspec.__file__, mmspec.UserError.__module__)
names = [name for other in ("vision", "ssm", "eval", "demos") for name in (other, "mmspec." + other)]
print(*(name for name in names if find_spec(name)))
"""


def python(*arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_beside_a_clone_imports_the_package_alone(tmp_path: Path) -> None:
    """The clone is called mmspec, as the package is."""
    ignored = shutil.ignore_patterns(".*", "embedded", "results", "tests", "docs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "mmspec", symlinks=True, ignore=ignored)
    wheel = python("-c", BUILD, cwd=tmp_path / "mmspec").split()[-1]
    zipfile.ZipFile(tmp_path / wheel).extractall(tmp_path / "site")
    (tmp_path / "script.py").write_text(SCRIPT.format(site=str(tmp_path / "site")))
    file, module, *found = python("-S", "script.py", cwd=tmp_path).split()  # without installed packages
    assert (module, found) == ("mmspec.errors", ["mmspec.vision", "mmspec.ssm", "mmspec.eval", "mmspec.demos"])
    assert Path(file).resolve() == tmp_path / "mmspec" / "mmspec" / "__init__.py"
