"""GGUF files, and models in them.

The reader reads metadata at once, tensors on access. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A model's configuration and tokenizer are stored in the hub's layout in a folder of the user's cache; weights are read
from the file into the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from mmspec.errors import UserError, explained, missing
from mmspec.files import cache_folder, make_folder
from mmspec.ops import cpu_library
from mmspec.quantisation.formats import FORMATS, StoredRows
from mmspec.targets import gguf_tokenizer
from mmspec.targets.tree_layers import replaced

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


_FORMAT = 7  # of the folder
_TOKENIZER, _OPTIONS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_UNSUPPORTED = (ValueError, KeyError, NotImplementedError, TypeError, IndexError)
_SAMPLING = {  # keys below general.sampling, and llama.cpp's defaults
    "temperature": ("temp", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "repetition_penalty": ("penalty_repeat", 1.0),
}
_OWN_SCALING = ("gemma3", "gpt-oss", "gpt_oss")  # scaling that transformers implements itself
_TYPES = {str: 8, bool: 7, int: 10, float: 12}


def index(file: GGUFFile) -> Path:
    """Cache folder of configuration and tokenizer, keyed by the file's header; it may not exist yet."""
    identity = f"{_FORMAT} {transformers.__version__} {file.digest}"
    return cache_folder() / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:16] / file.path.stem


def write_index(file: GGUFFile) -> Path:
    """Return the ``index`` folder, created atomically at first use, as several processes may create it concurrently.

    Raises:
        UserError: the model is not supported, or the cache cannot be written.
    """
    folder = index(file)
    if not folder.is_dir():
        make_folder(folder, partial(_write, file))
    return folder


def _write(file: GGUFFile, folder: Path) -> None:
    made = config(file)
    made.save_pretrained(folder)
    generation_config(file, made).save_pretrained(folder)
    save_tokenizer(*_tokenizer(file), folder)


def save_tokenizer(made: Tokenizer, options: dict[str, Any], folder: Path) -> None:
    """Save a tokenizer and the options of its class for ``read_tokenizer``."""
    made.save(str(folder / _TOKENIZER))
    template = options.pop("chat_template", None)
    if template is not None:
        (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    options = {"tokenizer_class": "PreTrainedTokenizerFast", **options}
    (folder / _OPTIONS).write_text(json.dumps(options, indent=2), encoding="utf-8")


def read_tokenizer(folder: Path, **more: Any) -> Any:
    """Load the tokenizer of an ``index`` folder, twice as fast as transformers (measured with 152,000 tokens);
    ``more`` are options of its class."""
    options = {**json.loads((folder / _OPTIONS).read_text(encoding="utf-8")), **more}
    if (folder / _TEMPLATE).is_file():
        options["chat_template"] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / _TOKENIZER), **options)
    made.name_or_path = str(folder)
    return made


def generation_config(file: GGUFFile, config: Any) -> GenerationConfig:
    """Generation config of a model, with the tokens that end an answer as EOS, and those that never occur in one.

    It also has ``gguf_format``, llama.cpp's name of the file's format, and ``gguf_sampling``, default sampling
    parameters for commands and servers: the file's, or else llama.cpp's.
    """
    from gguf import LlamaFileType

    made = GenerationConfig.from_model_config(config)
    if ends := _ends(file, config.vocab_size):
        made.eos_token_id = ends
    if suppressed := file.metadata.get("tokenizer.ggml.suppress_tokens"):
        made.suppress_tokens = [token for token in suppressed if 0 <= token < config.vocab_size]
    sampling = {
        name: type(usual)(max(0, round(file.metadata.get(f"general.sampling.{key}", usual), 6)))
        for name, (key, usual) in _SAMPLING.items()
    }
    names: dict[Any, str] = {kind.value: kind.name.partition("_")[2] for kind in LlamaFileType}
    form = names.get(file.metadata.get("general.file_type"), "GGUF")
    vars(made).update(gguf_format=form, gguf_sampling=sampling)
    return made


def dtype_of(file: GGUFFile) -> str | torch.dtype | None:
    """The dtype of ``mmspec.load`` closest to most weights of the decoder's layers."""
    sizes: Counter[str | torch.dtype] = Counter()
    for tensor in file.tensors.values():
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            bits = re.match(r"I?Q(\d)", tensor.format)
            plain = {"F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.format, torch.float32)
            sizes[plain if bits is None else "int4" if int(bits[1]) <= 4 else "int8"] += int(np.prod(tensor.shape))
    return sizes.most_common(1)[0][0] if sizes else None


def config(file: GGUFFile) -> Any:
    """The model's configuration, read by transformers, with the embedding's vocabulary size.

    Raises:
        UserError: transformers does not know the architecture, or values are missing.
    """
    architecture = file.architecture()
    with explained(
        f"cannot load model {str(file.path)!r}: expected the architecture of a supported model", *_UNSUPPORTED
    ):
        if architecture in GGUF_CONFIG_ARCHS:
            fields = get_gguf_config(file.metadata, tuple(file.tensors))
        else:
            with _given(file):
                fields = load_gguf_checkpoint(str(file.path))["config"]
        if architecture == "gemma3":
            fields |= _gemma3(file)
        fields |= _rope_scaling(file)
        fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
        made = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    made.name_or_path = str(index(file))
    return made


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    """Fields that transformers leaves at their defaults: rotary embeddings, and the attention scale, which differs for
    the 27B model (as in llama.cpp)."""
    head, base = file.get("attention.key_length", 256), file.get("rope.freq_base", 1e6)
    if file.get("block_count") == 62:
        head = file.get("embedding_length") // file.get("attention.head_count")
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if file.get("rope.scaling.type") == "linear":
        whole |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 1e4)}
    rope = {"full_attention": whole, "sliding_attention": local}
    return {"query_pre_attn_scalar": head, "rope_parameters": rope}


