"""Passes of one shape, captured once and replayed: on CUDA a decoding step is a few hundred launches, each of which
costs the host more than most cost the device.

What is captured reads its inputs from fixed buffers and may change tensors in place; everything else it touches must
stay where it is (``TreeCache(in_place=True)``). ``MMSPEC_GRAPHS=0`` turns capturing off.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


def captures(device: torch.device) -> bool:
    """Whether calls are captured on a device."""
    return device.type == "cuda" and os.environ.get("MMSPEC_GRAPHS") != "0"


class Graphed:
    """A function of tensors whose work on a CUDA device is captured, once for every shape of its inputs.

    The first call of a shape runs as it is, which compiles kernels and allocates what stays; the second is captured.
    Results stand in buffers that the next call of that shape overwrites. Elsewhere it is the function itself.

    Args:
        function: takes tensors, and settings by keyword; returns a tuple of tensors. It must not look at their values.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._seen: dict[Hashable, tuple[Tensor, ...] | _Graph] = {}  # buffers where capturing is still to come
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
            buffers = self._seen[key] = tuple(x.clone() for x in inputs)
            return self._function(*buffers, **settings)
        graph = self._seen[key]
        if isinstance(graph, tuple):
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
        return sum(not isinstance(graph, tuple) for graph in self._seen.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphed:
        # A copy's tensors stand elsewhere.
        return Graphed(copy.deepcopy(self._function, memo))


class _Graph:
    """One captured call, which reads its inputs from ``inputs``."""

    def __init__(self, function: Function, inputs: tuple[Tensor, ...], settings: dict[str, Any]) -> None:
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile; that must not spoil the capture.
        with torch.cuda.graph(self._graph, pool=_pool(), capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs, **settings)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


@functools.cache
def _pool() -> Any:
    """Memory that all graphs share: they run one after the other."""
    return torch.cuda.graph_pool_handle()
