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


def python(*arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder of installed packages with an editable install of a clone, which lies beside it and is called mmspec."""
    home = tmp_path_factory.mktemp("home")
    ignored = shutil.ignore_patterns(".*", "embedded", "results", "tests", "docs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, home / "mmspec", symlinks=True, ignore=ignored)
    wheel = python("-c", BUILD, cwd=home / "mmspec").split()[-1]
    zipfile.ZipFile(home / wheel).extractall(home / "site")
    return home / "site"


def test_a_script_beside_the_clone_imports_the_package(site):
    script = site.parent / "script.py"
    script.write_text(
        f"import site; site.addsitedir({str(site)!r})\n"
        "import mmspec; print(mmspec.UserError.__module__, mmspec.__file__)"
    )
    module, file = python("-S", "script.py", cwd=site.parent).split()  # without installed packages: one may be mmspec
    assert module == "mmspec.errors"
    assert Path(file).resolve() == site.parent / "mmspec" / "mmspec" / "__init__.py"


def test_no_other_folder_of_the_repository_can_be_imported(site, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import site; site.addsitedir({str(site)!r})\nfrom importlib.util import find_spec\n"
        "print([name for name in ('vision', 'ssm', 'eval', 'demos') if find_spec(name)])\n"
        "import mmspec.vision, mmspec.ssm, mmspec.eval, mmspec.demos"
    )
    assert python(str(script), cwd=tmp_path).strip() == "[]"
