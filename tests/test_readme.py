"""The README and the table of extras agree with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from mmspec.drafters.registry import PLAIN, drafter_specs
from mmspec.extras import EXTRAS

ROOT = Path(__file__).parent.parent
FOR_DEVELOPERS = {"browser", "dev", "docs", "test"}


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (listed,) = re.findall(r"\(extras: ([^)]+)\)", (ROOT / "README.md").read_text())
    assert set(re.findall(r"`([\w-]+)`", listed)) == set(project["optional-dependencies"]) - FOR_DEVELOPERS


def test_modules_of_extras_are_those_that_they_install() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {
        extra: {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in extras[extra]}
        for extra in extras.keys() - FOR_DEVELOPERS
    }
    installed["serve"] |= {"pydantic", "starlette"}  # with fastapi
    assert EXTRAS.keys() == installed.keys()
    for extra, modules in EXTRAS.items():
        elsewhere = {module for other in EXTRAS.keys() - {extra} for module in EXTRAS[other]}
        assert set(modules) == installed[extra] - elsewhere


def test_drafters_are_those_of_the_registry() -> None:
    page = (ROOT / "README.md").read_text()
    table = page[page.index("| drafter | draft tokens come from |") :].split("\n\n")[0]
    listed = re.findall(r"^\| `([\w-]+)(?::(\w+))?`", table, re.MULTILINE)
    assert sorted(listed) == sorted([*((spec.name, spec.argument) for spec in drafter_specs()), (PLAIN, "")])
