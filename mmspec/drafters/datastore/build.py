"""Building of a datastore in bounded memory: suffixes are distributed to files by their first tokens, and sorted there.

A file with more than ``_IN_MEMORY`` suffixes is distributed again, by the tokens after those that all of them share.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmspec.drafters.datastore.index import CONFIG, DEPTH, FORMAT, SUFFIXES, TOKENS, StoreConfig
from mmspec.errors import UserError
from mmspec.files import make_folder

_log = logging.getLogger("mmspec.datastore")
_IN_MEMORY = 1 << 21  # suffixes that are sorted at once: 64 to 128 MiB of tokens
_CHUNK = 1 << 20  # suffixes that are read at once
_FILES = 200  # into which suffixes are distributed at once


def build_store(texts: Iterable[Sequence[int]], vocab_size: int, model: str, folder: Path) -> StoreConfig:
    """Build a datastore, which appears whole or not at all.

    Args:
        texts: tokens of each.
        folder: of the store; must not exist.

    Raises:
        UserError: the folder exists, another process writes it, or it cannot be written; or the texts are empty.
    """
    configs: list[StoreConfig] = []
    make_folder(folder, lambda part: configs.append(_write(texts, vocab_size, model, part)), hint="", new=True)
    return configs[0]


def _write(texts: Iterable[Sequence[int]], vocab_size: int, model: str, folder: Path) -> StoreConfig:
    width = 2 if vocab_size < 1 << 16 else 4
    tokens = 0
    _log.info("encoding the texts")
    with (folder / TOKENS).open("wb") as out:
        for text in _separated(texts, vocab_size):
            out.write(np.asarray(text, dtype=f">u{width}").tobytes())
            tokens += len(text)
    if tokens == DEPTH:
        raise UserError("a datastore needs texts: got none")
    place = 4 if tokens < 1 << 32 else 8
    mapped = np.memmap(folder / TOKENS, dtype=f">u{width}", mode="r")
    _log.info("sorting the suffixes of %d tokens", tokens)
    with (folder / SUFFIXES).open("wb") as out:
        sorter = _Sorter(mapped, vocab_size, f"<u{place}", folder, out)
        sorter.sort(None, 0)
    config = StoreConfig(FORMAT, model, vocab_size, width, tokens, place, sorter.written)
    (folder / CONFIG).write_text(json.dumps(asdict(config)) + "\n")
    return config


def _separated(texts: Iterable[Sequence[int]], separator: int) -> Iterator[Sequence[int]]:
    for text in texts:
        if len(text):
            yield [*text, separator]
    yield [separator] * DEPTH


class _Sorter:
    """Sorts the suffixes of ``tokens`` into a file.

    Attributes:
        written: suffixes so far.
    """

    def __init__(self, tokens: np.ndarray, separator: int, kind: str, folder: Path, out: BinaryIO) -> None:
        self._tokens, self._separator, self._kind = tokens, separator, kind
        self._folder, self._out, self._numbers = folder, out, count()
        self.written = 0

    def sort(self, file: Path | None, depth: int) -> None:
        """Append suffixes that share their first ``depth`` tokens, in order.

        Args:
            file: with their positions; None takes all, without those at separators.
        """
        counts = np.zeros(self._separator + 1, dtype=np.int64)
        if depth < DEPTH:
            for positions in self._read(file):
                counts += np.bincount(self._tokens[positions + depth], minlength=len(counts))
        if depth == DEPTH or counts.sum() <= _IN_MEMORY:
            self._sort_here(file, depth)
            return
        for bucket in self._distribute(file, depth, counts):
            # One with several first tokens is smaller than this one: it is distributed by the same token again.
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
        """Write the positions to files, in the order of the tokens at ``depth``."""
        most = max(_IN_MEMORY, -(-int(counts.sum()) // _FILES))
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
