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
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from mmspec.errors import UserError, explained, shown
from mmspec.quantisation.formats import StoredRows
from mmspec.targets import gguf_dense, gguf_mixtures, gguf_recurrent
from mmspec.targets.gguf_file import GGUFFile, GGUFTensor
from mmspec.targets.gguf_keys import PRESENT, STACKED, Architecture, Change, Keys, Names, Rows

ARCHITECTURES: dict[str, Architecture] = {
    **gguf_dense.ARCHITECTURES,
    **gguf_mixtures.ARCHITECTURES,
    **gguf_recurrent.ARCHITECTURES,
}
"""By llama.cpp's name."""


def read_config(file: GGUFFile, row: Architecture | None = None, alone: bool = False) -> tuple[Any, Keys]:
    """A text model's configuration, and the record of the keys read.

    Args:
        row: the architecture's row, by default by its name.
        alone: the file may have only the blocks that predict further tokens (MTP).

    Raises:
        UserError: the architecture is unknown, or a key is missing, has a wrong value or is unknown.
    """
    row, keys, name = row or _row(file), Keys(file), file.architecture()
    with explained(f"cannot load model {str(file.path)!r}", ValueError, KeyError, TypeError, StrictDataclassError):
        count, blocks = keys("block_count"), {block for one in file.tensors if (block := _block(one)) is not None}
        layers = count - keys("nextn_predict_layers", 0) or count  # an assistant of Gemma 4 has no others
        if blocks == set(range(layers, count)) and not alone:
            raise ValueError("expected a model, found only layers that draft for one: --drafter mtp:FILE")
        if not set(range(layers * (not alone))) <= blocks <= set(range(count)):
            raise ValueError(f"expected tensors of {name}.block_count = {count} blocks, found {len(blocks)}")
        fields = {one: keys.uniform(key, field=one) for key, one in row.keys.items()}
        fields["num_hidden_layers"] = layers
        fields |= {one: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for one, key in _TOKENS.items()}
        fields["tie_word_embeddings"] = "output.weight" not in file.tensors
        if "token_embd.weight" not in file.tensors:
            raise ValueError("expected the tensor token_embd.weight, found none")
        fields |= {"vocab_size": file.tensors["token_embd.weight"].shape[0], **row.more(keys)}
        kind = CONFIG_MAPPING[fields.pop("model_type", row.model_type)]
        present = {re.sub(r"^blk\.\d+\.", "", name) for name in file.tensors}
        fields = {one: tensor in present for one, tensor in PRESENT.items() if hasattr(kind, one)} | fields
        for key, value in keys.unread().items():
            raise ValueError(f"expected keys of {name} models, found {name}.{key} = {shown(value)}, which is not known")
        return kind.from_dict(fields), keys


def _row(file: GGUFFile) -> Architecture:
    """The row of a file's architecture, whose tensors are split as in the model; names of a dense model stand for a
    mixture in files with experts."""
    name, rows = file.architecture(), ARCHITECTURES
    if file.get("expert_count", 0):
        rows = rows | gguf_mixtures.WITH_EXPERTS
    if name not in rows:
        raise UserError(
            f"cannot load model {str(file.path)!r}: expected an architecture out of "
            f"{', '.join(sorted(ARCHITECTURES))}, found {name!r}"
        )
    row = rows[name]
    file.tensors = {part: tensor for name in file.tensors for part, tensor in _parts(file, row, name).items()}
    return row


def _parts(file: GGUFFile, row: Architecture, name: str) -> dict[str, GGUFTensor]:
    """A tensor, or those that it joins: queries, keys and values, or norms by head."""
    tensor, block, (start, _, end), counts = file.tensors[name], _block(name), name.rpartition("."), {}
    place, _, module = start.rpartition(".")
    if f"{module}.0" in row.names:
        counts = {f"{start}.{head}.{end}": 1 for head in range(tensor.shape[0])}
    elif module == "attn_qkv" and module not in row.names and block is not None:
        none = [0] * (block + 1)  # at the end of short lists, which are refused later
        heads = (file.counts("attention.head_count", block + 1, least=0) + none)[block]
        groups = (file.counts("attention.head_count_kv", block + 1, [heads] * (block + 1), least=0) + none)[block]
        size, parts = tensor.shape[0] // max(1, heads + 2 * groups), zip("qkv", (heads, groups, groups), strict=True)
        counts = {f"{place}.attn_{part}.{end}": size * count for part, count in parts}
    if sum(counts.values()) != tensor.shape[0]:
        return {name: tensor}
    return dict(zip(counts, tensor.split(list(counts.values())), strict=True))


def _block(tensor: str) -> int | None:
    """Number of the block that a tensor belongs to by its name."""
    found = re.match(r"blk\.(\d+)\.", tensor)
    return int(found[1]) if found else None


def set_aside(file: GGUFFile) -> list[str]:
    """Names of the tensors of blocks that predict further tokens (MTP), which follow the model's layers."""
    count = file.get("block_count", 0)
    layers = count - file.get("nextn_predict_layers", 0) or count
    return [name for name in file.tensors if (block := _block(name)) is not None and block >= layers]


