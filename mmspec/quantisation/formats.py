"""Weights in GGUF formats, used without conversion: rows in a file or in memory, linear layers and embeddings.

A row is a sequence of blocks of 32 weights. Blocks of K formats have 256 weights: 8 groups of 32, with scales and
offsets as 6-bit integers times a float16 ``d`` and ``dmin`` (Q6_K: 8-bit scales for 16 weights each).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.errors import UserError
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import (
    LANES,
    BlockLinear,
    BlockMemory,
    Int4Blocks,
    Int8Blocks,
    packed_codes,
    quantise_int8,
    unpacked_codes,
    whole_groups,
)
from mmspec.quantisation.linear import GROUP, quantise_int4

_AT_ONCE = 1 << 20  # weights quantised at once


@dataclass(frozen=True)
class StoredRows:
    """Rows of a weight in a GGUF format, in memory or read from a file on demand.

    Attributes:
        format: one of ``FORMATS``.
        size: bytes per row.
        places: (rows,) int64, addresses in memory, or offsets in the file.
        kept: owners of the memory, or only the open file (``fileno``, ``name``, ``check``).
        in_file: whether rows are in a file.
    """

    format: str
    features: int
    size: int
    places: Tensor
    kept: tuple[Any, ...]
    in_file: bool = False

    @classmethod
    def of(cls, form: str, data: Tensor, features: int) -> StoredRows:
        """Rows in memory, (rows, bytes) uint8."""
        data, size = data.contiguous(), cpu.bytes_of_row(form, features)
        places = cpu.pointer(data, torch.uint8, (len(data), size)) + size * torch.arange(len(data))
        return cls(form, features, size, places, (data,))

    @property
    def kind(self) -> type[BlockLinear]:
        """The class of a linear layer with these rows."""
        return FORMATS[self.format]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the contents of the rows."""
        return StoredRows.of, (self.format, self.data(), self.features)

    def __deepcopy__(self, memo: Any) -> StoredRows:
        return self  # weights are immutable

    def ordered(self, order: Tensor) -> StoredRows:
        """The rows in another order."""
        return replace(self, places=self.places[order])

    def follows(self, other: StoredRows) -> bool:
        """Whether one ``StoredRows`` can hold the rows of both."""
        where = ((rows.in_file, rows.kept if rows.in_file else None) for rows in (self, other))
        return self.format == other.format and len(set(where)) == 1

    def dense(self, index: Tensor | None = None) -> Tensor:
        """Dequantise all rows or the indexed rows to (rows, features) float32. Raises ``UserError``: the file was
        changed, or a row is not finite."""
        places = self.places if index is None else self.places[index]
        found, finite = cpu.dense_rows(self.format, places.contiguous(), self.features, self._descriptor)
        if found is None:
            raise self.cut
        self._check()
        if not finite:
            place, kept = int(places[~found.isfinite().all(1)][0]), self.kept[0]
            where = f"{kept.tensor_at(place)} in {kept.name}" if self.in_file else f"one in {self.format}"
            raise UserError(f"weights must be finite: {where} contains NaN or infinite numbers")
        return found[:, : self.features]

    def data(self) -> Tensor:
        """Raw rows, (rows, bytes) uint8; raises like ``dense``."""
        out = torch.empty(len(self.places), self.size, dtype=torch.uint8)
        for row, place in zip(out.numpy(), self.places.tolist(), strict=True):
            if not self.in_file:
                ctypes.memmove(row.ctypes.data, place, self.size)
            elif os.preadv(self._descriptor, [row], place) < self.size:
                raise self.cut
        self._check()
        return out

    def _check(self) -> None:
        """Raise ``UserError`` if the rows are in a file that was changed after opening."""
        if self.in_file:
            self.kept[0].check()

    @property
    def cut(self) -> UserError:
        return UserError(f"{self.kept[0].name} was cut while it was read: expected all of its tensors")

    @property
    def _descriptor(self) -> int:
        return int(self.kept[0].fileno()) if self.in_file else -1


def pack(packings: Sequence[tuple[StoredRows, Tensor]], threads: int) -> None:
    """Write rows to the blocks of layers. Raises ``UserError``: a file was changed, or a row is not finite."""
    fields = [(rows.format, rows.places.contiguous(), rows.features, rows._descriptor, to) for rows, to in packings]
    if (done := cpu.pack_rows(fields, threads)) < 0:
        for row in packings[-1 - done][0].places.split(_AT_ONCE):
            replace(packings[-1 - done][0], places=row).dense()
    if done < len(packings):
        raise packings[done][0].cut
    for rows, _ in packings:
        rows._check()


