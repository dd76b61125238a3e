"""Reader of GGUF files: metadata at once, tensors on access.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from collections.abc import Callable, Container, Sequence
from copy import copy
from itertools import accumulate, pairwise
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import UserError, explained, missing, shown
from mmspec.ops import cpu_library
from mmspec.quantisation.formats import FORMATS, StoredRows

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_FIRST, _LONGEST = 1 << 23, 1 << 27  # bytes of the first read, longer than most headers, and of the longest header
_AXES = 4  # of a tensor, at most
_MOST, _WIDEST, _DEEPEST = 1 << 27, 1 << 20, 1000  # of counts by default, except context lengths, and of blocks
_COUNT = re.compile(r".*_(count|length|size|token_id)(_\w+)?")  # keys of counts, one or a list
_PART = re.compile(r"(.*-)(\d{5})(-of-\d{5}\b.*)", re.DOTALL)
_PROJECTOR = b"general.architecture" + struct.pack("<IQ", _STRING, 4) + b"clip"
_REQUIRED: Any = object()


def file_in(name: str | Path) -> Path | None:
    """The GGUF file of a model name: the file itself, or the only GGUF file in a folder without ``config.json``, not
    counting projector files; None for other names. Parts of one model count as one file. Raises ``UserError``: the
    folder has several."""
    path = Path(name)
    return path if path.exists() and not path.is_dir() else _only(path, "GGUF file", projector=False)


def projector_in(name: str | Path) -> Path | None:
    """The ``mmproj`` file in this folder, with vision tower and projector; returns and raises like ``file_in``."""
    return _only(Path(name), "mmproj file", projector=True)


def _only(folder: Path, what: str, projector: bool) -> Path | None:
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    paths = [path for path in sorted(folder.iterdir()) if _has_projector(path) is projector]
    found = {_part_name(path.name, 1): path for path in reversed(paths)}
    if len(found) > 1:
        raise UserError(f"cannot load model {str(folder)!r}: expected one {what}, found {len(found)}; name one of them")
    return next(iter(found.values()), None)


def _has_projector(path: Path) -> bool | None:
    """Whether a GGUF file, by suffix or magic number, has a projector, by name or content; None for other files."""
    start = b""
    if path.is_file() and os.access(path, os.R_OK):
        with path.open("rb") as opened:
            start = opened.read(4096)
    if path.suffix.lower() != ".gguf" and not start.startswith(_MAGIC):
        return None
    return "mmproj" in path.name.lower() or _PROJECTOR in start


def _part_name(name: str, number: int) -> str:
    """Name of another part of a model; the name itself if it names no part."""
    return _PART.sub(lambda match: f"{match[1]}{number:05}{match[3]}", name)


class GGUFFile:
    """An open GGUF file, or all parts of a model. Replacing the file on disk does not affect later reads.

    Args:
        path: the file, or any part of ``NAME-00001-of-00003.gguf``.

    Attributes:
        path: the file, or the first part.
        metadata: values by key.
        tensors: tensors by name.
        digest: hash of the headers.

    Raises:
        UserError: the file has another format or version, is truncated or damaged, has counts that are not whole
            numbers, or lacks a part.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata, self.tensors, self.digest = _read(self.path)
        if (count := self.count("split.count", 1, most=99_999)) > 1:
            self._join(count)
        for key in filter(_COUNT.fullmatch, self.metadata):
            if key.endswith("_token_id"):
                self.count(key, least=0, most=(1 << 32) - 1)  # of missing tokens, -1 as an unsigned number
            elif key.endswith(".block_count"):
                self.count(key, most=_DEEPEST)
            else:
                least = int(key.endswith((".embedding_length", ".context_length")))
                self.counts(key, least=least, most=_MOST if "context_length" in key else _WIDEST)

    def _join(self, count: int) -> None:
        """Read all parts of a model; the metadata is in the first."""
        number, total = self.count("split.no", least=0, most=count - 1), self.count("split.tensors.count", least=0)
        end = f"{number + 1:05}-of-{count:05}"
        if not ((match := _PART.fullmatch(self.path.name)) and f"{match[2]}{match[3]}".startswith(end)):
            raise UserError(f"{self.path} is a part of a model: expected a name that ends with -{end}.gguf")
        self.tensors, digests = {}, []
        for at in range(count):
            path = self.path.with_name(_part_name(self.path.name, at + 1))
            metadata, tensors, digest = _read(path)
            found = [metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count")]
            if found != [at, count, total] or self.tensors.keys() & tensors:
                raise UserError(f"{path} is not a part of the same model as {self.path}: expected part {at + 1}")
            self.metadata = self.metadata if at else metadata
            self.tensors |= tensors
            digests.append(digest)
        self.path, self.digest = self.path.with_name(_part_name(self.path.name, 1)), " ".join(digests)
        if len(self.tensors) != total:
            raise UserError(f"{self.path} and its parts: expected {total} tensors, found {len(self.tensors)}")

    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return self.text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture, such as ``block_count``."""
        return self.metadata.get(f"{self.architecture()}.{key}", default)

    def count(self, key: str, default: Any = _REQUIRED, least: int = 1, most: int = _MOST) -> int:
        """A whole number.

        The key is one of the architecture, such as ``block_count``, or a whole key, such as ``general.file_type``. A
        missing key without a default raises ``UserError``, as another value does; so do the methods below.
        """
        return int(self._value(key, default, f"a whole number from {least} to {most}", _is_count(least, most)))

    def counts(
        self, key: str, layers: int = 1, default: Any = _REQUIRED, least: int = 1, most: int = _MOST
    ) -> list[int]:
        """Whole numbers: a list, or one number for all layers."""
        fits = _is_count(least, most)
        expected = f"whole numbers from {least} to {most}"
        found = self._value(key, default, expected, lambda x: all(map(fits, x if isinstance(x, list) else [x])))
        return found if isinstance(found, list) else [found] * layers

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        return float(self._value(key, default, "a number", lambda x: type(x) in (int, float) and isfinite(x)))

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return str(self._value(key, default, "a text", lambda x: isinstance(x, str)))

    def _value(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self.metadata and not key.startswith(("general.", "tokenizer.", "split.")):
            key = f"{self.architecture()}.{key}"
        if key not in self.metadata and default is not _REQUIRED:
            return default
        if key not in self.metadata or not fits(self.metadata[key]):
            found = shown(self.metadata[key]) if key in self.metadata else "none"
            raise UserError(f"cannot load model {str(self.path)!r}: expected {expected} in {key}, found {found}")
        return self.metadata[key]


def _is_count(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor], str]:
    """Metadata, tensors and the header's hash of one file; errors as for ``GGUFFile``."""
    with explained(f"cannot load model {str(path)!r}: expected a GGUF file", OSError):
        opened = _OpenFile(path)
    size = os.fstat(opened.fileno()).st_size
    header, count = b"", _FIRST
    while len(header) < min(size, count):  # read more if the header is longer
        header = os.pread(opened.fileno(), min(count, _LONGEST), 0)
        try:
            with explained(f"cannot load model {str(path)!r}", ValueError):
                return _parse(_Cursor(header), opened, size)
        except _ShortError as short:
            if len(header) == size or short.end > size:
                raise _incomplete(path, f"at least {short.end}", size) from None
            if len(header) == _LONGEST:
                raise UserError(
                    f"cannot load model {str(path)!r}: expected a header of at most {_LONGEST} bytes"
                ) from None
            count = max(2 * count, short.end)
    raise _incomplete(path, "at least 4", size)


def _incomplete(path: str | Path, expected: str, size: int) -> UserError:
    return UserError(f"{path} is incomplete, as after an interrupted download: expected {expected} bytes, found {size}")


def _parse(cursor: _Cursor, opened: _OpenFile, size: int) -> tuple[dict[str, Any], dict[str, GGUFTensor], str]:
    magic = cursor.bytes(4)
    if magic != _MAGIC:
        raise ValueError(f"expected a GGUF file, found one that begins with {magic!r}")
    version = cursor.number("I")
    if version not in _VERSIONS:
        order = " of a big-endian machine" if version & 0xFFFF == 0 else ""
        number = version & 0xFFFF or version >> 24
        raise ValueError(f"expected a GGUF file of version 2 or 3, found version {number}{order}")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.name(metadata)
        metadata[key] = cursor.value(cursor.number("I"), key)
    infos: dict[str, tuple[Any, ...]] = {}
    for _ in range(tensors):
        name, axes = cursor.name(infos), cursor.number("I")
        if not 1 <= axes <= _AXES:
            raise ValueError(f"expected 1 to {_AXES} axes of the tensor {name}, found {axes}")
        infos[name] = cursor.numbers("Q", axes), *cursor.numbers("IQ")
    digest = hashlib.sha256(cursor.data[: cursor.at]).hexdigest()
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"expected a power of two in general.alignment, found {shown(alignment)}")
    start = -(-cursor.at // alignment) * alignment
    found = {name: GGUFTensor(opened, name, shape, kind, start + at) for name, (shape, kind, at) in infos.items()}
    ordered = sorted(found.values(), key=lambda tensor: tensor.place)
    for one, following in pairwise(ordered):
        if one.place + one.size > following.place:
            raise ValueError(f"expected tensors one after another, found {one.name} and {following.name} overlapping")
    if wrong := [tensor.name for tensor in ordered if tensor.place % alignment]:
        raise ValueError(f"expected tensors at multiples of {alignment} bytes, found {wrong[0]} between them")
    if ordered and (end := ordered[-1].place + ordered[-1].size) > size:
        raise _incomplete(opened.name, str(end), size)
    return metadata, found, digest


class GGUFTensor:
    """A tensor of a file. ``tensor[...]`` reads it, dequantised to float32 unless it is stored in a dense dtype.

    Attributes:
        shape: outermost axis first.
        format: name of its GGML type.
        place, size: offset and size in the file, in bytes.
    """

    def __init__(self, file: _OpenFile, name: str, shape: tuple[int, ...], kind: int, place: int) -> None:
        gguf = _package(file.name)
        self.file, self.name, self.shape, self.place = file, name, tuple(reversed(shape)), place
        if 0 in shape:
            raise UserError(f"{file.name} has the tensor {name} of shape {self.shape}: expected no axis of zero")
        try:
            self._kind = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise UserError(
                f"{file.name} has the tensor {name} of type {kind}: expected a type up to {max(gguf.GGML_QUANT_SIZES)}"
            ) from None
        self.format: str = self._kind.name
        file.names[place] = name
        count, size = gguf.GGML_QUANT_SIZES[self._kind]
        if shape[0] % count:
            raise UserError(f"{file.name} has the tensor {name} with rows of {shape[0]}: expected multiples of {count}")
        self.size: int = prod(shape) // count * size

    def __getitem__(self, index: Any) -> Tensor:
        if self.format in _DENSE:
            return self.data().view(_DENSE[self.format]).view(self.shape)[index]
        if (rows := self.rows()) is not None:
            return rows.dense().view(self.shape)[index]
        with explained(f"{self.file.name} has the tensor {self.name} in {self.format}", NotImplementedError):
            data = self.data().view(prod(self.shape[:-1]), -1)
            found = _package(self.file.name).dequantize(data.numpy(), self._kind)
        return torch.from_numpy(found).view(self.shape)[index]

    def data(self) -> Tensor:
        """The stored bytes, (size,) uint8. Raises ``UserError`` if the file was changed after opening."""
        data = np.empty(self.size, np.uint8)
        left, place = data.data, self.place
        while left:
            count = os.preadv(self.file.fileno(), [left], place)
            if not count:
                break
            left, place = left[count:], place + count
        self.file.check()
        return torch.from_numpy(data)

    def split(self, counts: Sequence[int]) -> list[GGUFTensor]:
        """The tensor as several, of so many rows of the outermost axis."""
        parts = [copy(self) for _ in counts]
        for part, count, start in zip(parts, counts, accumulate(counts, initial=0), strict=False):
            part.shape, part.size = (count, *self.shape[1:]), self.size // self.shape[0] * count
            part.place += self.size // self.shape[0] * start
        return parts

    @property
    def quantised(self) -> bool:
        return self.format not in _DENSE

    def rows(self) -> StoredRows | None:
        """The stored rows if the kernels support their format; else None."""
        if self.format not in FORMATS or not cpu_library.available():
            return None
        size = self.size // (count := prod(self.shape[:-1]))
        places = self.place + size * torch.arange(count)
        return StoredRows(self.format, self.shape[-1], size, places, (self.file,), in_file=True)


def opened(name: str | Path) -> GGUFFile | None:
    """The GGUF file of a model name, see ``file_in``; None for other files and folders."""
    path = file_in(name)
    return GGUFFile(path) if path and _has_projector(path) is not None else None


class _OpenFile:
    """A file that is closed when its last reference is dropped: tensors may outlive the reader."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.names: dict[int, str] = {}  # tensor names by offset
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe does not block
        if not stat.S_ISREG(mode := os.fstat(self._descriptor).st_mode):
            found = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise UserError(f"cannot load model {self.name!r}: expected a GGUF file, found {found}")
        self._state = self._current()

    def fileno(self) -> int:
        return self._descriptor

    def check(self) -> None:
        """Raise ``UserError`` if the file was written to after opening; it may be renamed, replaced or removed."""
        size, time = self._current()
        if size < self._state[0]:
            raise UserError(f"{self.name} was cut while it was read: expected all of its tensors")
        if (size, time) != self._state:
            raise UserError(f"{self.name} was changed while it was in use: expected it as it was opened; load it again")

    def _current(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def tensor_at(self, place: int) -> str:
        return self.names[max(start for start in self.names if start <= place)]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os may be gone at exit
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


class _ShortError(Exception):
    """The header continues at least up to byte ``end``."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class _Cursor:
    """Parser position in a file's header."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bytes(self, count: int) -> bytes:
        start = self._step(count)
        return self.data[start : self.at]

    def numbers(self, kinds: str, count: int = 1) -> tuple[Any, ...]:
        """Read ``count`` numbers of each of the ``struct`` format characters in ``kinds``."""
        layout = f"<{count}{kinds}" if len(kinds) == 1 else f"<{kinds}"
        return struct.unpack_from(layout, self.data, self._step(struct.calcsize(layout)))

    def number(self, kind: str) -> Any:
        return self.numbers(kind)[0]

    def name(self, known: Container[str]) -> str:
        """Read the name of a key or tensor that is not among the ``known``."""
        name = self.bytes(self.number("Q"))
        if not (found := name.decode(errors="ignore")).isprintable() or found.encode() != name:
            raise ValueError(f"expected names of keys and tensors in UTF-8, found {shown(name)}")
        if found in known:
            raise ValueError(f"expected each key and tensor once, found {found} twice")
        return found

    def value(self, kind: int, key: str) -> Any:
        """Read a value, or a list of values other than lists."""
        is_list, count = kind == _ARRAY, 1
        if is_list:
            kind, count = self.numbers("IQ")
        if kind == _STRING:
            found: list[Any] = self._texts(count)
        elif kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            found = np.frombuffer(self.data, f"<{_NUMBERS[kind]}", count, self._step(count * size)).tolist()
        else:
            raise ValueError(f"expected numbers, texts or a list of them in {key}, found type {kind}")
        return found if is_list else found[0]

    def _texts(self, count: int) -> list[str]:
        """Read ``count`` consecutive texts, inlined for speed: vocabularies have hundreds of thousands."""
        data, at, end, texts, length = self.data, self.at, len(self.data), [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise _ShortError(at + 8)
            start = at + 8
            at = start + length(data, at)[0]
            if at > end:
                raise _ShortError(at)
            texts.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return texts

    def _step(self, count: int) -> int:
        if self.at + count > len(self.data):
            raise _ShortError(self.at + count)
        start, self.at = self.at, self.at + count
        return start


def _package(file: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise missing(f"reading {file}", "gguf", "real") from error
    return gguf
