"""The README agrees with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from mmspec.drafters.registry import PLAIN, drafter_specs

ROOT = Path(__file__).parent.parent
FOR_DEVELOPERS = {"browser", "dev", "docs", "test"}


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (listed,) = re.findall(r"\(extras: ([^)]+)\)", (ROOT / "README.md").read_text())
    assert set(re.findall(r"`([\w-]+)`", listed)) == set(project["optional-dependencies"]) - FOR_DEVELOPERS


def test_drafters_are_those_of_the_registry() -> None:
    page = (ROOT / "README.md").read_text()
    table = page[page.index("| drafter | draft tokens come from |") :].split("\n\n")[0]
    listed = re.findall(r"^\| `([\w-]+)(?::(\w+))?`", table, re.MULTILINE)
    assert sorted(listed) == sorted([*((spec.name, spec.argument) for spec in drafter_specs()), (PLAIN, "")])
