"""What a CUDA device would make of a step, found out on a CPU: where the host waits for it, and what a captured pass
does when it is replayed.

The operations of ``mmspec.ops`` and ``ssm.ops`` are single launches there, so nothing inside of them is looked at.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

LAUNCHES = {
    "mmspec.ops": ("follow", "choose_drawn", "quantile", "tree_attention"),
    "mmspec.cache": ("compact_kv",),
    "mmspec.sampling": ("quantile",),
    "ssm.cache": ("commit_conv", "commit_scan", "tree_conv", "tree_scan"),
}


def as_launches(patch: pytest.MonkeyPatch) -> None:
    """Let modes of this module see every operation as one call."""
    for home, names in LAUNCHES.items():
        module = import_module(home)
        for name in names:
            patch.setattr(module, name, _launched(getattr(module, name)))


def _launched(function: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        active = [mode for mode in (*_Replayed.active, *Waits.active) if not mode.paused]
        for mode in active:
            mode.paused = True
        for recorder in (mode for mode in active if isinstance(mode, _Replayed)):
            recorder.save(tree_leaves((args, kwargs)))
        try:
            out = function(*args, **kwargs)
        finally:
            for mode in active:
                mode.paused = False
        for recorder in (mode for mode in active if isinstance(mode, _Replayed)):
            recorder.calls.append((function, args, kwargs, out))
        return out

    return launch


# ---------------------------------------------------------------------- waiting


class Waits(TorchDispatchMode):
    """Counts, by name, what makes the host wait for a CUDA device: reading a tensor's values, results whose shape
    depends on values, and copies of numbers of the host that do not go through ``mmspec.transfer``."""

    active: list[Waits] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused:
            by_mask = name in ("index", "index_put", "index_put_") and any(
                isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1] or ()
            )
            if by_mask or name in (
                "_local_scalar_dense",
                "nonzero",
                "masked_select",
                "equal",
                "_unique2",
                "is_nonzero",
            ):
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """What does not reach the dispatcher: whole tensors read, lists given as indices."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._waits.paused:
            if name in ("tolist", "numpy", "__array__"):
                self._waits.counts[name] += 1
            if name in ("__getitem__", "__setitem__") and any(isinstance(index, list) for index in _listed(args[1])):
                self._waits.counts["list as index"] += 1
            caller = sys._getframe(1).f_globals.get("__name__")
            if name in ("tensor", "as_tensor", "new_tensor") and caller != "mmspec.transfer":
                self._waits.counts[f"torch.{name} in {caller}"] += 1
        return func(*args, **(kwargs or {}))


def _listed(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@contextmanager
def waiting() -> Iterator[Counter[str]]:
    """What the host waits for inside of the block."""
    waits = Waits()
    Waits.active.append(waits)
    try:
        with waits, _Calls(waits):
            yield waits.counts
    finally:
        Waits.active.remove(waits)


# ---------------------------------------------------------------------- replaying


class Replayed:
    """Stands in for a captured call: what the function did to tensors is written down, undone, and done again at every
    replay, with the numbers of the host as they were."""

    replays = 0

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Any, settings: dict[str, Any]) -> None:
        self._inputs = inputs
        recorder = _Replayed(self._inputs)
        _Replayed.active.append(recorder)
        try:
            with recorder:
                self._outputs = function(*self._inputs, **settings)
        finally:
            _Replayed.active.remove(recorder)
        self._calls = recorder.calls
        for tensor, before in recorder.saved.values():
            tensor.copy_(before)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        type(self).replays += 1
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        for function, args, kwargs, out in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and _address(old) != _address(new):
                    old.copy_(new)
        return self._outputs


class _Replayed(TorchDispatchMode):
    active: list[_Replayed] = []  # noqa: RUF012

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.paused = False
        self._own = {_address(x) for x in inputs}

    def save(self, leaves: list[Any]) -> None:
        """Note what tensors hold that may be written to, if they were there before."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _address(leaf) not in self._own | self.saved.keys():
                whole = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
                self.saved[_address(leaf)] = whole, whole.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.paused = True
            self.save(tree_leaves((args, kwargs)))
            self.paused = False
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **kwargs)
        self._own |= {_address(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)} - given
        self.calls.append((func, args, kwargs, out))
        return out


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def on_a_gpu(rows: Any, device: str = "cuda") -> Any:
    """Inputs of a model, moved."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, rows)