_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class Weight:
    """A weight of a model in a file's ``tensors``. ``weight[...]`` reads it as a dense tensor. ``shape``: shape in the
    model; tensors in the file may have other axes of size 1."""

    def __init__(self, tensors: Sequence[GGUFTensor], change: Change | None, config: Any, shape: torch.Size) -> None:
        self.tensors, self._change, self._config, self.shape = tensors, change, config, shape

    def __getitem__(self, index: Any) -> Tensor:
        read = [tensor[...] for tensor in self.tensors]
        value = self._change(self._config, *read) if self._change else read[0]
        if value.squeeze().shape == torch.Size(size for size in self.shape if size != 1):
            value = value.reshape(self.shape)
        return value[index]

    @property
    def changed(self) -> bool:
        """Whether the weight has other values than rows in a format of the kernels."""
        return not isinstance(self._change, Rows | None) and all(tensor.rows() for tensor in self.tensors)

    @property
    def quantised(self) -> bool:
        """Whether the file stores the weight quantised."""
        return any(tensor.quantised for tensor in self.tensors)

    def transposed(self) -> Weight:
        """The weight with its last two axes exchanged."""
        change = self._change or (lambda config, value: value)
        shape = torch.Size([*self.shape[:-2], self.shape[-1], self.shape[-2]])
        return Weight(self.tensors, lambda config, *read: change(config, *read).mT, self._config, shape)

    def stacks(self) -> list[StoredRows] | None:
        """Stored rows of fused experts, by tensor; None if they have other values or the kernels lack a format."""
        found = [tensor.rows() if len(tensor.shape) == 3 else None for tensor in self.tensors]
        fused = self._change is None or self._change in STACKED
        return cast(list[StoredRows], found) if fused and None not in found else None

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
    Raises ``UserError``: a tensor has no place in the model and is not ``set_aside``."""
    unused = set(set_aside(file))
    return _weights(file, model, row or _row(file), [name for name in file.tensors if name not in unused])


def read_mtp_weights(file: GGUFFile, built: PreTrainedModel) -> dict[str, Weight]:
    """Weights of transformers' ``MtpModel`` by name, of the blocks that are ``set_aside``; errors as above.

    Norms are stored as the layers' norms. Copies of the model's embedding and output layer are not read.
    """
    row, own = _row(file), [name for name in set_aside(file) if not re.search(_COPIES, name)]
    norm = row.names["attn_norm"]
    change = norm[1] if isinstance(norm, tuple) else None
    names: Names = {"nextn.eh_proj": "eh_proj"} | {f"nextn.{name}": (place, change) for name, place in _NORMS.items()}
    for name, found in row.names.items():
        place, change = found if isinstance(found, tuple) else (found, None)
        names[name] = "|".join(f"mtp_block.{one}" for one in place.split("|")), change
    first = min((block for name in own if (block := _block(name)) is not None), default=0)
    return _weights(file, built, replace(row, names=names, outer={}, layers="layers.{}"), own, first)


_COPIES = r"nextn\.(embed_tokens|shared_head_head)\."
_NORMS = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "post_norm"}


def _weights(
    file: GGUFFile, model: PreTrainedModel, row: Architecture, own: Sequence[str], first: int = 0
) -> dict[str, Weight]:
    """The weights that are stored in the tensors ``own``; block ``first`` is the model's layer 0."""
    empty, ignored = model.state_dict(), model._keys_to_ignore_on_load_unexpected or ()
    places = list(row.outer) + list(row.names)
    parts: defaultdict[str, list[tuple[int, GGUFTensor, Change | None]]] = defaultdict(list)
    for name in own:
        block, module, end = re.fullmatch(rf"(?:{row.blocks}(\d+)\.)?(.*?)({_ENDS})?", name).groups()  # type: ignore[union-attr]
        names = row.outer if block is None else row.names
        if (whole := f"{module}{end or ''}") in names:
            module, end = whole, None
        found = names.get(module)
        if found is None and name in _USED:
            continue
        place, change = found if isinstance(found, tuple) else (found, None)
        layer = "" if block is None else f"{row.layers.format(int(block) - first)}."
        full = [f"{layer}{one}{last}" for one in (place or "").split("|") for last in (end or ".weight", "")]
        known = next((key for key in full if key in empty), None)
        if known is None and place and any(re.search(pattern, key) for pattern in ignored for key in full):
            continue
        if place is None or known is None:
            raise UserError(
                f"cannot load model {str(file.path)!r}: expected tensors of a {file.architecture()} model, "
                f"found {name}, which has no place in it"
            )
        parts[known].append(
            (places.index(module), file.tensors[name], change if end != ".bias" or isinstance(change, Rows) else None)
        )
    made = {}
    for key, several in parts.items():
        ordered = sorted(several, key=lambda part: part[0])
        made[key] = Weight([tensor for _, tensor, _ in ordered], ordered[0][2], model.config, empty[key].shape)
    return made


_ENDS = r"\.weight|\.bias|\.(?:in|out)put_(?:min|max)"

_USED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "v.token_embd.img_break")
"""Tensors read by others, factors of rotary frequencies, or copied from others: a row of the embedding."""
