"""A fake CUDA device: its tensors have no contents, and kernel launches do nothing.

Checks a step's use of devices without a GPU: an operation that mixes two devices fails, host syncs are counted, and
operations that a capture forbids fail during a "capture". Every number read from the device is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from mmspec.ops import graphs, kernels, triton_attention

CUDA = torch.device("cuda:0")
_aten = torch.ops.aten
# Methods that ask for the device's own code before they reach an operation.
_OPERATIONS = {"__invert__": _aten.bitwise_not.default, "copy_": _aten.copy_.default}


def on_fake_cuda(tensor: Tensor) -> Tensor:
    """A tensor of the same shape on the fake device, without contents; other values as they are."""
    if not isinstance(tensor, Tensor) or tensor.device == CUDA:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


def to_cuda(module: nn.Module, *like: Any, **options: Any) -> nn.Module:
    """In place of ``Module.to``."""
    dtype = next((x if isinstance(x, torch.dtype) else x.dtype for x in like if not isinstance(x, torch.device)), None)
    for part in module.modules():
        held: dict[str, Any] = part._parameters
        for name, value in held.items():
            held[name] = value if value is None else nn.Parameter(_moved(value, dtype), requires_grad=False)
        held = part._buffers
        for name, value in held.items():
            held[name] = value if value is None else _moved(value, dtype)
    return module


class _Graph:
    """In place of a graph that was captured."""

    def replay(self) -> None:
        """No effect: the capture computed the result."""


class _Event:
    """In place of a CUDA event. Times are asked for once the host has waited for the device since."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def record(self) -> None:
        assert not self._device.capturing, "an event is recorded while a pass is captured"
        self._at = self._device.waits

    def elapsed_time(self, end: _Event) -> float:
        assert self._device.waits > end._at, "the device may not have come to the event"
        return 1.0


