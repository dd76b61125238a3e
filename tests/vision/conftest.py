"""The small packages, in the place of those that are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mmspec.vision.pictures import library, nouns
from tests.vision.pictures import packages


@pytest.fixture
def small_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Reads WordNet, classes, stamps and clip art from a folder, and no photographs."""
    packages.write_wordnet(tmp_path / "wordnet")
    packages.write_classes(tmp_path / "timm" / "data" / "_info")
    packages.write_stamps(tmp_path / "stamps")
    packages.write_clip_art(tmp_path / "clipart")
    timm = ModuleSpec("timm", None, is_package=True)
    timm.submodule_search_locations = [str(tmp_path / "timm")]
    monkeypatch.setattr(nouns, "WORDNET", tmp_path / "wordnet")
    monkeypatch.setattr(nouns, "find_spec", lambda name: timm)
    monkeypatch.setattr(library, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(library, "CLIP_ART", tmp_path / "clipart")
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    caches = (nouns._synsets, nouns.classes)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()
