"""Weights of random codes in the formats of GGUF, as the package gguf reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmspec.quantisation.formats import StoredRows

_HALVES = {"Q6_K": [208], **{form: [0, 2] for form in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}}
"""Places of float16 numbers in a block; elsewhere at its start."""


def random_rows(
    form: str, shape: tuple[int, int], seed: int = 0, fill: int | None = None, scale: float = 1 / 64
) -> np.ndarray:
    """(rows, bytes) uint8: random codes and integer scales, or all bytes ``fill``; float16 numbers by ``scale``."""
    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    count, size = module.GGML_QUANT_SIZES[module.GGMLQuantizationType[form]]
    random = np.random.default_rng([seed, *form.encode()])
    blocks = random.integers(0, 256, (shape[0], shape[1] // count, size), dtype=np.uint8)
    if fill is not None:
        blocks[:] = fill
    if form == "MXFP4":
        blocks[..., 0] = random.integers(110, 124, blocks.shape[:2])
        return blocks.reshape(shape[0], -1)
    for place in _HALVES.get(form, [0]):
        halves = random.standard_normal((*blocks.shape[:2], 1)) * scale
        blocks[..., place : place + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def dequantised(form: str, rows: np.ndarray) -> Tensor:
    """(rows, features) float32, by the package gguf."""
    module: Any = pytest.importorskip("gguf", reason="the package gguf is not installed")
    return torch.from_numpy(module.dequantize(rows, module.GGMLQuantizationType[form]))


def stored(form: str, rows: int, features: int, seed: int = 0) -> tuple[StoredRows, Tensor]:
    """Random rows and their weight."""
    data = random_rows(form, (rows, features), seed)
    return StoredRows.of(form, torch.from_numpy(data), features), dequantised(form, data)
