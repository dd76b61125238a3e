"""Models in GGUF files.

A model's configuration and tokenizer are stored in the hub's layout in a folder of the user's cache; weights are read
from the file into the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from mmspec.errors import UserError, explained
from mmspec.files import cache_folder, fill_folder
from mmspec.targets import gguf_tokenizer
from mmspec.targets.gguf_file import GGUFFile
from mmspec.targets.gguf_models import read_config

_FORMAT = 9  # of the folder
_TOKENIZER, _OPTIONS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SAMPLING = {  # keys below general.sampling, and llama.cpp's defaults
    "temperature": ("temp", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "repetition_penalty": ("penalty_repeat", 1.0),
}


def index(file: GGUFFile) -> Path:
    """Cache folder of configuration and tokenizer, keyed by the file's header; it may not exist yet."""
    identity = f"{_FORMAT} {transformers.__version__} {file.digest}"
    return cache_folder() / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:16] / file.path.stem


def write_index(file: GGUFFile) -> Path:
    """Return the ``index`` folder, created atomically at first use, as several processes may create it concurrently,
    and again if it was damaged. Raises ``UserError``: the model is not supported, or the cache cannot be written."""
    folder = index(file)
    fill_folder(folder, partial(_write, file))
    return folder


def _write(file: GGUFFile, folder: Path) -> None:
    made = config(file)
    made.save_pretrained(folder)
    generation_config(file, made).save_pretrained(folder)
    with explained(f"cannot load model {str(file.path)!r}", Exception):
        tokenizer, options = gguf_tokenizer.build(file.metadata)
    save_tokenizer(tokenizer, options, folder)


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
        name: type(usual)(max(0, round(file.number(f"general.sampling.{key}", usual), 6)))
        for name, (key, usual) in _SAMPLING.items()
    }
    names: dict[Any, str] = {kind.value: kind.name.partition("_")[2] for kind in LlamaFileType}
    form = names.get(file.count("general.file_type", -1, least=0), "GGUF")
    vars(made).update(gguf_format=form, gguf_sampling=sampling)
    return made


def dtype_of(file: GGUFFile) -> str | torch.dtype | None:
    """The dtype of ``mmspec.load`` closest to most weights of the decoder's layers."""
    sizes: Counter[str | torch.dtype] = Counter()
    for tensor in file.tensors.values():
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            bits = re.match(r"(?:I?Q|MXFP)(\d)", tensor.format)
            plain = {"F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.format, torch.float32)
            sizes[plain if bits is None else "int4" if int(bits[1]) <= 4 else "int8"] += int(np.prod(tensor.shape))
    return sizes.most_common(1)[0][0] if sizes else None


def config(file: GGUFFile) -> Any:
    """The model's configuration; errors as for ``read_config``."""
    made, _ = read_config(file)
    made.name_or_path = str(index(file))
    return made


def scale_frequencies(file: GGUFFile, model: Any) -> None:
    """Divide a decoder's rotary frequencies by the file's factors (Llama 3's long-context scaling). Raises
    ``UserError``: the model turns another number of features than the file says."""
    tensor, turned = file.tensors.get("rope_freqs.weight"), file.get("rope.dimension_count")
    factors = None if tensor is None else tensor[...]
    for part in model.get_decoder().modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(part, name, None)
            if not isinstance(frequencies, Tensor):
                continue
            if turned not in (None, count := 2 * frequencies.numel()):
                raise UserError(
                    f"cannot load model {str(file.path)!r}: expected {file.architecture()}.rope.dimension_count = "
                    f"{count}, of {model.config.model_type} models of this size, got {turned}"
                )
            if factors is not None and frequencies.shape == factors.shape:
                setattr(part, name, frequencies / factors)


def _ends(file: GGUFFile, vocab: int) -> list[int]:
    """EOS tokens: end of text, of turn and of message, and others by their texts; none without a vocabulary."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return []
    with explained(f"cannot load model {str(file.path)!r}", Exception):
        return [token for token in gguf_tokenizer.Vocabulary(file.metadata).ends if token < vocab]