def stored_layer(
    rows: StoredRows,
    bias: Tensor | None,
    memory: BlockMemory | None = None,
    later: list[tuple[StoredRows, Tensor]] | None = None,
) -> BlockLinear:
    """A linear layer with exactly these weights.

    Args:
        later: receives rows in files, for the caller to ``pack``; None packs them immediately.

    Raises:
        UserError: a file was truncated.
    """
    layer = rows.kind.empty(rows.features, len(rows.places), bias, memory)
    if later is not None and rows.in_file:
        later.append((rows, layer._blocks))
    else:
        pack([(rows, layer._blocks)], cpu.kernel_threads())
    return layer


def quantised_rows(weight: Tensor, kind: str) -> StoredRows:
    """Quantise a weight to 4 bits as Q4_1 or to 8 bits as Q8_0.

    Args:
        weight: (rows, features), any floating dtype.
        kind: ``"int4"`` or ``"int8"``.
    """
    form, encode, size = ("Q4_1", _q4_1, 20) if kind == "int4" else ("Q8_0", _q8_0, 34)
    groups = -(-weight.shape[1] // GROUP)
    data = cpu.zeros(len(weight) * groups * size).view(len(weight), groups, size)  # memory that is returned
    count = max(1, _AT_ONCE // weight.shape[1])
    for some, out in zip(weight.split(count), data.split(count), strict=True):
        parts = encode(whole_groups(some))
        torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=2, out=out)
    return StoredRows.of(form, data.flatten(1), weight.shape[1])


def _q4_1(weight: Tensor) -> list[Tensor]:
    codes, scale, zero = quantise_int4(weight)
    low, high = codes.unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
    return [scale.half()[..., None], (zero - 8 * scale).half()[..., None], low | high << 4]


def _q8_0(weight: Tensor) -> list[Tensor]:
    codes, scale = quantise_int8(weight)
    return [scale[..., None], codes.unflatten(1, (-1, GROUP))]


class StoredEmbedding(nn.Embedding):
    """Embedding table in a GGUF format; a lookup reads only the rows of its tokens, from memory or a file.

    ``weight`` has the shape, dtype and device of the embeddings, but NaN values; ``state_dict`` has the real values.
    """

    stored: StoredRows

    @classmethod
    def of(cls, table: nn.Embedding, rows: StoredRows, dtype: torch.dtype) -> nn.Embedding:
        """Replace the weight of a table, maybe on the meta device, by these rows; keeps ``nn.Embedding`` subclasses."""
        none = torch.full((), torch.nan, dtype=dtype).expand(table.weight.shape)
        table.__class__ = cls if type(table) is nn.Embedding else type(type(table).__name__, (type(table), cls), {})
        table.weight = nn.Parameter(none, requires_grad=False)  # transformers takes a model's dtype from it
        vars(table)["stored"] = rows
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in vars(self).items() if name not in ("_parameters", "stored")}
        plain = next(base for base in type(self).__mro__ if not issubclass(base, StoredEmbedding))
        shape = self.weight.shape
        return _embedding_of, (plain, kept, shape, self.weight.dtype, self.stored)

    def forward(self, input: Tensor) -> Tensor:
        found = self.stored.dense(input.flatten())
        return found.to(self.weight.dtype).view(*input.shape, -1)

    def dense(self) -> Tensor:
        """The whole table, (tokens, features)."""
        return self.stored.dense().to(self.weight.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dense()


def _embedding_of(
    plain: type[nn.Embedding], kept: dict[str, Any], shape: torch.Size, dtype: torch.dtype, rows: StoredRows
) -> nn.Embedding:
    table = plain.__new__(plain)
    vars(table).update(kept, _parameters={})
    table.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    return StoredEmbedding.of(table, rows, dtype)


class Q5Blocks(Int4Blocks):
    """5-bit codes with a float16 scale and value of code 0 per row and group: Q5_0 and Q5_1."""

    kind = "q5"
    bits = 5


class MXFP4Blocks(BlockLinear):
    """4-bit codes of 16 values with a power of two per row and group: MXFP4. Parts: codes (rows, features) and
    exponents (rows, groups), uint8."""

    kind = "mxfp4"

    def _pack(self, weight: Tensor) -> None:
        raise NotImplementedError(f"weights in {self.kind} are read from a file")

    def _unpacked(self) -> Tensor:
        codes, exponents = self._parts()
        size = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32)  # twice the values
        scale = (exponents.int() - 1).clamp(min=0).bitwise_left_shift(23).view(torch.float32)
        weight = torch.cat([size, -size])[codes.int()].unflatten(1, (-1, GROUP)) * scale[..., None]
        return weight.flatten(1)[: self.out_features, : self.in_features].bfloat16()

    def _laid_out(self, *parts: Tensor) -> Tensor:
        codes, exponents = packed_codes(parts[0], 4), parts[1].unflatten(0, (-1, LANES)).transpose(1, 2)
        fours = [F.pad(part, (0, 0, 0, -self._groups % 4)).unflatten(1, (-1, 4)) for part in (codes, exponents)]
        return torch.cat([part.flatten(2) for part in fours], dim=2).flatten(1)

    def _parts(self) -> list[Tensor]:
        fours = self._blocks.unflatten(1, (-1, 4 * (256 + LANES))).split([4 * 256, 4 * LANES], dim=2)
        codes, exponents = (part.unflatten(2, (4, -1)).flatten(1, 2)[:, : self._groups] for part in fours)
        return [unpacked_codes(codes, 4), exponents.transpose(1, 2).flatten(0, 1)]


