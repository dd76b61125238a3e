"""Decays along the paths of a tree, as exponents of base 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log2_decay(dt: Tensor, a: Tensor | float = 1.0) -> Tensor:
    """``dt a`` in base 2, in float64, as differences of large path sums are used; on MPS, float32."""
    return (dt * (a * math.log2(math.e))).to(torch.float32 if dt.device.type == "mps" else torch.float64)


def exp2(exponent: Tensor) -> Tensor:
    """``exp2`` in float32 that flushes values below 2**-100 to zero.

    CPUs are about a hundred times slower on denormals, in every later product too. So is torch's ``exp`` (MKL) on
    denormals and infinities, unlike its ``exp2``.
    """
    return torch.nn.functional.threshold(exponent.float(), -100.0, -torch.inf).exp2_()
