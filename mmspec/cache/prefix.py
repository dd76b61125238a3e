"""Prefixes: states of a prompt's first tokens, and files of them for later processes.

A file holds up to 512 tokens, which follow the tokens of another file. Its name has two hashes: of all inputs and
tokens before the file, and of these with its own tokens. So prefixes share the files of common blocks, and a folder
needs no index and no lock for several processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.core.target import BLOCK, Feature, State, Stop
from mmspec.errors import UserError, first_line
from mmspec.files import atomic

LEAST_TOKENS = 8
"""Minimum length of a prefix to reuse."""

_FORMAT = "mmspec prefix 1"
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.safetensors")
_ERRORS = OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens of one row, a prompt or a prompt with its answer, and their states and features.

    Attributes:
        key: key of all inputs except tokens that the states depend on.
        least: minimum number of tokens to use: a prefix must contain all images and videos.
        features: (1, length, hidden) each, hidden states that drafters read.
        embeds: (1, length, hidden), input embeddings; None if the decoder embeds the tokens itself.
        positions: (1, length) or (axes, 1, length) int64, the decoder's ``position_ids``; None if it has no such input.
    """

    tokens: list[int]
    key: Hashable
    state: State
    features: dict[Feature, Tensor]
    embeds: Tensor | None = None
    positions: Tensor | None = None
    least: int = 0

    @property
    def nbytes(self) -> int:
        tensors = [self.embeds, self.positions, *self.features.values()]
        stops = sum(stop.nbytes for stop in self.state.stops.values())
        return self.state.nbytes + stops + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def first(self, length: int) -> Prefix:
        """The first ``length`` tokens, a number from ``shared``."""
        features = {name: states[:, :length] for name, states in self.features.items()}
        embeds = None if self.embeds is None else self.embeds[:, :length]
        positions = None if self.positions is None else self.positions[..., :length]
        tokens, state = self.tokens[:length], self.state.first(length)
        return Prefix(tokens, self.key, state, features, embeds, positions, self.least)

    def shared(self, tokens: Sequence[int]) -> int:
        """Number of tokens that a prompt can reuse."""
        stops = {end: stop.logits is not None for end, stop in self.state.stops.items()}
        return reusable(common(self.tokens, tokens), len(tokens), stops, self.state.cuts, self.least)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def reusable(shared: int, prompt: int, stops: Mapping[int, bool], cuts: bool, least: int) -> int:
    """Number of tokens that a prompt of ``prompt`` tokens can reuse of ``shared`` equal tokens; 0 for none.

    Args:
        stops: numbers of tokens with known states, and whether the logits after them are known.
        cuts: whether other numbers of tokens can be reused too.
    """
    ends = [end for end, known in stops.items() if end <= shared and (known or end < prompt)]
    most = max([*ends, min(shared, prompt - 1) if cuts else 0])  # a whole prompt needs its last logits
    return most if most >= max(least, LEAST_TOKENS) else 0


@dataclass(frozen=True)
class _Header:
    """Contents of a file without its states; ``stops`` as for ``reusable``, other attributes as in ``Prefix``."""

    tokens: list[int]
    stops: dict[int, bool]
    layout: Any
    cuts: bool
    least: int


