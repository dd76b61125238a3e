"""Kernel selection by device, or by the environment variable ``MMSPEC_KERNELS``.

auto       Triton on the current CUDA device if supported, else plain torch; C++ for packed weights on a CPU
reference  plain torch
triton     Triton; on a CPU only through its interpreter (``TRITON_INTERPRET=1``), for tests
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

from mmspec.errors import UserError

CHOICES = ("auto", "reference", "triton")

_MIN_CAPABILITY = (8, 0)  # minimum CUDA compute capability

_BUILDING = ("triton.backends.nvidia.compiler", "triton.runtime.build", "triton.runtime.driver")
"""Modules that run while Triton compiles a kernel or its launcher, not while the device runs one."""

_failed: dict[str, str] = {}  # reason why Triton could not build a kernel, by operation

P = ParamSpec("P")
T = TypeVar("T")


def operation(check: Callable[..., None] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a torch reference: calls run its Triton kernel if Triton is in use, else the reference.

    If Triton cannot build a kernel (compilation error, too little shared memory or registers), this process warns once
    and uses the reference. ``MMSPEC_KERNELS=triton`` raises instead. Device errors are always raised.

    For a reference ``NAME`` of a module ``MODULE``, ``NAME`` of ``triton_MODULE`` launches the kernel, with the same
    arguments, defaults and results. It must not modify its arguments before all its kernels are built. The first tensor
    among the arguments determines the device.

    Args:
        check: called with the arguments before either; raises if shapes disagree.
    """

    def decorate(reference: Callable[P, T]) -> Callable[P, T]:
        package, _, module = reference.__module__.rpartition(".")
        name = reference.__name__

        @wraps(reference)
        def run(*args: P.args, **options: P.kwargs) -> T:
            if check is not None:
                check(*args, **options)
            device = next(x.device for x in (*args, *options.values()) if isinstance(x, torch.Tensor))
            required = os.environ.get("MMSPEC_KERNELS") == "triton"
            if in_use(device) == "reference" or (name in _failed and not required):
                return reference(*args, **options)
            try:
                launch: Callable[P, T] = getattr(import_module(f"{package}.triton_{module}"), name)
                return launch(*args, **options)
            except Exception as error:
                if required or not _unbuilt(error):
                    raise
                # A compilation error starts with the source, and has a message or a cause.
                text = str(getattr(error, "error_message", None) or error.__cause__ or error).strip()
                _failed[name] = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
            warnings.warn(
                f"Triton cannot build {name}, plain torch runs instead: {_failed[name]}", RuntimeWarning, stacklevel=2
            )
            return reference(*args, **options)

        return run

    return decorate


def failed() -> dict[str, str]:
    """Operations whose Triton kernels could not be built in this process, and the reasons."""
    return dict(_failed)


def in_use(device: torch.device) -> str:
    """The implementation for tensors on a device: "triton" or "reference". Raises ``UserError``: ``MMSPEC_KERNELS`` is
    not in ``CHOICES``, or requires Triton on a device without support."""
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


def require_contiguous(*tensors: torch.Tensor | None) -> None:
    """Raise ``RuntimeError`` if a tensor that a kernel reads without its strides is not contiguous."""
    for x in tensors:
        if x is not None and not x.is_contiguous():
            raise RuntimeError(f"expected a contiguous tensor: got {tuple(x.shape)} with strides {x.stride()}")


def static_shapes(device: torch.device) -> bool:
    """Whether steps use static shapes and buffers with a single host sync: on CUDA, and wherever Triton runs."""
    return device.type == "cuda" or in_use(device) == "triton"


def _unbuilt(error: Exception) -> bool:
    """Whether a kernel was not built: Triton's own errors, and errors during compilation or linking."""
    if any(kind.__module__.startswith("triton.") for kind in type(error).__mro__):
        return True
    frames = [
        (frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return ("triton.compiler.compiler", "compile") in frames or any(module in _BUILDING for module, _ in frames)


@cache
def _problem(kind: str, index: int | None, interpreted: bool) -> str | None:
    """Reason why Triton cannot run on a device; None if it can."""
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
