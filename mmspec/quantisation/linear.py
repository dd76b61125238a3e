"""Linear layers with weights packed for torch's CPU kernels: bfloat16, float16, int8 or int4.

Row i of a product is bitwise identical for any number of rows from two; a single row is padded to two if a kernel would
round it differently. So a tree node gets the same result as the token in plain decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.errors import UserError

GROUP = 32  # weights that share an int4 scale
_SINGLE_DIFFERS: dict[tuple[Any, ...], bool] = {}


class PackedLinear(nn.Module, ABC):
    """Linear layer with its weight in a kernel's layout, for inference on a CPU.

    ``weight`` and ``state_dict`` unpack the weight to bfloat16 at each use.

    Args:
        weight: (out_features, in_features), any floating dtype.
        bias: (out_features,) or None.
    """

    takes = torch.bfloat16  # dtype of the kernel's inputs and outputs
    _bias_dtype = torch.bfloat16
    _least_rows = 2  # pad to this number if the kernel is faster or rounds differently then
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", None if bias is None else bias.detach().to(self._bias_dtype))
        self._pack(weight.detach().contiguous())

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whether the kernel supports weights of this shape."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():  # for training a drafter through its target's head
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        rows = x.reshape(-1, self.in_features).to(self.takes)
        count = len(rows)
        if count < self._least_rows and (count > 1 or self._single_differs()):
            rows = F.pad(rows, (0, 0, 0, self._least_rows - count))
        y = self._product(rows.contiguous())[:count]
        return y.view(*x.shape[:-1], self.out_features).to(torch.promote_types(x.dtype, self.takes))

    def _single_differs(self) -> bool:
        """Whether the kernel rounds a single row differently; tested once per shape."""
        key = type(self), self.in_features, self.out_features, torch.get_num_threads()
        if key not in _SINGLE_DIFFERS:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(8, self.in_features, dtype=torch.float32, generator=generator).to(self.takes)
            alone = torch.cat([self._product(row) for row in rows.split(1)])
            _SINGLE_DIFFERS[key] = not torch.equal(alone, self._product(rows))
        return _SINGLE_DIFFERS[key]

    def rows(self, index: Tensor | slice) -> Self:
        """A layer with only these rows of the packed weight."""
        part = object.__new__(type(self))
        nn.Module.__init__(part)
        part.in_features = self.in_features
        part.register_buffer("bias", None if self.bias is None else self.bias[index].contiguous())  # for oneDNN
        part.takes = self.takes
        part._store(*(rows[: self.out_features][index] for rows in self._parts()))
        return part

    def unpacked(self) -> nn.Linear:
        """An ``nn.Linear`` with the same weight."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer

    @property
    def weight(self) -> Tensor:
        return self._unpacked()

    def _pack(self, weight: Tensor) -> None:
        """Quantise and ``_store`` a weight; by default, it is not quantised."""
        self._store(weight)

    @abstractmethod
    def _unpacked(self) -> Tensor: ...

    @abstractmethod
    def _store(self, *parts: Tensor) -> None:
        """Store the parts of a weight, (out_features or more, ...) each, in the kernel's layout."""

    @abstractmethod
    def _parts(self) -> list[Tensor]:
        """Inverse of ``_store``."""

    @abstractmethod
    def _product(self, rows: Tensor) -> Tensor: ...

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        moved = fn(torch.empty(0, dtype=torch.bfloat16))
        if moved.device.type != "cpu" or moved.dtype != torch.bfloat16:
            raise UserError(
                f"packed weights stay on the CPU, their inputs bfloat16: got {moved.dtype} on {moved.device}; load the "
                "model with that device and dtype"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("packed weights cannot be replaced: load the new weights into an unpacked model")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Bfloat16Linear(PackedLinear):
    """bfloat16 weights in oneDNN's layout; unpacked on CPUs without it, where torch rounds all rows alike."""

    _least_rows = 4  # measured: a sixth faster than one row
    _MOST_ROWS = 32  # with AMX, oneDNN sums more rows in a different order

    def _single_differs(self) -> bool:
        return self._weight.is_mkldnn

    def _store(self, *parts: Tensor) -> None:
        weight = parts[0].bfloat16().contiguous()
        self.out_features = len(weight)
        reorders = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if reorders else weight
        if not reorders:
            self._least_rows = 1

    def _unpacked(self) -> Tensor:
        return self._weight.to_dense() if self._weight.is_mkldnn else self._weight

    def _parts(self) -> list[Tensor]:
        return [self._unpacked()]

    def _product(self, rows: Tensor) -> Tensor:
        if not self._weight.is_mkldnn:
            return F.linear(rows, self._weight, self.bias)
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        parts = rows.split(self._MOST_ROWS) if has_amx else (rows,)
        done = [torch.ops.mkldnn._linear_pointwise(part, self._weight, self.bias, "none", [], "") for part in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight": self.weight}  # the layout is machine-specific

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._store(self._weight)


class HalfLinear(PackedLinear):
    """float16 weights in FBGEMM's layout, inputs and outputs in float32: fast for few rows, no rounding of logits."""

    takes = torch.float32
    _BLOCK = 6  # rows of FBGEMM's largest AVX2 kernel; its two-row kernel rounds differently

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        return "fbgemm" in torch.backends.quantized.supported_engines

    def _store(self, *parts: Tensor) -> None:
        self.out_features = len(parts[0])
        bias = None if self.bias is None else self.bias.float()
        self._weight = torch.ops.quantized.linear_prepack_fp16(parts[0].float(), bias)

    def _unpacked(self) -> Tensor:
        return self._parts()[0].bfloat16()

    def _parts(self) -> list[Tensor]:
        return [torch.ops.quantized.linear_unpack_fp16(self._weight)[0]]

    def _product(self, rows: Tensor) -> Tensor:
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            return torch.ops.quantized.linear_dynamic_fp16(rows, self._weight)
        whole = F.pad(rows, (0, 0, 0, -len(rows) % self._BLOCK))
        return torch.ops.quantized.linear_dynamic_fp16(whole, self._weight)[: len(rows)]


class Int8Linear(PackedLinear):
    """int8 weights with one scale per row; inputs and accumulators are not quantised."""

    _codes: Tensor
    _scale: Tensor

    def _pack(self, weight: Tensor) -> None:
        weight = weight.float()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self._store((weight / scale).round().to(torch.int8), scale[:, 0].bfloat16())

    def _unpacked(self) -> Tensor:
        return (self._codes * self._scale.float()[:, None]).bfloat16()

    def _store(self, *parts: Tensor) -> None:
        self.out_features = len(parts[0])
        for name, part in zip(("_codes", "_scale"), parts, strict=True):
            self.register_buffer(name, part.contiguous(), persistent=False)

    def _parts(self) -> list[Tensor]:
        return [self._codes, self._scale]

    def _product(self, rows: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(rows, self._codes, self._scale)
        return y if self.bias is None else y + self.bias


class Int4Linear(PackedLinear):
    """int4 weights, ``scale * (code - 8) + zero``, in groups of 32 along a row.

    Codes of already quantised weights (GGUF's Q4_0, Q4_1) are recovered exactly; scales and zeros are bfloat16.
    """

    _codes: Tensor
    _scales: Tensor

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        return in_features % GROUP == 0 and out_features % 16 == 0

    def _pack(self, weight: Tensor) -> None:
        self._store(*quantise_int4(weight))

    def _store(self, *parts: Tensor) -> None:
        codes, scale, zero = parts
        self.out_features = len(codes)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self.register_buffer("_codes", packed, persistent=False)
        scales = torch.stack([scale.t(), zero.t()], dim=-1).bfloat16().contiguous()  # (groups, out_features, 2)
        self.register_buffer("_scales", scales, persistent=False)

    def _unpacked(self) -> Tensor:
        codes, scale, zero = self._parts()
        return ((codes.unflatten(1, (-1, GROUP)) - 8.0) * scale[..., None] + zero[..., None]).flatten(1).bfloat16()

    def _parts(self) -> list[Tensor]:
        """Codes, (out_features, in_features) uint8, from products with the identity, because layouts are
        kernel-specific; scales and zeros, (out_features, groups) float32."""
        unit = torch.ones(self._scales.shape[:2], dtype=torch.bfloat16)
        scales = torch.stack([unit, 8 * unit], dim=-1)
        eye = torch.eye(self.in_features, dtype=torch.bfloat16)
        codes = torch._weight_int4pack_mm_for_cpu(eye, self._codes, GROUP, scales).t().to(torch.uint8)
        return [codes, *(part.t() for part in self._scales.float().unbind(-1))]

    def _product(self, rows: Tensor) -> Tensor:
        y = torch._weight_int4pack_mm_for_cpu(rows, self._codes, GROUP, self._scales)
        return y if self.bias is None else y + self.bias


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups of 32 weights along a row to ``scale * (code - 8) + zero``.

    Each group uses the better of two grids: from minimum to maximum weight (as GGUF's Q4_1), or multiples of an eighth
    of the weight with the largest magnitude (as Q4_0).

    Args:
        weight: (rows, columns), columns a multiple of 32.

    Returns:
        codes (rows, columns) uint8 below 16; scale and zero (rows, columns / 32) float32.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    widest = torch.where(high > -low, high, low)
    grids = [((high - low) / 15, low), (-widest / 8, widest)]  # step and the value of code 0
    codes, errors = [], []
    for step, first in grids:
        safe = torch.where(step == 0, 1.0, step)
        code = ((groups - first) / safe).round().clamp(0, 15)
        codes.append(code.to(torch.uint8))
        errors.append((code * step + first - groups).square().sum(-1, keepdim=True))
    better = errors[1] <= errors[0]  # if both are exact, the second avoids rounding of its offset
    code, step, first = (
        torch.where(better, b, a) for a, b in zip((codes[0], *grids[0]), (codes[1], *grids[1]), strict=True)
    )
    return code.flatten(1), step[..., 0], (first + 8 * step)[..., 0]
