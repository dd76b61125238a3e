"""A step as on a CUDA device, checked on a CPU: host syncs, and replays of captured passes.

The operations of ``mmspec.ops`` and ``mmspec.ssm.ops`` are single launches there, so nothing inside of them is looked
at.
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

from mmspec.ops import graphs, kernels

LAUNCHES = {
    "mmspec.ops": (
        *("accepted_path", "choose_drawn", "quantile", "tree_attention"),
        *("top_log_probs", "next_beam", "keep_best", "extend_reach", "node_inputs", "write_last"),
        *("act_and_mul", "add_norm", "rotate_and_cache"),
    ),
    "mmspec.cache.tree_cache": ("compact_kv",),
    "mmspec.core.tree": ("tree_ancestors",),
    "mmspec.ssm.cache": ("commit_conv", "tree_conv"),
    "mmspec.ssm.ops": ("commit_delta", "commit_scan", "tree_delta", "tree_scan"),
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

WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
"""Operations; under inference mode, some are seen that are made of others else."""


class Waits(TorchDispatchMode):
    """Counts, by name, what makes the host wait for a CUDA device: reading a tensor's values, results whose shape
    depends on values, and copies of numbers of the host that do not go through ``mmspec.ops.transfer``."""

    active: list[Waits] = []  # noqa: RUF012

    def __init__(self, captured: bool) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.paused, self._captured = False, captured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused:
            by_mask = name in ("index", "index_put", "index_put_") and any(
                isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1] or ()
            )
            if by_mask or name in WAITING or (func._overloadname == "Tensor" and name == "repeat_interleave"):
                self.counts[name] += 1
            if self._captured and torch.Tag.nondeterministic_seeded in func.tags:
                self.counts["random numbers"] += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """What does not reach the dispatcher: whole tensors read, lists given as indices."""

    def __init__(self, waits: Waits, captured: bool) -> None:
        super().__init__()
        self._waits, self._allowed = waits, None if captured else "mmspec.ops.transfer"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._waits.paused:
            if name in ("tolist", "numpy", "__array__", "cpu", "pin_memory"):
                self._waits.counts[name] += 1
            if name in ("__getitem__", "__setitem__") and any(isinstance(index, list) for index in _listed(args[1])):
                self._waits.counts["list as index"] += 1
            caller = sys._getframe(1).f_globals.get("__name__")
            if name in ("tensor", "as_tensor", "new_tensor") and caller != self._allowed:
                self._waits.counts[f"torch.{name} in {caller}"] += 1
        return func(*args, **(kwargs or {}))


def _listed(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@contextmanager
def waiting(captured: bool = False) -> Iterator[Counter[str]]:
    """Host syncs inside the block; if ``captured``, also operations that a capture forbids: copies of host numbers,
    and random numbers, which would be equal in every replay."""
    waits = Waits(captured)
    Waits.active.append(waits)
    try:
        with waits, _Calls(waits, captured):
            yield waits.counts
    finally:
        Waits.active.remove(waits)


# ---------------------------------------------------------------------- replaying


def record_captures(patch: pytest.MonkeyPatch) -> None:
    """Let steps on a CPU be captured, recorded and replayed, as they are on CUDA."""
    patch.setattr(kernels, "static_shapes", lambda device: True)
    patch.setattr(graphs, "captures", lambda device: True)
    patch.setattr(graphs, "_captured", Replayed)
    patch.setattr(graphs, "_failure", None)
    patch.setattr(Replayed, "captures", 0)
    patch.setattr(Replayed, "replays", 0)
    as_launches(patch)


class Replayed:
    """Stands in for a captured call: records the function's tensor operations, undoes them, and repeats them in every
    replay with the same host numbers. Memory that the function allocated is overwritten after each replay, as other
    graphs would reuse it.

    Raises:
        AssertionError: it does what cannot be captured.
    """

    captures = 0
    replays = 0

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        type(self).captures += 1
        recorder = _Replayed()
        _Replayed.active.append(recorder)
        try:
            with waiting(captured=True) as waits, recorder:
                run()
        finally:
            _Replayed.active.remove(recorder)
            self._calls = recorder.calls
            self._passing = recorder.allocated()
            for tensor, before in recorder.saved.values():
                tensor.copy_(before)
            self._spoil()
        assert not waits, f"cannot be captured: {dict(waits)}"

    def replay(self) -> None:
        type(self).replays += 1
        for function, args, kwargs, out in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and _address(old) != _address(new):
                    old.copy_(new)
        self._spoil()

    def _spoil(self) -> None:
        for whole in self._passing:
            whole.view(torch.uint8).fill_(1 if whole.dtype == torch.bool else 0x7F)  # no index is as great
            if whole.is_floating_point():
                whole.fill_(torch.nan)


class _Replayed(TorchDispatchMode):
    active: list[_Replayed] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.paused = False
        self._own: set[int] = set()

    def save(self, leaves: list[Any]) -> None:
        """Note what tensors hold that may be written to, if they were there before."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _address(leaf) not in self._own | self.saved.keys():
                whole = _whole(leaf)
                self.saved[_address(leaf)] = whole, whole.clone()

    def allocated(self) -> list[Tensor]:
        """All tensors allocated by the calls."""
        made = [leaf for _, _, _, out in self.calls for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return [*{_address(leaf): _whole(leaf) for leaf in made if _address(leaf) in self._own}.values()]

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


def _whole(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def on_a_gpu(rows: Any, device: str = "cuda") -> Any:
    """Inputs of a model, moved."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, rows)
