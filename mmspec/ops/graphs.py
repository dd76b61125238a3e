"""Passes of one shape, captured once and replayed: on CUDA a decoding step is a few hundred launches, each of which
costs the host more than most cost the device.

What is captured reads its inputs from fixed buffers and may change tensors in place; everything else it touches must
stay where it is (``TreeCache(in_place=True)``). ``MMSPEC_GRAPHS=0`` turns capturing off.

All graphs of a device take what they need in between from one pool: what is allocated under capture is overwritten by
the next replay of any of them, and nobody else may read it. Inputs and results therefore stand outside of the pool.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


def captures(device: torch.device) -> bool:
    """Whether calls are captured on a device: if it is CUDA's current one."""
    return (
        device.type == "cuda"
        and os.environ.get("MMSPEC_GRAPHS") != "0"
        and device.index in (None, torch.cuda.current_device())
    )


@dataclass(frozen=True)
class _Buffers:
    """Where a captured call finds its inputs and leaves its results."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Graphed:
    """A function of tensors whose work on a CUDA device is captured, once for every shape of its inputs.

    The first call of a shape runs as it is, which compiles kernels and allocates what stays; the second is captured.
    Results stand in buffers that the next call of that shape overwrites. Elsewhere it is the function itself.

    Args:
        function: takes tensors, and settings by keyword; returns a tuple of tensors. It must not look at their values.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._seen: dict[Hashable, _Buffers | _Graph] = {}  # buffers where capturing is still to come
        self._failed = False

    def __call__(self, *inputs: Tensor, version: Hashable = None, **settings: Any) -> tuple[Tensor, ...]:
        """Run the function, or what was captured of it.

        Args:
            inputs: on one device.
            version: stands for the addresses of what else the function touches.
            settings: hashable; each combination is captured by itself.
        """
        if self._failed or not captures(inputs[0].device):
            return self._function(*inputs, **settings)
        shapes = tuple((x.shape, x.dtype, x.device) for x in inputs)
        key = version, shapes, tuple(sorted(settings.items()))
        if key not in self._seen:
            for old in [other for other in self._seen if other[0] != version]:  # type: ignore[index]
                del self._seen[old]  # its addresses are no more
            # From the buffers already: kernels are compiled for how their arguments are laid out, and cannot be later.
            buffers = tuple(x.clone() for x in inputs)
            results = self._function(*buffers, **settings)
            self._seen[key] = _Buffers(buffers, tuple(torch.empty_like(x) for x in results))
            return results
        graph = self._seen[key]
        if isinstance(graph, _Buffers):
            try:
                graph = self._seen[key] = _Graph(self._function, graph, settings)
            except RuntimeError as error:
                self._failed = True
                warnings.warn(f"steps are not captured: {error}", RuntimeWarning, stacklevel=2)
                return self._function(*inputs, **settings)
        return graph.replay(inputs)

    @property
    def captured(self) -> int:
        """Shapes that are replayed."""
        return sum(not isinstance(graph, _Buffers) for graph in self._seen.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphed, (self._function,)  # graphs belong to this process

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphed:
        # A copy's tensors stand elsewhere.
        return Graphed(copy.deepcopy(self._function, memo))


class _Graph:
    """One captured call."""

    def __init__(self, function: Function, buffers: _Buffers, settings: dict[str, Any]) -> None:
        def run() -> None:
            for mine, new in zip(buffers.outputs, function(*buffers.inputs, **settings), strict=True):
                mine.copy_(new)

        self._buffers = buffers
        self._graph = _captured(run, buffers.inputs[0].device)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, given in zip(self._buffers.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._buffers.outputs


_ONE_AT_A_TIME = threading.Lock()
"""Of captures: a pool serves no two of them at once."""


def _captured(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its stream the current one.
    with _ONE_AT_A_TIME, torch.cuda.stream(torch.cuda.current_stream(device)):
        pool, stream, _ = _shared(device)
        # Other threads may allocate meanwhile; that must not spoil the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph


@functools.cache
def _shared(device: torch.device) -> tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The memory that a device's graphs share, as they run one after the other; the stream that they are captured on;
    and a graph that is never dropped: torch gives a pool up for good when the last graph of it goes."""
    pool, stream, keeper = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    something = torch.zeros(1, device=device).add_(1)
    with torch.cuda.graph(keeper, pool=pool, stream=stream, capture_error_mode="thread_local"):
        something.add_(1)
    return pool, stream, keeper
