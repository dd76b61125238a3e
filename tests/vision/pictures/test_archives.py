"""Files of archives, against the same files written by other programs or by the format's description."""

import io
import shutil
import struct
import subprocess
import tarfile
import zipfile

import pytest

from mmspec.errors import UserError
from mmspec.vision.pictures.archives import read_files, resource_files


def resource(files, version=3, compressed=()):
    """A Qt resource file with a folder ``/a`` of files, as ``rcc --binary`` lays it out."""
    names, contents, nodes = b"", b"", []

    def name(text):
        nonlocal names
        at = len(names)
        names += struct.pack(">HI", len(text), 0) + text.encode("utf-16-be")
        return at

    def node(*fields):
        nodes.append(struct.pack(*fields) + (b"\0" * 8 if version > 1 else b""))

    node(">IHII", name("root"), 2, 1, 1)
    node(">IHII", name("a"), 2, len(files), 2)
    for path, data in files.items():
        flags = 1 if path in compressed else 0
        node(">IHHHI", name(path), flags, 0, 1, len(contents))
        contents += struct.pack(">I", len(data)) + data
    start = 24 if version > 2 else 20
    tree = start + len(contents) + len(names)
    head = struct.pack(">4s4I", b"qres", version, tree, start, start + len(contents))
    return head.ljust(start, b"\0") + contents + names + b"".join(nodes)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_resource_file(version):
    files = {"cat.webp": b"cat", "\u00e9t\u00e9.png": b"", "dog.webp": b"dogs"}
    assert dict(resource_files(resource(files, version, {"dog.webp"}))) == {
        "/a/cat.webp": b"cat",
        "/a/\u00e9t\u00e9.png": b"",
    }


def test_another_file_is_no_resource_file():
    with pytest.raises(UserError, match="expected a Qt resource file"):
        dict(resource_files(b"\x7fELF" + bytes(40)))


FILES = {"data/pets.rcc": resource({"cat.webp": b"cat", "dog.webp": b"dog"}), "data/car.png": b"car", "data/x": b"x"}
WANTED = {"data/pets.rcc!/a/dog.webp": b"dog", "data/car.png": b"car"}


@pytest.fixture(params=["wheel", "tarball", "debian"])
def archive(request, tmp_path):
    if request.param == "wheel":
        path = tmp_path / "p-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as opened:
            for name, data in FILES.items():
                opened.writestr(name, data)
    elif request.param == "tarball":
        path = tmp_path / "p-1.tgz"
        with tarfile.open(path, "w:gz") as opened:
            for name, data in FILES.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                opened.addfile(info, io.BytesIO(data))
    else:
        if shutil.which("dpkg-deb") is None:
            pytest.skip("dpkg-deb is not installed")
        for name, data in {**FILES, "DEBIAN/control": b""}.items():
            (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "p" / name).write_bytes(data)
        control = "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: N <n@n>\nDescription: d\n"
        (tmp_path / "p/DEBIAN/control").write_text(control)
        path = tmp_path / "p_1_all.deb"
        subprocess.run(["dpkg-deb", "--build", tmp_path / "p", path], check=True, capture_output=True)
    return path


def test_files_are_read_from_every_format(archive):
    assert read_files(archive, list(WANTED)) == WANTED


def test_a_file_that_is_not_there_is_named(archive):
    with pytest.raises(UserError, match=r"expected the file data/pets.rcc!/a/fox.webp, there is none"):
        read_files(archive, [*WANTED, "data/pets.rcc!/a/fox.webp"])
