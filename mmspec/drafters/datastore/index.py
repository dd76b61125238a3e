"""Index of a datastore: the tokens of its texts, and their suffixes in order, both in files that are mapped to memory.

A folder with

- ``config.json``: fields of ``StoreConfig``
- ``tokens``: the texts one after another, a token as ``width`` bytes, most significant first, so that comparing bytes
  compares tokens. After each text, and ``DEPTH`` times at the end, there is a separator, the token ``vocab_size``.
- ``suffixes``: positions in ``tokens``, in the order of the ``DEPTH`` tokens from there on, as ``place`` bytes, least
  significant first.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.checks import TEXT, Checked, Rule, required, whole
from mmspec.errors import UserError, explained
from mmspec.files import read_json

DEPTH = 16
"""Tokens of a suffix that are in order: the longest context that is found."""

CONFIG, TOKENS, SUFFIXES = "config.json", "tokens", "suffixes"
FORMAT = "mmspec datastore 1"
_KEPT = Rule(repr(FORMAT), lambda value: value == FORMAT)


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

    format: str = required(_KEPT)
    model: str = required(TEXT)
    vocab_size: int = required(whole(1, 2**24))
    width: int = required(whole(2, 4))
    tokens: int = required(whole(0))
    place: int = required(whole(4, 8))
    suffixes: int = required(whole(0))


class SuffixIndex:
    """See the module. Look-ups read the pages that they need; nothing else is loaded.

    Raises:
        UserError: a file is missing, or not as long as ``config.json`` says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = StoreConfig.read(read_json(folder / CONFIG), str(folder / CONFIG))
        self._bytes = _mapped(folder / TOKENS, self.config.tokens * self.config.width)
        places = _mapped(folder / SUFFIXES, self.config.suffixes * self.config.place)
        if sys.byteorder != "little":
            raise UserError(f"{folder}: expected a little-endian machine, received {sys.byteorder}")
        whole_places = memoryview(places)
        self._places = whole_places.cast("I") if self.config.place == 4 else whole_places.cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return SuffixIndex, (self.folder,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixIndex:
        return self  # never changed

    def token(self, position: int) -> int:
        """The token at a position; the separator where a text has ended."""
        width = self.config.width
        return int.from_bytes(self._bytes[width * position : width * position + width], "big")

    def find(self, context: Sequence[int]) -> range:
        """Places of the suffixes that begin with up to ``DEPTH`` tokens."""
        width = self.config.width
        key = b"".join(token.to_bytes(width, "big") for token in context)
        texts, size = self._bytes, len(key)

        def begins(position: int) -> bytes:
            return texts[width * position : width * position + size]

        low = bisect_left(self._places, key, key=begins)
        if low == len(self._places) or begins(self._places[low]) != key:
            return range(low, low)
        return range(low, bisect_right(self._places, key, low, key=begins))

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
        return [self._places[place] + length for place in places[::step]]


def _mapped(file: Path, size: int) -> bytes | mmap.mmap:
    with explained(f"{file}: expected a file of {size} bytes", OSError, ValueError), file.open("rb") as opened:
        if (received := file.stat().st_size) != size:
            raise UserError(f"{file}: expected {size} bytes, received {received}")
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
