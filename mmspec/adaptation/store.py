"""Generations of a checkpoint in a folder: each appears whole or not at all, and replaces the one before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mmspec.files import make_folder


class Store:
    """The newest generation of a checkpoint, in a numbered folder of ``folder``.

    A new one is written beside the newest and renamed; only then the older is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> Path | None:
        """Folder of the newest generation; None if there is none."""
        return max(self._generations(), default=None)

    def write(self, write: Callable[[Path], None]) -> None:
        """Write a generation.

        Args:
            write: fills a folder.

        Raises:
            UserError: the folder cannot be written, or the disk is full.
        """
        before = self._generations()
        number = int(max(before).name) + 1 if before else 0
        make_folder(self.folder / f"{number:08}", write, hint="")
        for one in before:
            shutil.rmtree(one, ignore_errors=True)

    def _generations(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if path.name.isdecimal() and len(path.name) == 8]
