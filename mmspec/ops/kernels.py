"""Which implementation of the kernels runs: what the device has, or what ``MMSPEC_KERNELS`` says.

auto       Triton on the current CUDA device if it compiles for that, else plain torch
reference  plain torch, everywhere
triton     Triton; on a CPU only through its interpreter (``TRITON_INTERPRET=1``), which is for tests
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from mmspec.errors import UserError

CHOICES = ("auto", "reference", "triton")

_OLDEST = (8, 0)
"""Compute capability that the kernels are compiled for and up."""


def in_use(device: torch.device) -> str:
    """ "triton" or "reference", for tensors on a device.

    Raises:
        UserError: ``MMSPEC_KERNELS`` is none of ``CHOICES``, or asks for Triton where it cannot run.
    """
    wanted = os.environ.get("MMSPEC_KERNELS", "auto")
    if wanted not in CHOICES:
        raise UserError(f"MMSPEC_KERNELS must be one of {', '.join(CHOICES)}: got {wanted!r}")
    if wanted == "reference" or (wanted == "auto" and device.type != "cuda"):
        return "reference"
    problem = _problem(device.type, device.index, os.environ.get("TRITON_INTERPRET") == "1")
    if not problem and device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        problem = "expected CUDA's current device, on which alone Triton launches (torch.cuda.set_device)"
    if problem and wanted == "triton":
        raise UserError(f"MMSPEC_KERNELS=triton cannot run on {device}: {problem}")
    return "reference" if problem else "triton"


def fixed_shapes(device: torch.device) -> bool:
    """Whether steps keep their shapes and addresses, and the host is told nothing but what they emit.

    So it is on CUDA devices, where the host would have to wait and where steps are captured, and wherever Triton runs.
    """
    return device.type == "cuda" or in_use(device) == "triton"


@cache
def _problem(kind: str, index: int | None, interpreted: bool) -> str | None:
    """Why Triton cannot run there; None where it can."""
    if find_spec("triton") is None:
        return "expected the package triton, found none"
    if interpreted:
        return None
    if kind != "cuda":
        return "expected a CUDA device"
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        return f"expected compute capability {_OLDEST[0]}.{_OLDEST[1]} or newer, found {capability[0]}.{capability[1]}"
    return None
