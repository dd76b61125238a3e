"""The README agrees with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOR_DEVELOPERS = {"browser", "dev", "docs", "test"}


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (listed,) = re.findall(r"\(extras: ([^)]+)\)", (ROOT / "README.md").read_text())
    assert set(re.findall(r"`([\w-]+)`", listed)) == set(project["optional-dependencies"]) - FOR_DEVELOPERS