class SuperBlocks(BlockLinear):
    """Weights of a K format. Parts: codes (rows, features) uint8, pairs of factors (rows, groups, 2) uint8, and d and
    dmin (rows, superblocks, 2) float16."""

    bits: ClassVar[int]

    def _pack(self, weight: Tensor) -> None:
        raise NotImplementedError(f"weights in {self.kind} are read from a file")

    def _unpacked(self) -> Tensor:
        codes, factors, shared = self._parts()
        scale = shared.float().repeat_interleave(8, dim=1) * self._factors(factors)  # (rows, groups, 2)
        weight = self._weight(codes.unflatten(1, (-1, GROUP)).float(), scale).flatten(1)
        return weight[: self.out_features].bfloat16()

    def _factors(self, factors: Tensor) -> Tensor:
        return factors.float()

    def _weight(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Dequantise codes, (rows, groups, 32), given the products of d and dmin with each group's factors."""
        return codes * scale[..., :1] - scale[..., 1:]

    def _laid_out(self, *parts: Tensor) -> Tensor:
        codes, factors, shared = parts
        by_block = [part.unflatten(0, (-1, LANES)) for part in (factors, shared)]  # (blocks, 16, ..., 2)
        pairs = by_block[0].transpose(1, 2).unflatten(1, (-1, 8)).flatten(2)
        last = by_block[1].permute(0, 2, 3, 1).contiguous().flatten(2).view(torch.uint8)
        packed = packed_codes(codes, self.bits).unflatten(1, (-1, 8)).flatten(2)
        return torch.cat([packed, pairs, last], dim=2).flatten(1)

    def _parts(self) -> list[Tensor]:
        blocks = self._blocks.unflatten(1, (self._groups // 8, -1))
        codes, pairs, last = blocks.split([8 * 64 * self.bits, 8 * 2 * LANES, 4 * LANES], dim=2)
        factors = pairs.unflatten(2, (8, LANES, 2)).flatten(1, 2).transpose(1, 2).flatten(0, 1)
        shared = last.contiguous().view(torch.float16).unflatten(2, (2, LANES)).permute(0, 3, 1, 2).flatten(0, 1)
        return [unpacked_codes(codes.unflatten(2, (8, -1)).flatten(1, 2), self.bits), factors, shared]


class Q4KBlocks(SuperBlocks):
    """Weights of Q4_K."""

    kind = "q4_k"
    bits = 4


class Q5KBlocks(SuperBlocks):
    """Weights of Q5_K."""

    kind = "q5_k"
    bits = 5


class Q6KBlocks(SuperBlocks):
    """Weights of Q6_K: int8 factors of d for both halves of a group; codes have an offset of 32."""

    kind = "q6_k"
    bits = 6

    def _factors(self, factors: Tensor) -> Tensor:
        return factors.view(torch.int8).float()

    def _weight(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes - 32) * scale.repeat_interleave(GROUP // 2, dim=2)


_KINDS = {cls.kind: cls for cls in (Int4Blocks, Q5Blocks, Int8Blocks, MXFP4Blocks, Q4KBlocks, Q5KBlocks, Q6KBlocks)}
FORMATS: dict[str, type[BlockLinear]] = {name: _KINDS[kind] for name, kind in cpu_library.FORMATS.items()}
"""Layer class of each GGUF type."""