@dataclass
class PrefixFiles:
    """Files of prefixes in a folder of at most ``limit`` bytes; the least recently used files are removed first.

    Files of other models and damaged files are ignored, and removed like the others. Raises ``UserError``: the folder
    cannot be created.
    """

    folder: Path
    limit: int
    _headers: dict[str, _Header | None] = field(default_factory=dict, repr=False)  # by name; None: to be ignored

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)  # prompts can be read from the states
        except OSError as error:
            raise UserError(f"prefix_cache_dir must be a folder that can be made: got {first_line(error)}") from error

    def find(self, tokens: Sequence[int], key: Hashable, reads: Sequence[Feature]) -> tuple[list[str], int] | None:
        """Files with the most tokens that a prompt can reuse, and the number of these tokens."""
        following, chain = defaultdict[str, list[str]](list), list[str]()
        names = os.listdir(self.folder) if self.folder.is_dir() else ()
        for match in filter(None, map(_NAME.fullmatch, names)):
            following[match[1]].append(match[0])
        self._headers = {name: self._headers[name] for name in self._headers.keys() & set(names)}
        parent, start = _root(key, reads), 0
        found, most = None, 0
        while True:
            whole, rest = None, tokens[start : start + BLOCK]
            for name in following[parent]:
                if (header := self._header(name)) is not None:
                    shared = common(header.tokens, rest)
                    end = reusable(start + shared, len(tokens), header.stops, header.cuts, header.least)
                    if end > max(most, start):
                        found, most = ([*chain, name], end), end
                    whole = name if shared == BLOCK else whole
            if whole is None:
                return found
            chain.append(whole)
            parent, start = _own(whole), start + BLOCK

    def read(self, chain: Sequence[str], length: int, key: Hashable, target: Any) -> Prefix | None:
        """The first ``length`` tokens in files from ``find``; None if one is damaged or was removed."""
        try:
            files = [load_file(self.folder / name) for name in chain]
            prefix = _joined(files, [self._headers[name] for name in chain], length, key, target)
        except _ERRORS:
            self._headers |= dict.fromkeys(chain)
            return None
        self._use(chain)
        return prefix

    def write(self, prefix: Prefix) -> Iterator[None]:
        """Write the missing files of a prefix, one per step."""
        chain: list[str] = []
        parent, length = _root(prefix.key, list(prefix.features)), len(prefix.tokens)
        for start in range(0, length, BLOCK):
            part = slice(start, min(start + BLOCK, length))
            stops = {at: stop for at, stop in prefix.state.stops.items() if start < at <= part.stop and stop.nbytes}
            name, header = f"{parent}-{_digest(parent, prefix.tokens[part])}.safetensors", None
            chain.append(name)
            if (self.folder / name).exists():
                header = self._header(name)
            if header is None or any(
                header.stops.get(at, -1) < (stop.logits is not None) for at, stop in stops.items()
            ):
                with atomic(self.folder / name) as new:
                    _save(prefix, part, stops, new)
                self._headers.pop(name, None)
                self._use(chain)
                self._evict()
                yield
            parent = _own(name)
        self._use(chain)

    def _header(self, name: str) -> _Header | None:
        if name not in self._headers:
            self._headers[name] = None
            with suppress(*_ERRORS), safe_open(self.folder / name, "pt") as file:
                tokens, about = file.get_tensor("tokens").tolist(), json.loads(file.metadata()[_FORMAT])
                keys = file.keys()
                names = [one.split(".")[1:] for one in keys if one.startswith("stop.")]
                stops = {int(at): [at, "logits"] in names for at, _ in names}
                if file.metadata()["name"] == name:
                    self._headers[name] = _Header(tokens, stops, **about)
        return self._headers[name]

    def _use(self, chain: Sequence[str]) -> None:
        """Mark files as used, the first in the chain as the last, so that those after it are removed before it."""
        for name in reversed(chain):
            with suppress(OSError):
                os.utime(self.folder / name, ns=(time_ns(), time_ns()))  # finer than the clock of files

    def _evict(self) -> None:
        files = []
        for file in os.scandir(self.folder):
            with suppress(OSError):  # another process may remove it
                if _NAME.fullmatch(file.name):
                    files.append((file.stat().st_mtime_ns, file.stat().st_size, file.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total > self.limit:
                with suppress(OSError):
                    os.remove(path)
                total -= size


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _root(key: Hashable, reads: Iterable[Feature]) -> str:
    """First hash in the name of a prefix's first file."""
    return _digest(_FORMAT, key, sorted(map(str, reads)))


def _own(name: str) -> str:
    """Second hash in a file's name."""
    return name[33:65]


def _save(prefix: Prefix, part: slice, stops: Mapping[int, Stop], path: Path) -> None:
    """Write some tokens of a prefix, and the stops within them."""
    cache = prefix.state.cache
    about = {"layout": cache.layout, "cuts": prefix.state.cuts, "least": prefix.least}
    tensors = {f"cache.{number:04}": states for number, states in enumerate(cache.parts(part))}
    tensors |= {f"feature.{json.dumps(name)}": states[:, part] for name, states in prefix.features.items()}
    if prefix.embeds is not None:
        tensors["embeds"] = prefix.embeds[:, part]
    if prefix.positions is not None:
        tensors["positions"] = prefix.positions[..., part]
    for at, stop in stops.items():
        tensors |= {f"stop.{at}.{number:04}": states for number, states in enumerate(stop.recurrent)}
        tensors |= {} if stop.logits is None else {f"stop.{at}.logits": stop.logits}
    tensors = {name: states.clone(memory_format=torch.contiguous_format).cpu() for name, states in tensors.items()}
    tensors["tokens"] = torch.tensor(prefix.tokens[part], dtype=torch.long)
    save_file(tensors, path, {_FORMAT: json.dumps(about), "name": path.name})


def _joined(
    files: Sequence[dict[str, Tensor]], headers: Sequence[Any], length: int, key: Hashable, target: Any
) -> Prefix:
    device, last = target.device, headers[-1]

    def joined(name: str, axis: int = -2) -> Tensor:
        return torch.cat([file[name] for file in files], axis).narrow(axis, 0, length).to(device)

    stops: dict[int, Stop] = {}
    for file, header in zip(files, headers, strict=True):
        for at, known in header.stops.items():
            states = [file[name] for name in sorted(file) if name.startswith(f"stop.{at}.0")]
            logits = file[f"stop.{at}.logits"].to(device, copy=True) if known else None
            stops[at] = Stop(tuple(one.to(device, copy=True) for one in states), logits)  # not mapped from the file
    stops = {at: stop for at, stop in stops.items() if at <= length}
    parts = [joined(name) for name in sorted(files[0]) if name.startswith("cache.")]
    cache = target.loaded(last.layout, parts, () if last.cuts else stops[length].recurrent, length)
    state = State(cache, length, sum(part.nbytes for part in parts), last.cuts, stops)
    features = {json.loads(name[8:]): joined(name) for name in files[0] if name.startswith("feature.")}
    embeds = joined("embeds") if "embeds" in files[0] else None
    positions = joined("positions", -1) if "positions" in files[0] else None
    return Prefix(joined("tokens", -1).tolist(), key, state, features, embeds, positions, last.least)
