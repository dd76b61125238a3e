"""The study of the demo's first view, in a real browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest

from mmspec.eval import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.browser
def test_times_of_a_first_view(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the path: install the system's package")
    page.main.main(["--rounds", "1", "--out", str(tmp_path / "out.json")], standalone_mode=False)
    [record] = json.loads((tmp_path / "out.json").read_text())["records"]
    assert record["model"] == "tiny-llava"
    assert 0 < record["paint"] < record["opening"]
    assert record["start"] > 1


def test_a_missing_browser_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(click.ClickException, match="expected Chromium on the path, found none"):
        page.main.main([], standalone_mode=False)
