"""Weights in the formats of GGUF, which the kernels run as they are in the file.

Formats and names: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h. A row is a sequence of
blocks of 32 weights, in the K formats of 256: 8 groups of 32, whose scales are 6-bit integers (Q6_K: 8-bit ones, for 16
weights each) times a float16 ``d``, and whose offsets are such integers times ``dmin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.quantisation.blocks import (
    LANES,
    BlockLinear,
    Int4Blocks,
    Int8Blocks,
    JoinedLinear,
    packed_codes,
    unpacked_codes,
)
from mmspec.quantisation.linear import GROUP


@dataclass(frozen=True)
class StoredRows:
    """Rows of a weight as a GGUF file has them.

    Attributes:
        format: one of ``FORMATS``.
        data: (rows, bytes) uint8.
    """

    format: str
    data: Tensor

    def layer(self, bias: Tensor | None = None) -> BlockLinear:
        """A linear layer with exactly these weights."""
        layer, parts = FORMATS[self.format]
        return layer.of_parts(parts(self.data), bias)

    def ordered(self, order: Tensor) -> StoredRows:
        """The rows in another order."""
        return StoredRows(self.format, self.data[order])


def concatenated(parts: Iterable[StoredRows]) -> list[StoredRows]:
    """Rows one after the other, neighbours of one format as one."""
    runs = [(kind, [part.data for part in run]) for kind, run in groupby(parts, lambda part: part.format)]
    return [StoredRows(kind, torch.cat(data)) for kind, data in runs]


def stored_layer(stored: Sequence[StoredRows], bias: Tensor | None) -> BlockLinear | JoinedLinear:
    """A linear layer with exactly these weights, one after the other."""
    sizes = [len(rows.data) for rows in stored]
    biases = [None] * len(stored) if bias is None else bias.split(sizes)
    layers = [rows.layer(part) for rows, part in zip(stored, biases, strict=True)]
    return layers[0] if len(layers) == 1 else JoinedLinear(layers)


class Q5Blocks(Int4Blocks):
    """5-bit codes, a float16 scale and value of code 0 per row and group: what Q5_0 and Q5_1 hold."""

    kind = "q5"
    bits = 5


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
        """(rows, groups, 32), from codes of this shape and the products of d and dmin with a group's factors."""
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
    """What Q4_K holds."""

    kind = "q4_k"
    bits = 4


class Q5KBlocks(SuperBlocks):
    """What Q5_K holds."""

    kind = "q5_k"
    bits = 5


class Q6KBlocks(SuperBlocks):
    """What Q6_K holds: factors are those of a group's halves, as int8, and both are of d; codes are 32 too large."""

    kind = "q6_k"
    bits = 6

    def _factors(self, factors: Tensor) -> Tensor:
        return factors.view(torch.int8).float()

    def _weight(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes - 32) * scale.repeat_interleave(GROUP // 2, dim=2)


def _blocks(data: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Fields of so many bytes of each block, (rows, blocks, bytes) each."""
    return tuple(part.contiguous() for part in data.unflatten(1, (-1, sum(sizes))).split(sizes, dim=2))


def _half(field: Tensor) -> Tensor:
    """(rows, blocks) float16."""
    return field.view(torch.float16)[..., 0]


def _bits(field: Tensor, count: int) -> Tensor:
    """(rows, blocks, 8 / count, bytes): the lowest ``count`` bits of each byte, then the next ones, ..."""
    return field[:, :, None] >> torch.arange(0, 8, count, dtype=torch.uint8)[:, None] & (1 << count) - 1


def _fifth(field: Tensor) -> Tensor:
    """(rows, blocks, 32), value 16: a bit per weight, from (rows, blocks, 4)."""
    return _bits(field, 1).transpose(2, 3).flatten(2) << 4


def _q4_0(data: Tensor) -> list[Tensor]:
    d, codes = _blocks(data, 2, 16)
    return [_bits(codes, 4).flatten(1), _half(d), -8 * _half(d)]


def _q4_1(data: Tensor) -> list[Tensor]:
    d, low, codes = _blocks(data, 2, 2, 16)
    return [_bits(codes, 4).flatten(1), _half(d), _half(low)]


def _q5_0(data: Tensor) -> list[Tensor]:
    d, high, codes = _blocks(data, 2, 4, 16)
    return [(_bits(codes, 4).flatten(2) | _fifth(high)).flatten(1), _half(d), -16 * _half(d)]


def _q5_1(data: Tensor) -> list[Tensor]:
    d, low, high, codes = _blocks(data, 2, 2, 4, 16)
    return [(_bits(codes, 4).flatten(2) | _fifth(high)).flatten(1), _half(d), _half(low)]


def _q8_0(data: Tensor) -> list[Tensor]:
    d, codes = _blocks(data, 2, 32)
    return [codes.flatten(1) ^ 128, _half(d)]


def _pairs(packed: Tensor) -> Tensor:
    """(rows, groups, 2): the 6-bit factors of scale and offset, from 12 bytes (rows, superblocks, 12)."""
    first, second, rest = packed.split(4, dim=2)  # the low 6 bits of groups 0 to 3; 4 bits of groups 4 to 7
    scale = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=2)
    offset = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=2)
    return torch.stack([scale, offset], dim=3).flatten(1, 2)


def _q4_k(data: Tensor) -> list[Tensor]:
    shared, factors, codes = _blocks(data, 4, 12, 128)
    codes = _bits(codes.unflatten(2, (4, 32)).flatten(1, 2), 4)
    return [codes.flatten(1), _pairs(factors), shared.view(torch.float16)]


def _q5_k(data: Tensor) -> list[Tensor]:
    shared, factors, high, codes = _blocks(data, 4, 12, 32, 128)
    codes = _bits(codes.unflatten(2, (4, 32)).flatten(1, 2), 4).flatten(1)
    return [codes | _bits(high, 1).flatten(1) << 4, _pairs(factors), shared.view(torch.float16)]


def _q6_k(data: Tensor) -> list[Tensor]:
    low, high, factors, d = _blocks(data, 128, 64, 16, 2)
    codes = _bits(low.unflatten(2, (2, 64)).flatten(1, 2), 4).flatten(1)
    more = _bits(high.unflatten(2, (2, 32)).flatten(1, 2), 2).flatten(1)
    return [codes | more << 4, factors.flatten(1).unflatten(1, (-1, 2)), d.view(torch.float16).expand(-1, -1, 2)]


FORMATS: dict[str, tuple[type[BlockLinear], Callable[[Tensor], list[Tensor]]]] = {
    "Q4_0": (Int4Blocks, _q4_0),
    "Q4_1": (Int4Blocks, _q4_1),
    "Q5_0": (Q5Blocks, _q5_0),
    "Q5_1": (Q5Blocks, _q5_1),
    "Q8_0": (Int8Blocks, _q8_0),
    "Q4_K": (Q4KBlocks, _q4_k),
    "Q5_K": (Q5KBlocks, _q5_k),
    "Q6_K": (Q6KBlocks, _q6_k),
}
"""Layers for GGUF's types, and what reads a weight's parts from its rows."""
