"""Linear layers for the kernels of ``mmspec.ops.cpu``: int4, int8, bfloat16 or float32 weights in blocks of 16 output
features. ``mmspec.quantisation.formats`` adds other GGUF formats.

A row of a product is bitwise identical for any number of rows and threads. Inputs of int4 and int8 layers are quantised
to int8, per row and group of 32 features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.ops import cpu
from mmspec.ops.cpu import LANES
from mmspec.quantisation.linear import GROUP, PackedLinear, quantise_int4

_LINE = 64  # bytes of a cache line


class BlockMemory:
    """Contiguous memory for the blocks of layers, in the order in which a forward pass reads them.

    Args:
        sizes: size of each layer's blocks in bytes.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._whole = self._left = cpu.zeros(sum(map(_lines, sizes)))

    def written(self) -> None:
        """Call after all layers are written; see ``cpu.use_huge_pages``."""
        cpu.use_huge_pages(self._whole)

    def take(self, blocks: int, size: int) -> Tensor:
        """(blocks, size) uint8, for the next layer."""
        taken, self._left = self._left.split([count := _lines(blocks * size), len(self._left) - count])
        return taken[: blocks * size].view(blocks, size)


def _lines(size: int) -> int:
    return size + -size % _LINE


class BlockLinear(PackedLinear):
    """A linear layer in the kernels' layout. All shapes are supported: blocks and groups are padded with zeros.

    Attributes:
        takes: minimum precision of outputs: bfloat16, or float32 for logits.
    """

    kind: ClassVar[str]
    _blocks: Tensor

    @classmethod
    def of(cls, layer: Any) -> BlockLinear | None:
        """A layer for the kernels: a ``BlockLinear`` itself, a copy of a float32 ``nn.Linear``, None for others."""
        if isinstance(layer, BlockLinear):
            return layer
        if isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32:
            return Float32Blocks(layer.weight, layer.bias)
        return None

    @classmethod
    def empty(cls, inputs: int, outputs: int, bias: Tensor | None = None, memory: BlockMemory | None = None) -> Self:
        """A layer with uninitialised blocks."""
        layer = object.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = inputs, outputs
        layer.register_buffer("bias", None if bias is None else bias.detach().to(cls._bias_dtype))
        shape = -(-outputs // LANES), cls.size_of(inputs, LANES)
        blocks = torch.empty(shape, dtype=torch.uint8) if memory is None else memory.take(*shape)
        layer.register_buffer("_blocks", blocks, persistent=False)
        return layer

    @classmethod
    def size_of(cls, inputs: int, outputs: int) -> int:
        """Bytes of a layer's blocks."""
        return cpu.bytes_of_blocks(cls.kind, inputs, outputs)

    def moved(self, memory: BlockMemory) -> Self:
        """Move the layer's blocks to this memory."""
        self._blocks = memory.take(*self._blocks.shape).copy_(self._blocks)
        self.__dict__.pop("_native", None)
        return self

    def rows(self, index: Tensor | slice) -> Self:
        """A layer with only these rows; whole blocks from the first on share memory."""
        first, last, step = index.indices(self.out_features) if isinstance(index, slice) else (1, 0, 1)
        if first or last % LANES or step != 1:
            return super().rows(index)
        part = self.empty(self.in_features, last, None if self.bias is None else self.bias[index])
        part.takes, part._blocks = self.takes, self._blocks[: last // LANES]
        return part

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return super().forward(x)
        return cpu.linear(self.native, x.float()).to(torch.promote_types(x.dtype, self.takes))

    @property
    def native(self) -> Any:
        """The weights for functions of ``mmspec.ops.cpu``."""
        made = self.__dict__.get("_native")
        if made is None:
            self._bias = None if self.bias is None else self.bias.float()
            made = cpu.linear_weights(self.kind, self._blocks, self._bias, self.in_features, self.out_features)
            self.__dict__["_native"] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_native", "_bias")}
        # Copies do not share memory with other layers.
        return {**state, "_buffers": {**self._buffers, "_blocks": self._blocks.clone()}}

    def _product(self, rows: Tensor) -> Tensor:
        return cpu.linear(self.native, rows.float())

    def _store(self, *parts: Tensor) -> None:
        self.out_features = len(parts[0])
        padding = 0, -self.out_features % LANES
        padded = [F.pad(part, (0, 0) * (part.ndim - 1) + padding) for part in parts]
        self.register_buffer("_blocks", self._laid_out(*padded), persistent=False)

    @abstractmethod
    def _laid_out(self, *parts: Tensor) -> Tensor:
        """Convert the parts of a weight, with a multiple of 16 rows, to blocks, (blocks, bytes) uint8."""

    @property
    def _groups(self) -> int:
        return -(-self.in_features // GROUP)


def place_together(layers: Iterable[BlockLinear]) -> None:
    """Move the weights of layers, in order, into one ``BlockMemory``."""
    layers = list(layers)
    memory = BlockMemory(layer._blocks.numel() for layer in layers)
    for layer in layers:
        layer.moved(memory)
    memory.written()


class DenseBlocks(BlockLinear):
    """Weights that are not quantised, ``together`` adjacent features of each output feature."""

    dtype: ClassVar[torch.dtype]
    together: ClassVar[int]

    def _pack(self, weight: Tensor) -> None:
        self._store(whole_groups(weight.to(self.dtype)))

    def _unpacked(self) -> Tensor:
        return self._parts()[0][: self.out_features, : self.in_features].contiguous()

    def _laid_out(self, *parts: Tensor) -> Tensor:
        return _interleaved(parts[0], self.together).flatten(1).view(torch.uint8)

    def _parts(self) -> list[Tensor]:
        shape = self._groups, GROUP // self.together, LANES, self.together
        return [_rows(self._blocks.view(self.dtype).unflatten(1, shape))]


class Bfloat16Blocks(DenseBlocks):
    """bfloat16 weights; inputs are rounded to bfloat16."""

    kind, dtype, together = "bfloat16", torch.bfloat16, 2


class Float32Blocks(DenseBlocks):
    """float32 weights."""

    kind, dtype, together = "float32", torch.float32, 1
    takes = _bias_dtype = torch.float32


class Int8Blocks(BlockLinear):
    """int8 weights with one float16 scale per row and group; represents GGUF's Q8_0 exactly."""

    kind = "int8"

    def _pack(self, weight: Tensor) -> None:
        codes, scale = quantise_int8(whole_groups(weight))
        self._store(codes.view(torch.uint8) ^ 128, scale)

    def _unpacked(self) -> Tensor:
        codes, scale = self._parts()
        weight = (codes.unflatten(1, (-1, GROUP)) - 128.0) * scale.float()[..., None]
        return weight.flatten(1)[: self.out_features, : self.in_features].bfloat16()

    def _laid_out(self, *parts: Tensor) -> Tensor:
        codes, scale = parts
        pairs = [_in_pairs(part) for part in (_interleaved(codes, 4).flatten(2), _grid(scale))]
        return torch.cat(pairs, dim=2).flatten(1)

    def _parts(self) -> list[Tensor]:
        codes, scale = self._blocks.unflatten(1, (-1, 1088)).split([1024, 64], dim=2)
        codes, scale = codes.unflatten(2, (2, -1)).flatten(1, 2), scale.unflatten(2, (2, -1)).flatten(1, 2)
        codes = codes[:, : self._groups].unflatten(2, (8, LANES, 4))
        return [_rows(codes), _rows_of_grid(scale[:, : self._groups])]


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise groups of 32 weights along a row to ``scale * code``.

    Args:
        weight: (rows, columns), columns a multiple of 32.

    Returns:
        codes (rows, columns) int8, at least -127; scale (rows, columns / 32) float16.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 127).half()
    step = scale.float()[..., None]
    codes = (groups / torch.where(step == 0, 1.0, step)).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scale


class Int4Blocks(BlockLinear):
    """int4 weights with a float16 scale and value of code 0 per row and group; exact for GGUF's Q4_0 and Q4_1."""

    kind = "int4"
    bits: ClassVar[int] = 4

    def _pack(self, weight: Tensor) -> None:
        codes, scale, zero = quantise_int4(whole_groups(weight))
        self._store(codes, scale.half(), (zero - 8 * scale).half())

    def _unpacked(self) -> Tensor:
        codes, scale, low = self._parts()
        weight = codes.unflatten(1, (-1, GROUP)) * scale.float()[..., None] + low.float()[..., None]
        return weight.flatten(1)[: self.out_features, : self.in_features].bfloat16()

    def _laid_out(self, *parts: Tensor) -> Tensor:
        codes, scale, low = parts
        return torch.cat([packed_codes(codes, self.bits), _grid(scale), _grid(low)], dim=2).flatten(1)

    def _parts(self) -> list[Tensor]:
        groups = self._blocks.unflatten(1, (self._groups, -1))
        codes, scale, low = groups.split([64 * self.bits, 32, 32], dim=2)
        return [unpacked_codes(codes, self.bits), _rows_of_grid(scale), _rows_of_grid(low)]


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 4 to 6 bits in the layout of ``cpp/formats.h``.

    Args:
        codes: (rows, features) uint8.

    Returns:
        (blocks, groups, 64 * bits) uint8: bytes with the low 4 bits of two vectors of 64 codes, then planes with the
        remaining bits of ``8 / (bits - 4)`` vectors each.
    """
    vectors = _interleaved(codes, 4)  # (blocks, groups, 8, 16, 4)
    even, odd = (vectors & 15).unflatten(2, (4, 2)).unbind(3)
    high = bits - 4
    if not high:
        return (even | odd << 4).flatten(2)
    shifted = (vectors >> 4).unflatten(2, (high, -1)) << _shifts(high)
    return torch.cat([(even | odd << 4).flatten(2), shifted.sum(3, dtype=torch.uint8).flatten(2)], dim=2)


def unpacked_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of ``packed_codes``: (rows, features) uint8."""
    low, planes = packed.split([256, 64 * bits - 256], dim=2)
    both = low.unflatten(2, (4, 1, LANES, 4))
    vectors = torch.cat([both & 15, both >> 4], dim=3).flatten(2, 3)
    if high := bits - 4:
        more = planes.unflatten(2, (high, 1, LANES, 4)) >> _shifts(high) & (1 << high) - 1
        vectors |= more.flatten(2, 3) << 4
    return _rows(vectors)


def _shifts(high: int) -> Tensor:
    return torch.arange(0, 8, high, dtype=torch.uint8)[:, None, None]


def whole_groups(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % GROUP))


def _interleaved(rows: Tensor, together: int) -> Tensor:
    """(blocks, groups, 32 / together, 16, together), from (rows, features)."""
    blocks = rows.unflatten(1, (-1, GROUP // together, together)).unflatten(0, (-1, LANES))
    return blocks.permute(0, 2, 3, 1, 4).contiguous()


def _rows(blocks: Tensor) -> Tensor:
    """Inverse of ``_interleaved``: (rows, features)."""
    return blocks.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)


def _grid(scale: Tensor) -> Tensor:
    """(blocks, groups, 32) uint8, from (rows, groups) float16."""
    return scale.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous().view(torch.uint8)


def _rows_of_grid(grid: Tensor) -> Tensor:
    """Inverse of ``_grid``: (rows, groups) float16."""
    return grid.contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)


def _in_pairs(groups: Tensor) -> Tensor:
    """Join pairs of groups, zero-padded: (blocks, groups, bytes) -> (blocks, pairs, 2 * bytes)."""
    return F.pad(groups, (0, 0, 0, groups.shape[1] % 2)).unflatten(1, (-1, 2)).flatten(2)


BLOCKS: dict[str, type[BlockLinear]] = {
    cls.kind: cls for cls in (Float32Blocks, Bfloat16Blocks, Int8Blocks, Int4Blocks)
}
