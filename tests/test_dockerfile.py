"""The Dockerfile against the project: what it copies, installs and runs exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from mmspec.plugins.builtin import BUILTIN
from mmspec.serving.command import serve

ROOT = Path(__file__).parent.parent


def test_what_it_copies_installs_and_runs_exists() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def instructions(name: str) -> list[str]:
        return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]

    copied = {source for line in instructions("COPY") for source in shlex.split(line)[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    packages = {"src", "mmspec", *(link.name for link in (ROOT / "mmspec").iterdir() if link.is_symlink())}
    assert copied == {*packages, "pyproject.toml", project["readme"], *project["license-files"]}
    (extras,) = (re.findall(r'"\.\[(.+)\]"', line)[0] for line in instructions("RUN") if '".[' in line)
    assert {"serve"} <= set(extras.split(",")) <= set(project["optional-dependencies"])
    (version,) = re.findall(r"^CPU_TORCH := torch==(.+)\+cpu$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f" torch=={version}" in text
    (entry,) = instructions("ENTRYPOINT")
    program, command, *options = re.findall(r'"(.+?)"', entry)
    assert program in project["scripts"]
    assert command in BUILTIN["commands"]
    given = serve.make_context(command, options).params
    assert given["host"] == "0.0.0.0"  # so that it starts with a key or --no-auth only
    assert instructions("EXPOSE") == [str(given["port"])]
