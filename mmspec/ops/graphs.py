"""CUDA graph capture per input shape: a decode step has a few hundred kernel launches and is host-bound without graphs.

Captured functions read inputs from static buffers and may update tensors in place; all other tensors must keep their
addresses (``TreeCache(static_shapes=True)``). ``MMSPEC_GRAPHS=0`` disables capture.

All graphs of a device share one memory pool, so every replay overwrites the intermediates of the others. Inputs and
outputs are therefore allocated outside the pool.

After a failed capture, the process attempts no other: torch before 2.12 leaves the allocator in recording mode, so
``empty_cache``, the first call of every capture, would raise. Existing graphs are still replayed.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]

_failure: str | None = None  # see capture_failure
_captures = 0  # see num_captures


def capture_failure() -> str | None:
    """Description and traceback of the first failed capture in this process; None if none has failed."""
    return _failure


def num_captures() -> int:
    """Number of graphs captured by this process."""
    return _captures


def captures(device: torch.device) -> bool:
    """Whether calls are captured on a device, which must be the current CUDA device."""
    return (
        device.type == "cuda"
        and os.environ.get("MMSPEC_GRAPHS") != "0"
        and device.index in (None, torch.cuda.current_device())
    )


class Graphed:
    """Wraps a function in one CUDA graph per input shape; on other devices, calls it directly.

    The first call of a shape runs eagerly, as a warm-up; the second call is captured. Outputs are static buffers shared
    by all graphs: the next call overwrites them.

    Args:
        function: takes tensors, and settings by keyword; returns a tuple of tensors. It must not sync with the host.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._seen: dict[Hashable, _Graph] = {}
        self._memory: dict[Hashable, Tensor] = {}  # (size,) output buffers by index, dtype and device

    def __call__(self, *inputs: Tensor, version: Hashable = None, **settings: Any) -> tuple[Tensor, ...]:
        """Run the function, or replay its graph.

        Args:
            inputs: tensors on one device.
            version: changes when another tensor used by the function is reallocated; a change drops all graphs.
            settings: hashable; each combination has its own graph.
        """
        if not captures(inputs[0].device):
            return self._function(*inputs, **settings)
        shapes = tuple((x.shape, x.dtype, x.device) for x in inputs)
        key = version, shapes, tuple(sorted(settings.items()))
        if key not in self._seen:
            for old in [other for other in self._seen if other[0] != version]:  # type: ignore[index]
                del self._seen[old]  # stale addresses
            return self._function(*inputs, **settings) if _failure else self._warm_up(key, inputs, settings)
        graph = self._seen[key]
        if graph.graph is None and not self._capture(graph, settings):
            del self._seen[key]
            return self._function(*inputs, **settings)
        return graph.replay(inputs)

    def _warm_up(self, key: Hashable, inputs: tuple[Tensor, ...], settings: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run on the static buffers: kernels specialise on argument alignment, and cannot compile under capture."""
        buffers = tuple(x.clone() for x in inputs)
        results = self._function(*buffers, **settings)
        self._seen[key] = _Graph(buffers, tuple(self._output(place, like) for place, like in enumerate(results)))
        return results

    def _output(self, place: int, like: Tensor) -> Tensor:
        """A static buffer for the result at ``place``, which reuses earlier buffers if they are large enough."""
        key = place, like.dtype, like.device
        if key not in self._memory or len(self._memory[key]) < like.numel():
            self._memory[key] = like.new_empty(like.numel())
        return self._memory[key][: like.numel()].view(like.shape)

    def _capture(self, graph: _Graph, settings: dict[str, Any]) -> bool:
        """Capture a call; returns False if this or an earlier capture has failed."""
        global _captures
        if _failure:
            return False
        try:
            graph.capture(self._function, settings)
            with _CAPTURE_LOCK:
                _captures += 1
            return True
        except Exception as error:
            shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in graph.inputs)
            _give_up(error, f"{self._function.__qualname__} of {shapes}, {settings}")
            return False

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return sum(graph.graph is not None for graph in self._seen.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphed, (self._function,)  # graphs are process-local

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphed:
        return Graphed(copy.deepcopy(self._function, memo))


class _Graph:
    """Static input and output buffers of a call, and its graph once it is captured."""

    def __init__(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self, function: Function, settings: dict[str, Any]) -> None:
        def run() -> None:
            for mine, new in zip(self.outputs, function(*self.inputs, **settings), strict=True):
                mine.copy_(new)

        self.graph = _captured(run, self.inputs[0].device)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.graph is not None
        for buffer, value in zip(self.inputs, inputs, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.graph.replay()
        return self.outputs


_CAPTURE_LOCK = threading.Lock()  # A memory pool supports one capture at a time


def _give_up(error: Exception, what: str) -> None:
    """Disable capture after ``error`` was raised in the capture of ``what``."""
    global _failure
    with _CAPTURE_LOCK:
        if _failure:
            return
        _failure = f"capture of {what}\n{''.join(traceback.format_exception(error))}"
    warnings.warn(f"CUDA graph capture failed, steps run eagerly: {error}", RuntimeWarning, stacklevel=4)


def _captured(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Restores the current stream, which a failed capture does not.
    with _CAPTURE_LOCK, torch.cuda.stream(torch.cuda.current_stream(device)):
        if _failure:
            raise RuntimeError("another thread's capture has failed")
        pool, stream, _ = _shared(device)
        # thread_local: allocations of other threads do not invalidate the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph


@functools.cache
def _shared(device: torch.device) -> tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """Memory pool and capture stream of a device's graphs, and a dummy graph that keeps the pool alive."""
    pool, stream, keeper = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    something = torch.zeros(1, dtype=torch.float32, device=device).add_(1)
    with torch.cuda.graph(keeper, pool=pool, stream=stream, capture_error_mode="thread_local"):
        something.add_(1)
    return pool, stream, keeper
