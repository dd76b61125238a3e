"""Files in a wheel, an npm tarball, a Debian package or a Qt resource file, without unpacking the rest."""

from __future__ import annotations

import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from mmspec.errors import UserError

_FOLDER, _COMPRESSED = 2, 1 | 4


def read_files(archive: Path, paths: Collection[str]) -> dict[str, bytes]:
    """Read some files of an archive.

    Args:
        archive: its ending tells the format: ``.deb``, ``.whl``, or a tarball.
        paths: of files; ``OUTER!INNER`` is a file of the Qt resource file OUTER.

    Raises:
        UserError: the archive lacks a file.
    """
    wanted = {path.partition("!")[0] for path in paths}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            found = {name: opened.read(name) for name in wanted & set(opened.namelist())}
    elif archive.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as stream:
                found = _members(stream, wanted)
            assert process.stdout is not None
            process.stdout.read()  # the padding after the last member
    else:
        with tarfile.open(archive) as tarball:
            found = _members(tarball, wanted)
    for outer in [name for name in found if any(path.startswith(f"{name}!") for path in paths)]:
        found |= {f"{outer}!{inner}": data for inner, data in resource_files(found[outer])}
    if absent := sorted(set(paths) - set(found)):
        raise UserError(f"{archive.name}: expected the file {absent[0]}, there is none")
    return {path: found[path] for path in paths}


def _members(tarball: tarfile.TarFile, wanted: Collection[str]) -> dict[str, bytes]:
    found = {}
    for member in tarball:
        name = member.name.removeprefix("./")
        if name in wanted and (file := tarball.extractfile(member)) is not None:
            found[name] = file.read()
    return found


def resource_files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file in a Qt resource file (``.rcc``) that is stored uncompressed.

    The format is that of Qt's resource compiler ``rcc``, versions 1 to 3, big-endian: the offsets of tree, data and
    names after the version; nodes of 14 bytes, 22 from version 2 on.

    Raises:
        UserError: it is no such file.
    """
    if data[:4] != b"qres":
        raise UserError(f"expected a Qt resource file, which begins with b'qres', received {data[:4]!r}")
    version, tree, contents, names = struct.unpack_from(">4I", data, 4)
    size = 14 if version == 1 else 22

    def walk(node: int, folder: str) -> Iterator[tuple[str, bytes]]:
        at = tree + node * size
        name_at, flags = struct.unpack_from(">IH", data, at)
        (length,) = struct.unpack_from(">H", data, names + name_at)
        start = names + name_at + 6  # after the length and a hash
        path = f"{folder}/{data[start : start + 2 * length].decode('utf-16-be')}" if node else ""
        if flags & _FOLDER:
            count, first = struct.unpack_from(">2I", data, at + 6)
            for child in range(first, first + count):
                yield from walk(child, path)
        elif not flags & _COMPRESSED:
            (offset,) = struct.unpack_from(">I", data, at + 10)  # after country and language
            (length,) = struct.unpack_from(">I", data, contents + offset)
            begin = contents + offset + 4
            yield path, data[begin : begin + length]

    yield from walk(0, "")
