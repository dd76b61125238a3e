"""Calibration: verify time by number of nodes on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from time import perf_counter as clock
from time import process_time
from typing import Any

import torch

from mmspec.core.budget import CostTable
from mmspec.core.target import Prompt, Target
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.files import cache_folder, write_text
from mmspec.ops.cpu_library import build
from mmspec.targets.packing import weights_kind
from mmspec.targets.placement import is_split
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.version import __version__

SIZES = (1, 2, 4, 8, 16, 32, 64)
_log = logging.getLogger("mmspec.calibrate")
_RUN = 4  # passes of a size in succession, of which the first, after another size, does not count
_WARM_UP = 3  # passes per size on CUDA, for kernel compilation and graph capture


def cost_table(target: Target, *, refresh: bool = False, prefix: int = 128) -> CostTable:
    """Verify times of a target, cached on disk by model shape, device, dtype and software versions.

    A measurement that other load has visibly disturbed is returned, but not stored. One that decoding shows to be
    wrong is deleted (``forget_cost``).

    Args:
        target: the target, which must be idle.
        refresh: measure again and replace the stored table.
        prefix: prompt length.
    """
    table = None if refresh else stored_cost(target)
    if table is None:
        _log.info("measuring the time of verify passes")
        table = measure(target, prefix=prefix)
        if _disturbed(table):
            return table
        if isinstance(target, TransformersTarget):
            _store(target, {"prefix": prefix, "tokens": table.tokens, "seconds": table.seconds})
    return table


def processor() -> str:
    """CPU model name, or its architecture if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _disturbed(table: CostTable) -> bool:
    """Whether other load disturbed the measurement: a pass over n nodes took far longer than n single-node passes."""
    return any(t > 1.5 * n * table.seconds[0] for n, t in zip(table.tokens, table.seconds, strict=True))


def stored_cost(target: Target) -> CostTable | None:
    """Stored verify times; None if missing or damaged, or for other targets than ``TransformersTarget``."""
    if not isinstance(target, TransformersTarget):
        return None
    try:
        stored = json.loads(_path(target).read_text())
        return CostTable(tuple(stored["tokens"]), tuple(stored["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_cost(target: Target) -> None:
    """Delete the stored verify times that the target uses, so that the next load measures them again."""
    if isinstance(target, TransformersTarget) and target.cost is not None and stored_cost(target) == target.cost:
        with suppress(OSError):
            _path(target).unlink()


def measure(target: Target, *, prefix: int = 128, seconds: float = 1.0) -> CostTable:
    """Shortest verify times of all sizes, timed interleaved: other load only ever adds to them, longest to long passes.

    As in decoding, a pass follows one of the same size, whose activations leave it the same part of the caches.

    Args:
        prefix: prompt length.
        seconds: approximate duration; at least three rounds.
    """
    target.cost = None  # no padding of nodes
    device = target.device
    target.keep([])
    *_, output = target.prefill([placeholder(1, prefix, target)], [SIZES[-1]])
    assert output is not None
    vocab = output.logits.shape[-1]
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for size in SIZES * (_WARM_UP if device.type == "cuda" else 0):
        target.verify(_comb(size, vocab, device))
    began, rounds = clock(), 0
    while rounds < 3 or (clock() - began < seconds and rounds < 30):
        for size in SIZES:
            tree = _comb(size, vocab, device)
            for turn in range(_RUN):
                start, computed = clock(), process_time()
                target.verify(tree).logits.max(-1).indices.tolist()
                wall, computed = clock() - start, process_time() - computed
                # On a CPU, time in which other processes ran does not count; of several threads, neither does the sum.
                if turn:
                    times[size].append(min(wall, computed) if device.type == "cpu" else wall)
        rounds += 1
    target.keep([])
    return CostTable(SIZES, tuple(min(times[size]) for size in SIZES))


def placeholder(rows: int, tokens: int, target: Target) -> Prompt:
    """Prompts of up to ``tokens`` tokens, which leave room for the largest trees. No prefix cache keeps them, as they
    have a history of their own."""
    limit = target.context_limit or tokens + SIZES[-1]
    length = max(1, min(tokens, limit - SIZES[-1]))
    ids = torch.zeros(rows, length, dtype=torch.long, device=target.device)
    return Prompt(ids, history=ids)


def describe(target: TransformersTarget) -> dict[str, Any]:
    """Cache key of a calibration: model shape, device and software versions."""
    model, config = target.model, target.config
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    shape = {
        k: getattr(config, k, None) for k in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    }
    return {
        "architecture": type(model).__name__,
        **shape,
        "attention": target.decoder.attention.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_kind(model),
        **({"device_map": str(model.hf_device_map)} if is_split(model) else {}),
        "device": name,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "build": build() if device.type == "cpu" else None,
        "mmspec": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def _comb(size: int, vocab: int, device: torch.device) -> TokenTree:
    """Chain with one sibling per level: deep and wide like real trees."""
    parents = torch.tensor([-1] + [max(0, i - 2 + i % 2) for i in range(1, size)], dtype=torch.long, device=device)
    return TokenTree((torch.arange(size, device=device) % vocab)[None], parents[None], check=False)


def _path(target: TransformersTarget) -> Path:
    fingerprint = hashlib.sha256(json.dumps(describe(target), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"calibration-{fingerprint}.json"


def _store(target: TransformersTarget, measured: dict[str, Any]) -> None:
    """Store a measurement; where that is not possible, the next load measures again."""
    try:
        write_text(_path(target), json.dumps({**describe(target), **measured}))
    except UserError as error:
        _log.warning("%s", error)
