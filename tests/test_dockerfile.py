"""The Dockerfile against the project: what it copies, installs and runs exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from mmspec.plugins.builtin import BUILTIN
from mmspec.serving.command import serve

ROOT = Path(__file__).parent.parent
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in LINES if line.startswith(f"{name} ")]


def test_copied_paths_are_those_that_the_build_needs() -> None:
    copied = {source for line in instructions("COPY") for source in shlex.split(line)[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    packages = {"src", "mmspec", *(link.name for link in (ROOT / "mmspec").iterdir() if link.is_symlink())}
    assert copied == {*packages, "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}


def test_installed_extras_exist() -> None:
    (extras,) = (re.findall(r'"\.\[(.+)\]"', line)[0] for line in instructions("RUN") if '".[' in line)
    assert {"serve"} <= set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_torch_is_that_of_the_makefile() -> None:
    (version,) = re.findall(r"^CPU_TORCH := torch==(.+)\+cpu$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (line,) = (line for line in instructions("RUN") if "torch" in line)
    assert line.endswith(f" torch=={version}")


def test_the_entry_point_parses_and_needs_a_key() -> None:
    (entry,) = instructions("ENTRYPOINT")
    program, command, *options = re.findall(r'"(.+?)"', entry)
    assert program in PROJECT["project"]["scripts"]
    assert command in BUILTIN["commands"]
    given = serve.make_context(command, options).params
    assert given["host"] == "0.0.0.0"  # so that it starts with a key or --no-auth only
    assert instructions("EXPOSE") == [str(given["port"])]
