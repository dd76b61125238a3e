"""Datastore drafter: lookup of continuations of the last tokens in a suffix array of texts on disk.

REST (arXiv 2311.08252) uses the longest context that occurs; here, its counts are mixed with counts after a shorter
context. The continuations of all occurrences are merged into one tree.

The index is a folder with the tokens of the texts and their sorted suffixes. Lookups read parts of both files. The
files are not memory-mapped: if another process truncated them, this process would crash.

- ``config.json``: fields of ``StoreConfig``
- ``tokens``: concatenated texts, ``width`` bytes per token, big-endian, so that comparing bytes compares tokens. A
  separator, the token ``vocab_size``, follows each text, and ``DEPTH`` separators end the file.
- ``suffixes``: positions in ``tokens``, sorted by the next ``DEPTH`` tokens, ``place`` bytes each, little-endian.

The build uses bounded memory: suffixes are distributed to files by their first tokens, and each file is sorted. A file
with more than ``_SORTED`` suffixes is split again, by the tokens after their common prefix.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.growth import Children, LookUpDrafter, mixed
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError, explained
from mmspec.files import make_folder, read_json
from mmspec.validation import option, options, read

DEPTH = 16
"""Tokens by which suffixes are sorted: the longest context that a lookup can match."""

CONFIG, TOKENS, SUFFIXES = "config.json", "tokens", "suffixes"
FORMAT: Literal["mmspec datastore 1"] = "mmspec datastore 1"
_IN_MEMORY = 1 << 14  # cached suffixes and blocks of positions: 10 MiB
_BLOCK = 64


@options
class StoreConfig:
    """Contents of ``config.json``.

    Attributes:
        model: model whose tokenizer encoded the texts.
        vocab_size: vocabulary size of this model, and the separator token.
        width: bytes per token.
        place: bytes per position.
    """

    format: Literal["mmspec datastore 1"]
    model: str
    vocab_size: int = option(..., ge=1, le=2**24)
    width: Literal[2, 4] = option(...)
    tokens: int = option(..., ge=0)
    place: Literal[4, 8] = option(...)
    suffixes: int = option(..., ge=0)


class SuffixIndex:
    """Suffix array of a store. Lookups read only the bytes that they need. Raises ``UserError``: a file is missing or
    its size does not match ``config.json``. Lookups raise it if that changes later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read(StoreConfig, read_json(folder / CONFIG), str(folder / CONFIG))
        if self.config.vocab_size >= 1 << 8 * self.config.width:
            raise UserError(f"{folder / CONFIG}: expected tokens of 4 bytes, received {self.config.width}")
        if sys.byteorder != "little":
            raise UserError(f"{folder}: expected a little-endian machine, received {sys.byteorder}")
        self._tokens = _Bytes(folder / TOKENS, self.config.tokens * self.config.width)
        self._places = _Bytes(folder / SUFFIXES, self.config.suffixes * self.config.place)
        self._suffix = lru_cache(_IN_MEMORY)(self._read_suffix)  # every search starts at the same suffixes
        self._block = lru_cache(_IN_MEMORY)(self._read_block)  # and ends at adjacent places

    def __reduce__(self) -> tuple[Any, ...]:
        return SuffixIndex, (self.folder,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixIndex:
        return self  # immutable

    def token(self, position: int) -> int:
        """The token at a position; the separator at the end of a text."""
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
        """Places of the suffixes that start with ``context``, of up to ``DEPTH`` tokens."""
        key = b"".join(token.to_bytes(self.config.width, "big") for token in context)
        every, size, suffix = range(self.config.suffixes), len(key), self._suffix

        def begins(place: int) -> bytes:
            return suffix(place)[:size]

        low = bisect_left(every, key, key=begins)
        if low == len(every) or begins(low) != key:
            return range(low, low)
        step = 1  # galloping search: most contexts occur only a few times
        while low + step < len(every) and begins(low + step) == key:
            step *= 2
        return range(low, bisect_right(every, key, low + step // 2, min(low + step, len(every)), key=begins))

    def _read_suffix(self, place: int) -> bytes:
        """The first ``DEPTH`` tokens of a suffix."""
        width = self.config.width
        return self._tokens.read(width * self._position(place), width * DEPTH)

    def longest(self, tokens: Sequence[int]) -> tuple[int, range]:
        """Length of the longest suffix of ``tokens`` that occurs, up to ``DEPTH``, and its places."""
        found, low, high = range(0), 0, min(len(tokens), DEPTH)
        while low < high:  # if a suffix occurs, so do all shorter suffixes
            middle = (low + high + 1) // 2
            if places := self.find(tokens[len(tokens) - middle :]):
                low, found = middle, places
            else:
                high = middle - 1
        return low, found

    def following(self, places: range, length: int, most: int) -> list[int]:
        """Positions after up to ``most`` evenly spaced occurrences of a context of ``length`` tokens."""
        step = max(1, -(-len(places) // most))
        return [self._position(place) + length for place in places[::step]]


class _Bytes:
    """Random access to a file that must have ``size`` bytes."""

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


_log = logging.getLogger("mmspec.datastore")
_SORTED = 1 << 21  # suffixes sorted at once: 64 to 128 MiB of tokens
_CHUNK = 1 << 20  # suffixes read at once
_FILES = 200  # files that suffixes are distributed to at once


def build_store(texts: Iterable[Sequence[int]], vocab_size: int, model: str, folder: Path) -> StoreConfig:
    """Build a datastore atomically.

    Args:
        folder: the store's folder; must not exist.

    Raises:
        UserError: the folder exists, another process is writing it, it cannot be written, or there are no texts.
    """
    configs: list[StoreConfig] = []
    make_folder(folder, lambda part: configs.append(_write(texts, vocab_size, model, part)), hint="", new=True)
    return configs[0]


def _write(texts: Iterable[Sequence[int]], vocab_size: int, model: str, folder: Path) -> StoreConfig:
    width: Literal[2, 4] = 2 if vocab_size < 1 << 16 else 4
    tokens = 0
    _log.info("encoding the texts")
    with (folder / TOKENS).open("wb") as out:
        separated = ([*text, vocab_size] for text in texts if len(text))
        for text in chain(separated, [[vocab_size] * DEPTH]):
            out.write(np.asarray(text, dtype=f">u{width}").tobytes())
            tokens += len(text)
    if tokens == DEPTH:
        raise UserError("a datastore needs texts: got none")
    place: Literal[4, 8] = 4 if tokens < 1 << 32 else 8
    mapped = np.memmap(folder / TOKENS, dtype=f">u{width}", mode="r")
    _log.info("sorting the suffixes of %d tokens", tokens)
    with (folder / SUFFIXES).open("wb") as out:
        sorter = _Sorter(mapped, vocab_size, f"<u{place}", folder, out)
        sorter.sort(None, 0)
    config = StoreConfig(FORMAT, model, vocab_size, width, tokens, place, sorter.written)
    (folder / CONFIG).write_text(json.dumps(asdict(config)) + "\n")
    return config


class _Sorter:
    """Sorts the suffixes of ``tokens`` into a file."""

    def __init__(self, tokens: np.ndarray, separator: int, kind: str, folder: Path, out: BinaryIO) -> None:
        self._tokens, self._separator, self._kind = tokens, separator, kind
        self._folder, self._out, self._numbers = folder, out, count()
        self.written = 0

    def sort(self, file: Path | None, depth: int) -> None:
        """Append suffixes that share their first ``depth`` tokens, sorted. ``file``: positions of the suffixes; None
        takes all positions except separators."""
        counts = np.zeros(self._separator + 1, dtype=np.int64)
        if depth < DEPTH:
            for positions in self._read(file):
                counts += np.bincount(self._tokens[positions + depth], minlength=len(counts))
        if depth == DEPTH or counts.sum() <= _SORTED:
            self._sort_here(file, depth)
            return
        for bucket in self._distribute(file, depth, counts):
            # A bucket with several first tokens is smaller than its parent: split it by the same token again.
            firsts = {int(one) for chunk in self._read(bucket) for one in np.unique(self._tokens[chunk + depth])}
            self.sort(bucket, depth + (len(firsts) == 1))
            bucket.unlink()

    def _sort_here(self, file: Path | None, depth: int) -> None:
        for positions in self._read(file) if depth == DEPTH else [np.concatenate([*self._read(file)])]:
            if depth < DEPTH:
                windows = self._tokens[positions[:, None] + np.arange(depth, DEPTH)]
                keys = np.ascontiguousarray(windows).view(f"S{windows.itemsize * windows.shape[1]}")[:, 0]
                positions = positions[keys.argsort(kind="stable")]
            self._out.write(positions.astype(self._kind).tobytes())
            self.written += len(positions)

    def _distribute(self, file: Path | None, depth: int, counts: np.ndarray) -> list[Path]:
        """Distribute the positions to files, ordered by the tokens at ``depth``."""
        most = max(_SORTED, -(-int(counts.sum()) // _FILES))
        bucket_of = np.zeros(len(counts), dtype=np.int64)
        bucket = size = 0
        for token in np.flatnonzero(counts):
            if size and size + counts[token] > most:
                bucket, size = bucket + 1, 0
            bucket_of[token] = bucket
            size += int(counts[token])
        files = [self._folder / f"part-{next(self._numbers)}" for _ in range(bucket + 1)]
        with ExitStack() as stack:
            opened = [stack.enter_context(one.open("wb")) for one in files]
            for positions in self._read(file):
                buckets = bucket_of[self._tokens[positions + depth]]
                order = buckets.argsort(kind="stable")
                ends = np.searchsorted(buckets[order], np.arange(bucket + 2))
                for number in np.unique(buckets):
                    chosen = positions[order[ends[number] : ends[number + 1]]]
                    opened[number].write(chosen.astype(np.int64).tobytes())
        return files

    def _read(self, file: Path | None) -> Iterator[np.ndarray]:
        """Positions in chunks, (n,) int64."""
        if file is not None:
            with file.open("rb") as opened:
                while found := opened.read(8 * _CHUNK):
                    yield np.frombuffer(found, dtype=np.int64)
            return
        for start in range(0, len(self._tokens), _CHUNK):
            chunk = self._tokens[start : start + _CHUNK]
            yield start + np.flatnonzero(chunk != self._separator)


_OCCURRENCES = 64  # maximum occurrences read per context, evenly spaced
_FEW = 8  # with fewer occurrences, a shorter context is read too

_State = tuple[list[int], ...]  # positions of the next token per context, longest context first


class Datastore(LookUpDrafter):
    """Datastore drafter. Drafts depend only on the sequence and the store."""

    learns = False

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.index = SuffixIndex(Path(folder))

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        expected = self.index.config.vocab_size
        received = target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]
        if expected != received:
            raise UserError(f"the datastore was built for a vocabulary of {expected} tokens: the target has {received}")
        self._target = target
        self.select([])

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.rows += history

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[_State, Children]:
        tokens = [*self.rows[row], *path] if path else self.rows[row]
        length, places = self.index.longest(tokens)
        state = [self.index.following(places, length, _OCCURRENCES)]
        if length > 1 and len(places) < _FEW:
            shorter = length // 2
            state.append(self.index.following(self.index.find(tokens[-shorter:]), shorter, _OCCURRENCES))
        return tuple(state), self._children

    def _children(self, state: _State) -> Iterator[tuple[int, float, _State]]:
        groups: list[dict[int, list[int]]] = []
        for positions in state:
            groups.append({})
            for position in positions:
                token = self.index.token(position)
                if token < self.index.config.vocab_size:
                    groups[-1].setdefault(token, []).append(position + 1)
        probs = mixed({token: len(after) for token, after in group.items()} for group in groups)
        for token, p in probs.items():
            yield token, p, tuple(group[token] for group in groups if token in group)


SPEC = DrafterSpec(
    "datastore",
    "Datastore",
    "looks up the last tokens in an index of texts on disk (REST, arXiv 2311.08252)",
    Datastore,
    argument="STORE",
    chains=False,
)
