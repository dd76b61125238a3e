"""Index of a datastore: the tokens of its texts, and their suffixes in order, both in files that look-ups read in
parts. They are not mapped to memory: the process would end if another one cut them.

A folder with

- ``config.json``: fields of ``StoreConfig``
- ``tokens``: the texts one after another, a token as ``width`` bytes, most significant first, so that comparing bytes
  compares tokens. After each text, and ``DEPTH`` times at the end, there is a separator, the token ``vocab_size``.
- ``suffixes``: positions in ``tokens``, in the order of the ``DEPTH`` tokens from there on, as ``place`` bytes, least
  significant first.
"""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmspec.checks import TEXT, Checked, Rule, required, whole
from mmspec.errors import UserError, explained
from mmspec.files import read_json

DEPTH = 16
"""Tokens of a suffix that are in order: the longest context that is found."""

CONFIG, TOKENS, SUFFIXES = "config.json", "tokens", "suffixes"
FORMAT = "mmspec datastore 1"
_IN_MEMORY = 1 << 14  # suffixes, and blocks of positions: 10 MiB
_BLOCK = 64
_FORMAT = Rule(repr(FORMAT), lambda value: value == FORMAT)
_WIDTH = Rule("2 or 4", lambda value: value in (2, 4))
_PLACE = Rule("4 or 8", lambda value: value in (4, 8))


@dataclass(frozen=True)
class StoreConfig(Checked):
    """Contents of ``config.json``.

    Attributes:
        format: ``FORMAT``.
        model: whose tokenizer the texts were encoded by.
        vocab_size: of this model; the separator.
        width: bytes of a token.
        tokens: number of tokens, separators included.
        place: bytes of a position.
        suffixes: number of positions.
    """

    format: str = required(_FORMAT)
    model: str = required(TEXT)
    vocab_size: int = required(whole(1, 2**24))
    width: int = required(_WIDTH)
    tokens: int = required(whole(0))
    place: int = required(_PLACE)
    suffixes: int = required(whole(0))


class SuffixIndex:
    """Suffix index of a store. Look-ups read the bytes that they need; nothing else is loaded.

    Raises:
        UserError: a file is missing, or not as long as ``config.json`` says. Look-ups raise it if that changes later.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = StoreConfig.read(read_json(folder / CONFIG), str(folder / CONFIG))
        if self.config.vocab_size >= 1 << 8 * self.config.width:
            raise UserError(f"{folder / CONFIG}: expected tokens of 4 bytes, received {self.config.width}")
        if sys.byteorder != "little":
            raise UserError(f"{folder}: expected a little-endian machine, received {sys.byteorder}")
        self._tokens = _Bytes(folder / TOKENS, self.config.tokens * self.config.width)
        self._places = _Bytes(folder / SUFFIXES, self.config.suffixes * self.config.place)
        self._suffix = lru_cache(_IN_MEMORY)(self._read_suffix)  # every search begins with the same ones,
        self._block = lru_cache(_IN_MEMORY)(self._read_block)  # and ends with places beside each other

    def __reduce__(self) -> tuple[Any, ...]:
        return SuffixIndex, (self.folder,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixIndex:
        return self  # never changed

    def token(self, position: int) -> int:
        """The token at a position; the separator where a text has ended."""
        width = self.config.width
        return int.from_bytes(self._tokens.read(width * position, width), "big")

    def _position(self, place: int) -> int:
        block, at = divmod(place, _BLOCK)
        return self._block(block)[at]

    def _read_block(self, block: int) -> memoryview[int]:
        size, start = self.config.place, _BLOCK * block
        count = min(_BLOCK, self.config.suffixes - start)
        read = memoryview(self._places.read(size * start, size * count))
        return read.cast("I") if size == 4 else read.cast("Q")

    def find(self, context: Sequence[int]) -> range:
        """Places of the suffixes that begin with up to ``DEPTH`` tokens."""
        key = b"".join(token.to_bytes(self.config.width, "big") for token in context)
        every, size, suffix = range(self.config.suffixes), len(key), self._suffix

        def begins(place: int) -> bytes:
            return suffix(place)[:size]

        low = bisect_left(every, key, key=begins)
        if low == len(every) or begins(low) != key:
            return range(low, low)
        step = 1  # most contexts occur a few times: the end is near
        while low + step < len(every) and begins(low + step) == key:
            step *= 2
        return range(low, bisect_right(every, key, low + step // 2, min(low + step, len(every)), key=begins))

    def _read_suffix(self, place: int) -> bytes:
        """The first ``DEPTH`` tokens of a suffix."""
        width = self.config.width
        return self._tokens.read(width * self._position(place), width * DEPTH)

    def longest(self, tokens: Sequence[int]) -> tuple[int, range]:
        """Length of the longest end of ``tokens`` that occurs, up to ``DEPTH``, and its places."""
        found, low, high = range(0), 0, min(len(tokens), DEPTH)
        while low < high:  # where an end occurs, shorter ones do
            middle = (low + high + 1) // 2
            if places := self.find(tokens[len(tokens) - middle :]):
                low, found = middle, places
            else:
                high = middle - 1
        return low, found

    def following(self, places: range, length: int, most: int) -> list[int]:
        """Positions after a context of ``length`` tokens: of up to ``most`` of its places, evenly spaced."""
        step = max(1, -(-len(places) // most))
        return [self._position(place) + length for place in places[::step]]


class _Bytes:
    """A file of ``size`` bytes."""

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        with explained(f"{file}: expected a file of {size} bytes", OSError):
            self._descriptor = os.open(file, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            if (received := os.fstat(self._descriptor).st_size) != size:
                raise UserError(f"{file}: expected {size} bytes, received {received}")

    def read(self, start: int, size: int) -> bytes:
        try:
            found = os.pread(self._descriptor, size, start)
        except (OSError, OverflowError) as error:
            raise UserError(f"{self._file}: expected a file that can be read, received {error}") from error
        if len(found) < size:
            raise UserError(f"{self._file}: expected {size} bytes at {start}, received {len(found)}")
        return found
