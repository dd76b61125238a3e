"""Kernel selection by device, or by the environment variable ``MMSPEC_KERNELS``.

auto       Triton on the current CUDA device if supported, else plain torch; C++ for packed weights on a CPU
reference  plain torch
triton     Triton; on a CPU only through its interpreter (``TRITON_INTERPRET=1``), for tests
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from mmspec.errors import UserError

CHOICES = ("auto", "reference", "triton")

_MIN_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability."""


def in_use(device: torch.device) -> str:
    """The implementation for tensors on a device: "triton" or "reference".

    Raises:
        UserError: ``MMSPEC_KERNELS`` is not in ``CHOICES``, or requires Triton where it cannot run.
    """
    wanted = os.environ.get("MMSPEC_KERNELS", "auto")
    if wanted not in CHOICES:
        raise UserError(f"MMSPEC_KERNELS must be one of {', '.join(CHOICES)}: got {wanted!r}")
    if wanted == "reference" or (wanted == "auto" and device.type != "cuda"):
        return "reference"
    problem = _problem(device.type, device.index, os.environ.get("TRITON_INTERPRET") == "1")
    if not problem and device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        problem = "expected the current CUDA device, the only one Triton launches on (torch.cuda.set_device)"
    if problem and wanted == "triton":
        raise UserError(f"MMSPEC_KERNELS=triton cannot run on {device}: {problem}")
    return "reference" if problem else "triton"


def static_shapes(device: torch.device) -> bool:
    """Whether steps use static shapes and buffers and sync with the host once: on CUDA, and wherever Triton runs."""
    return device.type == "cuda" or in_use(device) == "triton"


@cache
def _problem(kind: str, index: int | None, interpreted: bool) -> str | None:
    """Why Triton cannot run on a device; None if it can."""
    if find_spec("triton") is None:
        return "expected the package triton, found none"
    if interpreted:
        return None
    if kind != "cuda":
        return "expected a CUDA device"
    capability = torch.cuda.get_device_capability(index)
    if capability < _MIN_CAPABILITY:
        minimum, version = (f"{major}.{minor}" for major, minor in (_MIN_CAPABILITY, capability))
        return f"expected compute capability {minimum} or newer, found {version}"
    return None
