"""GGUF files, converted once into a folder of the user's cache that loads like any other model."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmspec.errors import UserError, explained
from mmspec.extras import missing
from mmspec.files import cache_folder, make_folder
from mmspec.targets.gguf_size import check_complete
from mmspec.targets.support import from_pretrained

_FORMAT = 2  # of the converted folder
_FORM = "mmspec.json"  # in it: the dtype of ``mmspec.load`` that holds the file's weights


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
        make_folder(folder, partial(_write, file))
    return folder


def stored_form(folder: str | Path) -> str | None:
    """The dtype of ``mmspec.load`` that holds the weights of a converted file, ``"int4"`` or ``"int8"``; else None."""
    file = Path(folder) / _FORM
    return json.loads(file.read_text())["dtype"] if file.is_file() else None


def _form(reader: Any) -> str | None:
    """That of most weights of the decoder's layers."""
    sizes: Counter[str | None] = Counter()
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            bits = re.match(r"I?Q(\d)", tensor.tensor_type.name)
            sizes[None if bits is None else "int4" if int(bits[1]) <= 4 else "int8"] += int(tensor.n_elements)
    return sizes.most_common(1)[0][0] if sizes else None


def _write(file: Path, folder: Path) -> None:
    """Save model and tokenizer as transformers reads them, and the form of the weights."""
    with _one_reader(file) as reader:
        form = _form(reader)
        model: Any = from_pretrained(AutoModelForCausalLM, file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = from_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    vars(model.config).pop("quantization_config", None)  # save_pretrained refuses models that were quantised
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if form is not None:
        (folder / _FORM).write_text(json.dumps({"dtype": form}))


@contextmanager
def _one_reader(file: Path) -> Iterator[Any]:
    """Parse the file once: transformers does so for configuration, tokenizer and weights, seconds each time."""
    try:
        import gguf
    except ImportError as error:
        raise missing(f"reading {file.name}", "gguf", "real") from error
    module: Any = gguf
    check_complete(file, module.GGML_QUANT_SIZES)
    with explained(f"cannot load model {str(file)!r}: expected a GGUF file", IndexError, ValueError, KeyError):
        reader = gguf.GGUFReader(str(file))

    plain = module.GGUFReader

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        return reader if os.path.realpath(path) == str(file) else plain(path, *args, **kwargs)

    module.GGUFReader = opened
    try:
        yield reader
    finally:
        module.GGUFReader = plain
