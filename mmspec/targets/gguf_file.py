"""Reader of GGUF files: metadata at once, tensors on access.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import os
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import UserError, explained, missing
from mmspec.ops import cpu_library
from mmspec.quantisation.formats import FORMATS, StoredRows

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error)
_FIRST = 1 << 23  # bytes of the first read: most headers are smaller


def file_in(name: str | Path) -> Path | None:
    """The GGUF file of a model name: the file itself, or the only GGUF file in a folder without ``config.json``, not
    counting projector files; None for other names.

    Raises:
        UserError: the folder has several.
    """
    path = Path(name)
    return path if path.is_file() else _only(path, "GGUF file", projector=False)


def _is_gguf(file: Path) -> bool:
    """Whether a file has the GGUF suffix or magic number: Ollama's blobs have no suffix."""
    if file.suffix.lower() == ".gguf" or not (file.is_file() and os.access(file, os.R_OK)):
        return file.suffix.lower() == ".gguf"
    with file.open("rb") as opened:
        return opened.read(4) == _MAGIC


def projector_in(name: str | Path) -> Path | None:
    """The ``mmproj`` file in such a folder, with vision tower and projector; None and errors as for ``file_in``."""
    return _only(Path(name), "mmproj file", projector=True)


def _only(folder: Path, what: str, projector: bool) -> Path | None:
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    files = [path for path in sorted(folder.iterdir()) if ("mmproj" in path.name.lower()) == projector]
    files = [path for path in files if _is_gguf(path)]
    if len(files) > 1:
        raise UserError(f"cannot load model {str(folder)!r}: expected one {what}, found {len(files)}; name one of them")
    return files[0] if files else None


class GGUFFile:
    """An open GGUF file. Replacing the file on disk does not affect later reads.

    Attributes:
        metadata: values by key.
        tensors: tensors by name.
        digest: hash of the header.

    Raises:
        UserError: the file has another format or version, or is truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._wrong = f"cannot load model {str(path)!r}: expected a GGUF file"
        with explained(self._wrong, OSError):
            self._opened = _OpenFile(self.path)
        size = os.fstat(self._opened.fileno()).st_size
        header, count = b"", _FIRST
        while len(header) < min(size, count):  # read more if the header is longer
            header = os.pread(self._opened.fileno(), count, 0)
            try:
                with explained(self._wrong, *_DAMAGED):
                    self._parse(_Cursor(header), size)
                break
            except _ShortError as short:
                if len(header) == size or short.end > size:
                    raise self._incomplete(f"at least {short.end}", size) from None
                count = max(2 * count, short.end)
        else:
            raise self._incomplete("at least 4", size)

    def _incomplete(self, expected: str, size: int) -> UserError:
        return UserError(
            f"{self.path} is incomplete, as after an interrupted download: expected {expected} bytes, found {size}"
        )

    def _parse(self, cursor: _Cursor, size: int) -> None:
        magic = cursor.bytes(4)
        if magic != _MAGIC:
            raise UserError(f"{self._wrong}, found one that begins with {magic!r}")
        version = cursor.number("I")
        if version not in _VERSIONS:
            order = " of a big-endian machine" if version & 0xFFFF == 0 else ""
            raise UserError(
                f"{self._wrong} of version 2 or 3, found version {version & 0xFFFF or version >> 24}{order}"
            )
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        if (parts := self.metadata.get("split.count", 0)) > 1:
            raise UserError(
                f"{self.path} is one of {parts} parts: expected a whole file; llama-gguf-split --merge joins them"
            )
        infos = [
            (cursor.text(), cursor.numbers("Q", cursor.number("I")), *cursor.numbers("IQ")) for _ in range(tensors)
        ]
        self.digest = hashlib.sha256(cursor.data[: cursor.at]).hexdigest()
        alignment = self.metadata.get("general.alignment") or 32
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(self._opened, name, shape, kind, start + at) for name, shape, kind, at in infos
        }
        end = max((tensor.place + tensor.size for tensor in self.tensors.values()), default=cursor.at)
        if end > size:
            raise self._incomplete(str(end), size)

    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        with explained(f"{self._wrong} that names its architecture", KeyError):
            return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture, such as ``block_count``."""
        return self.metadata.get(f"{self.architecture()}.{key}", default)


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
        try:
            self._kind = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise UserError(
                f"{file.name} has the tensor {name} of type {kind}: expected a type up to {max(gguf.GGML_QUANT_SIZES)}"
            ) from None
        self.format: str = self._kind.name
        file.names[place] = name
        count, size = gguf.GGML_QUANT_SIZES[self._kind]
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
        """The stored bytes, (size,) uint8. Raises ``UserError`` if the file was truncated after opening."""
        data = np.empty(self.size, np.uint8)
        left, place = data.data, self.place
        while left:
            count = os.preadv(self.file.fileno(), [left], place)
            if not count:
                raise UserError(f"{self.file.name} was cut while it was read: expected all of its tensors")
            left, place = left[count:], place + count
        return torch.from_numpy(data)

    def rows(self) -> StoredRows | None:
        """The stored rows if the kernels support their format; else None."""
        if self.format not in FORMATS or not cpu_library.available():
            return None
        size = self.size // (count := prod(self.shape[:-1]))
        places = self.place + size * torch.arange(count)
        return StoredRows(self.format, self.shape[-1], size, places, (self.file,), in_file=True)


class _OpenFile:
    """A file that is closed when its last reference is dropped: tensors may outlive the reader."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.names: dict[int, str] = {}  # tensor names by offset
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def tensor_at(self, place: int) -> str:
        return self.names[max(start for start in self.names if start <= place)]

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


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

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.numbers("IQ")
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            return np.frombuffer(self.data, f"<{_NUMBERS[kind]}", count, self._step(count * size)).tolist()
        return self._texts(count) if kind == _STRING else [self.value(kind) for _ in range(count)]

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
