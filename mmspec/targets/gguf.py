"""GGUF files, converted once into a folder of the user's cache that loads like any other model; and the size that they
must have according to their headers: files whose download was interrupted are shorter."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from logging import getLogger
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import logging

from mmspec.errors import UserError, explained, missing
from mmspec.files import cache_folder, make_folder
from mmspec.quantisation.formats import FORMATS, StoredRows
from mmspec.targets.layers import replaced
from mmspec.targets.support import bars_on_terminals, from_pretrained

_log = getLogger("mmspec.load")
_FORMAT = 4  # of the converted folder
_FORM = "mmspec.json"  # in it: the dtype of ``mmspec.load`` that comes closest to the file's weights

STORED = "stored.safetensors"
"""File of a converted folder: rows of weights as the GGUF file has them; its metadata are their formats."""


def file_in(name: str | Path) -> Path | None:
    """The GGUF file of a name: the file itself, or the only GGUF file in a folder without ``config.json``.

    Raises:
        UserError: the folder has several.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(
            f"cannot load model {str(name)!r}: expected one GGUF file, found {len(files)}; name one of them"
        )
    return files[0] if files else None


def resolved(name: str) -> str:
    """The folder to load for a model's name: of a GGUF file, that of the converted one.

    Raises:
        UserError: several files in the folder, a package is missing, or the file cannot be converted.
    """
    file = file_in(name)
    return name if file is None else str(converted(file))


def converted(file: Path) -> Path:
    """The folder with a GGUF file's model in the hub's layout, its weights dequantised to float32; made at first use.

    It is keyed by the file's path, size and time, and appears whole: several processes may convert at the same time.

    Raises:
        UserError: the file cannot be read, or the cache not be written.
    """
    file = file.resolve()
    status = file.stat()
    identity = f"{_FORMAT} {file} {status.st_size} {status.st_mtime_ns}"
    folder = cache_folder() / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:16] / file.stem
    if not folder.is_dir():
        _log.info("converting %s, which is kept in %s", file.name, folder.parent)
        make_folder(folder, partial(_write, file))
    return folder


def stored_form(folder: str | Path) -> str | None:
    """The dtype of ``mmspec.load`` closest to the weights of a converted file, ``"int4"`` or ``"int8"``; else None."""
    file = Path(folder) / _FORM
    return json.loads(file.read_text())["dtype"] if file.is_file() else None


def attach_stored(model: PreTrainedModel, folder: str | Path) -> None:
    """Give linear layers of a converted model the rows of the file (``stored``), for ``pack_model``.

    Args:
        model: as it was read from ``folder``.
    """
    if not (file := Path(folder) / STORED).is_file():
        return
    with safe_open(file, "pt", backend="pread") as opened:
        formats = opened.metadata()
        names = {id(model.get_parameter(name)): name for name in formats}
        for layer in model.modules():
            if type(layer) is nn.Linear and (name := names.get(id(layer.weight))):
                vars(layer)["stored"] = [StoredRows(formats[name], opened.get_tensor(name))]


def _form(reader: Any) -> str | None:
    """That of most weights of the decoder's layers."""
    sizes: Counter[str | None] = Counter()
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            bits = re.match(r"I?Q(\d)", tensor.tensor_type.name)
            sizes[None if bits is None else "int4" if int(bits[1]) <= 4 else "int8"] += int(tensor.n_elements)
    return sizes.most_common(1)[0][0] if sizes else None


def _ends(reader: Any, vocab: int) -> list[int]:
    """Tokens that end an answer: of a text, a turn and a message. transformers reads the first of them."""
    fields = (reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = dict.fromkeys(int(field.contents()) for field in fields if field is not None)
    return [token for token in ids if 0 <= token < vocab]


def _write(file: Path, folder: Path) -> None:
    """Save model and tokenizer as transformers reads them, the rows of the file, and the form of the weights."""
    with _one_reader(file) as reader, replaced({(modeling_gguf_pytorch_utils, "tqdm"): _bar_of_transformers}):
        form = _form(reader)
        model: Any = from_pretrained(AutoModelForCausalLM, file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = from_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
        stored = dict(_stored_rows(reader, model))
        if ends := _ends(reader, model.config.vocab_size):
            model.generation_config.eos_token_id = ends
    vars(model.config).pop("quantization_config", None)  # save_pretrained refuses models that were quantised
    model.hf_quantizer = None
    with bars_on_terminals():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if form is not None:
        (folder / _FORM).write_text(json.dumps({"dtype": form}))
    if stored:
        formats = {name: rows.format for name, rows in stored.items()}
        save_file({name: rows.data for name, rows in stored.items()}, folder / STORED, formats)


def _bar_of_transformers(plain: Any) -> Any:
    """A progress bar that transformers can disable, unlike that of its reader of GGUF files."""

    @wraps(plain, updated=())
    def bar(*args: Any, **kwargs: Any) -> Any:
        return logging.tqdm(*args, **kwargs)

    return bar


def _stored_rows(reader: Any, model: PreTrainedModel) -> Iterator[tuple[str, StoredRows]]:
    """Rows of matrices in the order in which transformers has them, by the names of transformers.

    Matrices that it has changed otherwise are left out.
    """
    import gguf

    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=vars(model.config))
    names, weights = get_gguf_hf_weights_map(model, processor), model.state_dict()
    for tensor in reader.tensors:
        name, kind = names.get(tensor.name), tensor.tensor_type
        if name in weights and kind.name in FORMATS and len(tensor.shape) == 2:
            rows = processor.process(tensor.data, name=tensor.name).weights
            if np.array_equal(gguf.dequantize(rows, kind), weights[name].numpy()):
                yield name, StoredRows(kind.name, torch.from_numpy(np.array(rows)))


def _reading(numpy: Any) -> Any:
    """numpy with files read where the reader maps them to memory: one that is cut meanwhile would end the process."""
    module = SimpleNamespace(**vars(numpy))
    module.memmap = lambda path, mode: numpy.fromfile(path, numpy.uint8)
    module.__wrapped__ = numpy
    return module


@contextmanager
def _one_reader(file: Path) -> Iterator[Any]:
    """Parse the file once: transformers does so for configuration, tokenizer and weights, seconds each time."""
    try:
        import gguf
    except ImportError as error:
        raise missing(f"reading {file.name}", "gguf", "real") from error
    module: Any = gguf
    check_complete(file, module.GGML_QUANT_SIZES)
    wrong = f"cannot load model {str(file)!r}: expected a GGUF file"
    with (
        explained(wrong, IndexError, ValueError, KeyError),
        replaced({(import_module("gguf.gguf_reader"), "np"): _reading}),
    ):
        reader = gguf.GGUFReader(str(file))

    plain = module.GGUFReader

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        return reader if os.path.realpath(path) == str(file) else plain(path, *args, **kwargs)

    module.GGUFReader = opened
    try:
        yield reader
    finally:
        module.GGUFReader = plain


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
