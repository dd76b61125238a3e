"""Verify-pass times by number of nodes, and the facts about model and machine that results state."""

from __future__ import annotations

import platform
from bisect import bisect_left
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import torch

from mmspec.core.tree import TokenTree
from mmspec.engine.warm_up import placeholder
from mmspec.ops.cpu_library import build
from mmspec.targets.packing import weights_kind
from mmspec.targets.placement import is_split
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.version import __version__

_RUN = 4  # successive passes of a size; the first, which follows another size, does not count
_ROUNDS = 3


@dataclass(frozen=True)
class PassTimes:
    """Measured time of a verify pass by its total number of tokens.

    Attributes:
        tokens: measured sizes, ascending from 1.
        seconds: time of a pass of each size.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: int) -> float:
        """Seconds for ``count`` tokens, by linear interpolation and extrapolation."""
        at = min(max(bisect_left(self.tokens, count), 1), len(self.tokens) - 1)
        low, high = self.tokens[at - 1], self.tokens[at]
        share = (count - low) / (high - low)
        return self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1])


def measure_passes(target: TransformersTarget, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> PassTimes:
    """Shortest pass times of a target without sequences, sizes interleaved: other load only ever adds time."""
    target.keep([])
    *_, output = target.prefill([placeholder(1, 128, target)], [sizes[-1]])
    assert output is not None
    vocab = output.logits.shape[-1]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_ROUNDS):
        for size in sizes:
            tree = _comb(size, vocab, target.device)
            for turn in range(_RUN):
                start = clock()
                target.verify(tree).logits.max(-1).indices.tolist()
                if turn:
                    times[size].append(clock() - start)
    target.keep([])
    return PassTimes(sizes, tuple(min(times[size]) for size in sizes))


def processor() -> str:
    """CPU model name, or its architecture if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe(target: TransformersTarget) -> dict[str, Any]:
    """Model shape, device and software versions."""
    model, config = target.model, target.config
    device = target.device
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
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "build": build() if device.type == "cpu" else None,
        "mmspec": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def _comb(size: int, vocab: int, device: torch.device) -> TokenTree:
    """Chain with one sibling per level: deep and wide like real trees."""
    parents = torch.tensor([-1] + [max(0, i - 2 + i % 2) for i in range(1, size)], dtype=torch.long, device=device)
    return TokenTree((torch.arange(size, device=device) % vocab)[None], parents[None], check=False)