class FakeCuda(TorchFunctionMode):
    """Runs what Python hands to torch on tensors that are not there.

    Attributes:
        reads: of the device by the host, by name; ``waits`` are all there have been.
        copies: of numbers of the host to the device from memory that is not pinned.
        captured: passes, and ``capturing`` while one is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies = 0
        self.waits = 0
        self.captured = 0
        self.capturing = False

    def capture(self, run: Callable[[], None], device: torch.device) -> _Graph:
        """In place of ``mmspec.ops.graphs._captured``."""
        self.capturing = True
        try:
            run()
        finally:
            self.capturing = False
        self.captured += 1
        return _Graph()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        known: Callable[..., Any] | None = getattr(self, f"_{name.strip('_')}", None)
        if known is not None and (
            name in ("tensor", "as_tensor") or args[0].device == CUDA or name in ("to", "pin_memory", "allclose")
        ):
            return known(func, *args, **kwargs)
        if name in ("__int__", "__index__", "__float__", "item") and args[0].device == CUDA:
            self.read("a number")
            return {"item": _one(args[0]), "__float__": 1.0}.get(name, 1)
        if name in _OPERATIONS and args[0].device == CUDA:
            return _OPERATIONS[name](*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(f"torch.Tensor.{name}: {error}") from error

    def read(self, name: str) -> None:
        """The host waits for a number of the device."""
        assert not self.capturing, f"{name} while a pass is captured"
        self.reads[name] += 1
        self.waits += 1

    def copied(self) -> None:
        assert not self.capturing, "numbers of the host are copied while a pass is captured"

    def _to(self, func: Any, x: Tensor, *like: Any, **options: Any) -> Tensor:
        pinned = getattr(x, "pinned", False)
        if not isinstance(x, FakeTensor):
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        device, dtype = options.get("device"), options.get("dtype")
        for other in like:
            if isinstance(other, Tensor):
                device, dtype = other.device, other.dtype
            elif isinstance(other, torch.dtype):
                dtype = other
            elif isinstance(other, str | torch.device):
                device = other
        device = x.device if device is None else torch.device(device)
        device = CUDA if device.type == "cuda" else device
        if x.device != device:
            if device != CUDA:
                self.read("to")
            else:
                self.copied()
                self.copies += not pinned
        elif x.dtype == (dtype or x.dtype) and not options.get("copy"):
            return x
        # A new tensor in the layout of a copy: torch.tensor may return a real tensor.
        return torch.empty_strided(x.shape, x.stride(), device=device, dtype=dtype or x.dtype)

    def _pin_memory(self, func: Any, x: Tensor) -> Tensor:
        x.pinned = True  # type: ignore[attr-defined]
        return x

    def _tensor(self, func: Any, data: Any, **options: Any) -> Tensor:
        device = options.pop("device", None)
        made = func(data, **options)
        if device is None or torch.device(device).type != "cuda":
            return made
        self.copied()
        self.copies += 1
        return torch.empty(made.shape, dtype=made.dtype, device=CUDA)

    _as_tensor = _tensor

    def _new_tensor(self, func: Any, like: Tensor, data: Any, **options: Any) -> Tensor:
        return self._tensor(torch.tensor, data, **{"dtype": like.dtype, "device": like.device, **options})

    def _allclose(self, func: Any, x: Tensor, *args: Any, **options: Any) -> bool:
        if not isinstance(x, FakeTensor):
            return bool(func(x, *args, **options))
        if x.device == CUDA:
            self.read("allclose")
        return True

    _equal = _allclose

    def _nonzero(self, func: Any, x: Tensor) -> Tensor:
        self.read("nonzero")
        return torch.empty(0, x.ndim, dtype=torch.long, device=CUDA)  # nothing is found

    def _getitem(self, func: Any, x: Tensor, index: Any) -> Tensor:
        view, at = self._indexed(x, index)
        return _aten.index.Tensor(view, at) if at else _aten.alias.default(view)

    def _setitem(self, func: Any, x: Tensor, index: Any, value: Any) -> None:
        view, at = self._indexed(x, index)
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=x.dtype, device=CUDA)
        if at:
            _aten.index_put_.default(view, at, value)
        else:
            _aten.copy_.default(view, value)

    def _indexed(self, x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
        """The view that numbers and slices make, and tensors by its axes."""
        index = list(index) if isinstance(index, tuple) else [index]
        taken = sum(i.ndim if _is_mask(i) else i is not None and i is not Ellipsis for i in index)
        rest = [at for at, i in enumerate(index) if i is Ellipsis]
        for at in rest:
            index[at : at + 1] = [slice(None)] * (x.ndim - taken)
        axis, tensors = 0, {}
        for i in index:
            if i is None:
                x, axis = _aten.unsqueeze.default(x, axis), axis + 1
            elif isinstance(i, int):
                x = _aten.select.int(x, axis, i)
            elif isinstance(i, slice):
                start, stop, step = i.indices(x.shape[axis])
                x, axis = _aten.slice.Tensor(x, axis, start, max(stop, start), step), axis + 1
            else:
                if _is_mask(i):
                    self.read("index by a mask")
                tensors[axis] = i if isinstance(i, Tensor) else torch.zeros(len(i), dtype=torch.long, device=CUDA)
                axis += i.ndim if _is_mask(i) else 1
        return x, [tensors.get(axis) for axis in range(max(tensors) + 1)] if tensors else []


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _moved(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    there = on_fake_cuda(tensor)
    if dtype in (None, there.dtype) or not there.is_floating_point():
        return there
    return _aten._to_copy.default(there, dtype=dtype)


def _contiguous(x: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    return x if x.is_contiguous() else _aten.clone.default(x, memory_format=memory_format)


def _one(x: Tensor) -> Any:
    return x.dtype == torch.bool or (1.0 if x.is_floating_point() else 1)


def _ones(shape: Any) -> Any:
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch, strict: bool = True) -> Iterator[FakeCuda]:
    """Run on a fake CUDA device. ``strict`` refuses real tensors; otherwise they are treated as fake tensors."""
    device = FakeCuda()

    def scalar(mode: Any, func: Any, x: Tensor) -> Any:
        device.read("a number")
        return _one(x)

    def tolist(x: Tensor) -> Any:
        device.read("tolist")
        return _ones(x.shape)

    patch.setitem(fake_impls.op_implementations_dict, _aten._local_scalar_dense.default, scalar)
    patch.setattr(FakeTensor, "tolist", tolist)
    patch.setattr(FakeTensor, "contiguous", _contiguous, raising=False)
    patch.setattr(nn.Module, "to", to_cuda)
    patch.setattr(kernels, "_problem", lambda *_: None)
    patch.setattr(JITFunction, "run", lambda *_, **__: None)
    patch.setattr(graphs, "_captured", device.capture)
    patch.setattr(graphs, "_failure", None)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    # An old device: newer devices have a fake product of experts for bfloat16 only.
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    patch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(device))
    patch.setattr(triton_attention, "_device", lambda *_: triton_attention._Device(132, 232448))
    patch.delenv("MMSPEC_KERNELS", raising=False)
    # Builds of torch for CUDA up to 2.9 ask the driver which fused attention fits; plain attention needs no answer.
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FakeTensorMode(allow_non_fake_inputs=not strict),
        device,
    ):
        yield device
