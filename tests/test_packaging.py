"""Installation: an editable install next to a clone, the extras, and the Dockerfile against the project."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from mmspec.errors import EXTRAS
from mmspec.plugins import BUILTIN
from mmspec.serving.command import serve

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    pytest.importorskip("setuptools")
    ignored = shutil.ignore_patterns(".*", "embedded", "results", "tests", "docs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "mmspec", symlinks=True, ignore=ignored)
    wheel = python("-c", BUILD, cwd=tmp_path / "mmspec").split()[-1]
    zipfile.ZipFile(tmp_path / wheel).extractall(tmp_path / "site")
    (tmp_path / "script.py").write_text(SCRIPT.format(site=str(tmp_path / "site")))
    file, module, *found = python("-S", "script.py", cwd=tmp_path).split()  # without installed packages
    assert (module, found) == ("mmspec.errors", ["mmspec.vision", "mmspec.ssm", "mmspec.eval", "mmspec.demos"])
    assert Path(file).resolve() == tmp_path / "mmspec" / "mmspec" / "__init__.py"


def test_extras_are_documented_and_install_the_modules_that_are_said() -> None:
    extras = PROJECT["optional-dependencies"]
    (listed,) = re.findall(r"\(extras: ([^)]+)\)", (ROOT / "README.md").read_text())
    named = extras.keys() - {"browser", "dev", "docs", "test"}  # these are for developers
    assert set(re.findall(r"`([\w-]+)`", listed)) == named == EXTRAS.keys()
    installed = {name: {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in extras[name]} for name in EXTRAS}
    installed["serve"].add("starlette")  # with fastapi
    for extra, modules in EXTRAS.items():
        elsewhere = {module for other in EXTRAS.keys() - {extra} for module in EXTRAS[other]}
        assert set(modules) == installed[extra] - elsewhere


def test_what_the_dockerfile_copies_installs_and_runs_exists() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())

    def instructions(name: str) -> list[str]:
        return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]

    copied = {source for line in instructions("COPY") for source in shlex.split(line)[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    packages = {"src", "mmspec", *(link.name for link in (ROOT / "mmspec").iterdir() if link.is_symlink())}
    assert copied == {*packages, "pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]}
    (extras,) = (re.findall(r'"\.\[(.+)\]"', line)[0] for line in instructions("RUN") if '".[' in line)
    assert {"serve"} <= set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (version,) = re.findall(r"^CPU_TORCH := torch==(.+)\+cpu$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f" torch=={version}" in text
    (entry,) = instructions("ENTRYPOINT")
    program, command, *options = re.findall(r'"(.+?)"', entry)
    assert program in PROJECT["scripts"]
    assert command in BUILTIN["commands"]
    given = serve.make_context(command, options).params
    assert given["host"] == "0.0.0.0"  # so that it starts with a key or --no-auth only
    assert instructions("EXPOSE") == [str(given["port"])]
