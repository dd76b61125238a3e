"""The README and the table of drafters agree with the package."""

from __future__ import annotations

import re
from pathlib import Path

from mmspec.drafters.registry import PLAIN, drafter_specs
from tests.mmspec.test_assisted import HYBRIDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_drafters_are_those_of_the_registry() -> None:
    page = (ROOT / "docs/drafters.md").read_text()
    table = page[page.index("| drafter | draft tokens come from |") :].split("\n\n")[0]
    listed = re.findall(r"^\| `([\w-]+)(?::(\w+))?`", table, re.MULTILINE)
    assert sorted(listed) == sorted([*((spec.name, spec.argument) for spec in drafter_specs()), (PLAIN, "")])


def test_the_hybrids_that_are_listed_are_tested() -> None:
    """They are decoded in ``tests/mmspec/test_assisted.py``."""
    (listed,) = re.findall(r"recurrent layers \(([^)]+)\)", README)
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in re.split(r",\s+", listed)]
    tested = [re.sub(r"_text|[^a-z0-9]", "", name) for name in HYBRIDS]
    assert sorted(names) == sorted(tested)
