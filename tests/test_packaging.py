"""Installation and deployment: an editable install next to a clone, the extras, the container and the unit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import which

import pytest
import yaml

from mmspec.cli.options import API_KEY
from mmspec.errors import EXTRAS
from mmspec.plugins import BUILTIN
from mmspec.serving.command import serve
from tests import thinking
from tests.testkit.served import served

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


def instructions(name: str) -> list[str]:
    """Arguments of these instructions of the Dockerfile."""
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def test_what_the_dockerfile_copies_installs_and_runs_exists() -> None:
    copied = {source for line in instructions("COPY") for source in shlex.split(line)[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    packages = {"src", "mmspec", *(link.name for link in (ROOT / "mmspec").iterdir() if link.is_symlink())}
    assert copied == {*packages, "pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]}
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored == [
        "*",
        *(f"!{name}" for line in instructions("COPY") for name in shlex.split(line)[:-1]),
        "**/__pycache__",
    ]
    (extras,) = (re.findall(r'"\.\[(.+)\]"', line)[0] for line in instructions("RUN") if '".[' in line)
    assert {"serve"} <= set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (version,) = re.findall(r"^CPU_TORCH := torch==(.+)\+cpu$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert any(line.endswith(f" torch=={version}") for line in instructions("RUN"))
    (entry,) = instructions("ENTRYPOINT")
    program, command, *options = re.findall(r'"(.+?)"', entry)
    assert program in PROJECT["scripts"]
    assert command in BUILTIN["commands"]
    given = serve.make_context(command, options).params
    assert given["host"] == "0.0.0.0"  # so that it starts with a key or --no-auth only
    assert instructions("EXPOSE") == [str(given["port"])]
    (user,), (cache,), environment = instructions("USER"), instructions("VOLUME"), " ".join(instructions("ENV")).split()
    assert any(f"--uid {user} " in line and f"--owner {user} {cache}" in line for line in instructions("RUN"))
    assert int(user) > 0
    assert {one.partition("=")[2].split("/")[1] for one in environment if "/" in one} == {cache.strip("/")}


def test_the_health_check_of_the_image() -> None:
    (check,) = instructions("HEALTHCHECK")
    words = json.loads(check.partition(" CMD ")[2])
    with served(thinking.pipeline("text")) as server:
        command = [sys.executable, *words[1:-1], words[-1].replace("http://127.0.0.1:8000", server.url)]
        assert server.url in command[-1]
        assert subprocess.run(command).returncode == 0
    assert subprocess.run(command, capture_output=True).returncode == 1


def test_the_compose_file() -> None:
    text, given = (ROOT / "compose.yaml").read_text(), {"MODEL": "a.gguf", "MMSPEC_API_KEY": "secret"}
    assert set(re.findall(r"\$\{(\w+):\?", text)) == given.keys()
    text = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda found: given.get(found[1], found[2]), text)
    (service,) = yaml.safe_load(text)["services"].values()
    options = serve.make_context("serve", [*service["command"], "--no-auth"]).params
    models, cache = (volume.split(":") for volume in service["volumes"])
    assert (models, options["model"]) == (["./models", "/models", "ro"], "/models/a.gguf")
    assert cache == ["cache", *instructions("VOLUME")]
    assert service["environment"] == {API_KEY.variable: "secret"}
    assert service["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]


@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_systemd_unit(tmp_path: Path) -> None:
    (unit,) = re.findall(r"```text\n(\[Unit\].*?)```", (ROOT / "docs/deployment.md").read_text(), re.DOTALL)
    program, command, *words = shlex.split(re.findall(r"ExecStart=(.*)", unit)[0])
    assert (Path(program).name, command) == ("mmspec", "serve")
    serve.make_context("serve", [*words, "--no-auth"])
    file = tmp_path / "mmspec.service"
    file.write_text(unit.replace(program, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
