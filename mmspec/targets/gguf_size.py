"""The size that a GGUF file must have according to its header: files whose download was interrupted are shorter."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

from mmspec.errors import UserError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of the other types of values
_ALIGNMENT = b"general.alignment"


def check_complete(file: Path, block_sizes: dict[int, tuple[int, int]]) -> None:
    """Check that a file contains all its header and tensors announce. Files of other formats and versions pass.

    Args:
        block_sizes: elements and bytes of a block, by tensor type.

    Raises:
        UserError: the file is shorter.
    """
    with file.open("rb") as opened:
        _Scan(file, opened).check(block_sizes)


class _Scan:
    """A pass over a file's header."""

    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self._file, self._opened, self._size = file, opened, file.stat().st_size
        self._at = 0
        self._order = "<"

    def check(self, block_sizes: dict[int, tuple[int, int]]) -> None:
        magic = self._bytes(4)
        (version,) = struct.unpack("<I", self._bytes(4))
        if version & 0xFFFF == 0:  # written by a big-endian machine
            self._order, version = ">", version >> 24
        if magic != b"GGUF" or version not in _VERSIONS:
            return
        tensors, entries, alignment = self._number("Q"), self._number("Q"), 32
        for _ in range(entries):
            key, kind = self._string(), self._number("I")
            if key == _ALIGNMENT and kind == 4:
                alignment = self._number("I") or alignment
            elif not self._skip(kind):
                return
        infos = [(self._string(), self._shape(), self._number("I"), self._number("Q")) for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        for _, shape, kind, offset in infos:
            if kind in block_sizes:
                elements, size = block_sizes[kind]
                self._at = max(self._at, start + offset + prod(shape) // elements * size)
        self._need(0, exact=True)

    def _need(self, count: int, exact: bool = False) -> None:
        end = self._at + count
        if end > self._size:
            least = "" if exact else "at least "
            raise UserError(
                f"{self._file} is incomplete, as after an interrupted download: expected {least}{end} bytes, found "
                f"{self._size}"
            )

    def _bytes(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._opened.read(count)

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack(self._order + kind, self._bytes(struct.calcsize(kind)))
        return int(value)

    def _string(self) -> bytes:
        return self._bytes(self._number("Q"))

    def _shape(self) -> list[int]:
        return [self._number("Q") for _ in range(self._number("I"))]

    def _skip(self, kind: int) -> bool:
        """Skip a value; returns whether its type is known."""
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind in _BYTES:
                self._need(count * _BYTES[kind])
                self._at += count * _BYTES[kind]
                self._opened.seek(self._at)
                return True
            return all(self._skip(kind) for _ in range(count))
        elif kind in _BYTES:
            self._bytes(_BYTES[kind])
        else:
            return False
        return True
