"""Configuration and weights of the models in GGUF files.

Keys and tensors of a file are read, change nothing by a list, or the file is refused by their name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from mmspec.errors import UserError
from mmspec.quantisation.formats import StoredRows
from mmspec.targets import gguf_dense, gguf_mixtures, gguf_recurrent
from mmspec.targets.gguf_file import GGUFFile, GGUFTensor
from mmspec.targets.gguf_keys import Architecture, Change, Keys, Rows

ARCHITECTURES: dict[str, Architecture] = {
    **gguf_dense.ARCHITECTURES,
    **gguf_mixtures.ARCHITECTURES,
    **gguf_recurrent.ARCHITECTURES,
}
"""By llama.cpp's name."""


def read_config(file: GGUFFile) -> tuple[Any, Keys]:
    """A text model's configuration, and the record of the keys read.

    Raises:
        UserError: the architecture is unknown, or a key is missing, has a wrong value or is unknown.
    """
    where = f"cannot load model {str(file.path)!r}: "
    if (row := ARCHITECTURES.get(name := file.architecture())) is None:
        raise UserError(f"{where}expected an architecture out of {', '.join(sorted(ARCHITECTURES))}, found {name!r}")
    keys = Keys(file)
    blocks = {int(found[1]) for tensor in file.tensors if (found := re.match(r"blk\.(\d+)\.", tensor))}
    if (count := keys("block_count")) != len(blocks):
        raise UserError(f"{where}expected tensors of {name}.block_count = {count} blocks, found {len(blocks)}")
    fields = {one: keys.uniform(key, field=one) for key, one in row.keys.items()}
    fields |= {one: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for one, key in _TOKENS.items()}
    fields |= {"vocab_size": file.tensors["token_embd.weight"].shape[0], **row.more(keys)}
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    if unread := keys.unread():
        key, value = next(iter(unread.items()))
        raise UserError(
            f"{where}expected keys of {name} models, found {name}.{key} = {value!r:.100}, which is not known"
        )
    return CONFIG_MAPPING[fields.pop("model_type", row.model_type)].from_dict(fields), keys


_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class Weight:
    """A weight of a model in a file's ``tensors``. ``weight[...]`` reads it as a dense tensor.

    Attributes:
        shape: shape in the model; tensors in the file may have other axes of size 1.
    """

    def __init__(self, tensors: Sequence[GGUFTensor], change: Change | None, config: Any, shape: torch.Size) -> None:
        self.tensors, self._change, self._config, self.shape = tensors, change, config, shape

    def __getitem__(self, index: Any) -> Tensor:
        read = [tensor[...] for tensor in self.tensors]
        value = self._change(self._config, *read) if self._change else read[0]
        if value.squeeze().shape == torch.Size(size for size in self.shape if size != 1):
            value = value.reshape(self.shape)
        return value[index]

    def rows(self) -> StoredRows | None:
        """The stored rows in the model's order; None if the weight has other values or the kernels lack its format."""
        several = [tensor.rows() if len(tensor.shape) == 2 else None for tensor in self.tensors]
        if None in several or not isinstance(self._change, Rows | None):
            return None
        first, *others = cast(list[StoredRows], several)
        if not all(rows.follows(first) and rows.features == first.features for rows in others):
            return None
        rows = replace(first, places=torch.cat([first.places, *(rows.places for rows in others)]))
        order = self._change and self._change.order
        return rows.ordered(order(self._config, len(rows.places))) if order else rows


def read_weights(file: GGUFFile, model: PreTrainedModel, row: Architecture | None = None) -> dict[str, Weight]:
    """Weights of a model by name, read on access; ``model`` may be on the meta device, ``row`` is its architecture's.

    Raises:
        UserError: a tensor has no place in the model.
    """
    row, empty = row or ARCHITECTURES[file.architecture()], model.state_dict()
    places = list(row.outer) + list(row.names)
    parts: defaultdict[str, list[tuple[int, GGUFTensor, Change | None]]] = defaultdict(list)
    for name, tensor in file.tensors.items():
        block, module, end = re.fullmatch(rf"(?:{row.blocks}(\d+)\.)?(.*?)(\.weight|\.bias)?", name).groups()  # type: ignore[union-attr]
        found = (row.outer if block is None else row.names).get(module)
        if found is None and name in _USED:
            continue
        place, change = found if isinstance(found, tuple) else (found, None)
        full = place if block is None else f"{row.layers.format(block)}.{place}"
        known = next((key for key in (f"{full}{end or '.weight'}", full) if key in empty), None)
        if place is None or known is None:
            raise UserError(
                f"cannot load model {str(file.path)!r}: expected tensors of a {file.architecture()} model, "
                f"found {name}, which has no place in it"
            )
        parts[known].append(
            (places.index(module), tensor, change if end != ".bias" or isinstance(change, Rows) else None)
        )
    made = {}
    for key, found in parts.items():
        ordered = sorted(found, key=lambda part: part[0])
        made[key] = Weight([tensor for _, tensor, _ in ordered], ordered[0][2], model.config, empty[key].shape)
    return made


_USED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "v.token_embd.img_break")
"""Tensors read by others, factors of rotary frequencies, or copied from others: a row of the embedding."""