def _rope_scaling(file: GGUFFile) -> dict[str, Any]:
    """Rope-scaling fields of the configuration, which transformers does not read."""
    kind, length = file.get("rope.scaling.type"), file.get("rope.scaling.original_context_length")
    factors = {f"{name}_factor": file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.get("rope.scaling.factor")}
    if None not in factors.values():
        lists = {name: tensor[...].tolist() for name, tensor in factors.items() if tensor is not None}
        scaling = {"rope_type": "longrope", **lists}
    elif kind not in ("linear", "yarn") or file.architecture() in _OWN_SCALING:
        return {}
    if length is not None:
        scaling["original_max_position_embeddings"] = length
    return {"rope_parameters": {"rope_theta": file.get("rope.freq_base", 10_000.0), **scaling}}


def scale_frequencies(file: GGUFFile, model: Any) -> None:
    """Divide a decoder's rotary frequencies by the file's factors (Llama 3's long-context scaling)."""
    if (tensor := file.tensors.get("rope_freqs.weight")) is None:
        return
    factors = tensor[...]
    for part in model.get_decoder().modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(part, name, None)
            if isinstance(frequencies, Tensor) and frequencies.shape == factors.shape:
                setattr(part, name, frequencies / factors)


def _tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The file's tokenizer, and options of its class."""
    with explained(f"cannot load model {str(file.path)!r}", Exception):
        return gguf_tokenizer.build(file.metadata)


def _ends(file: GGUFFile, vocab: int) -> list[int]:
    """EOS tokens: end of text, of turn and of message, and others by their texts."""
    with explained(f"cannot load model {str(file.path)!r}", Exception):
        return [token for token in gguf_tokenizer.Vocabulary(file.metadata).ends if token < vocab]


@contextmanager
def _given(file: GGUFFile) -> Iterator[None]:
    """Make transformers' config reader use the parsed metadata, without the vocabulary: gguf's reader takes seconds."""
    import gguf

    fields = {}
    for key, value in file.metadata.items():
        values = value if isinstance(value, list) else [value]
        if values and not (isinstance(value, list) and key.startswith("tokenizer.")):
            parts = [one.encode() if isinstance(one, str) else [one] for one in values]
            types = [_TYPES[type(values[0])]]
            types = [9, *types] if isinstance(value, list) else types
            fields[key] = SimpleNamespace(parts=parts, data=range(len(parts)), types=types)
    fields[f"{file.architecture()}.vocab_size"] = SimpleNamespace(parts=[[0]], data=[0], types=[4])
    given = SimpleNamespace(fields=fields, tensors=file.tensors.values())
    with replaced({(gguf, "GGUFReader"): _giving(file, given)}):
        yield


def _giving(file: GGUFFile, value: Any) -> Any:
    """Replacement for ``replaced``: a reader that returns ``value`` for this file."""

    def make(plain: Any) -> Any:
        @wraps(plain, updated=())
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            return value if str(path) == str(file.path) else plain(path, *args, **kwargs)

        return read

    return make


class Weight:
    """A transformers weight stored in one of a file's ``tensors``, or in several for experts. ``weight[...]`` reads it
    as a dense tensor."""

    def __init__(self, name: str, processor: Any, names: Mapping[str, str]) -> None:
        self._name, self._processor, self._names = name, processor, names
        self.tensors: list[GGUFTensor] = []

    def __getitem__(self, index: Any) -> Tensor:
        parsed: dict[str, Any] = {"tensors": {}}
        for tensor in self.tensors:
            values = tensor[...].float().numpy()
            found = self._processor.process(
                weights=values, name=tensor.name, tensor_key_mapping=self._names, parsed_parameters=parsed
            )
            if found.name is not None:
                parsed["tensors"][self._name] = torch.from_numpy(np.ascontiguousarray(found.weights))
        return parsed["tensors"][self._name][index]

    def rows(self) -> StoredRows | None:
        """The stored rows in transformers' order; None if the rows are not contiguous in one tensor."""
        rows = self.tensors[0].rows() if len(self.tensors) == 1 else None
        if rows is None or len(self.tensors[0].shape) != 2:
            return None
        plain = np.arange(len(rows.places))[:, None]
        found = self._processor.process(weights=plain, name=self.tensors[0].name)
        if found.weights.shape != plain.shape or not np.array_equal(np.sort(found.weights, axis=0), plain):
            return None
        moved = not np.array_equal(found.weights, plain)
        return rows.ordered(torch.from_numpy(found.weights[:, 0].copy())) if moved else rows


def weights(file: GGUFFile, model: PreTrainedModel) -> dict[str, Weight]:
    """Weights of a text model by transformers' names, to be read on access; ``model`` may be on the meta device."""
    processor = TENSOR_PROCESSORS.get(file.architecture(), TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(_outline(model, 1), processor)
    found: dict[str, Weight] = {}
    for tensor in file.tensors.values():
        name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if name is not None:
            found.setdefault(name, Weight(name, processor, names)).tensors.append(tensor)
    return found


def _outline(module: Any, depth: int) -> SimpleNamespace:
    """Stub of a model for transformers' name mapping, which would take seconds to visit every module."""
    names = dict.fromkeys(module.state_dict())
    children = [(name, _outline(child, depth - 1)) for name, child in module.named_children()] if depth else []
    return SimpleNamespace(
        config=getattr(module, "config", None), state_dict=lambda: names, named_children=lambda: children
    )
