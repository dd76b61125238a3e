"""ALiBi on a tree: attention biases of nodes by depth instead of by slot, for BLOOM and Falcon.

These models add a slope times the key's position to each attention score, and take positions to be cumulative sums of
a 2D mask. The bias is computed by a function of their modelling file, which is replaced during passes: it reads the
positions of the slots from the mask of the pass.

Source: ALiBi (arXiv 2108.12409), section 3.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

FUNCTION = "build_alibi_tensor"
_POSITIONS = "slot_positions"  # attribute of a pass's mask

_LOCK = threading.Lock()
_PASSES: Counter[ModuleType] = Counter()  # that run now


class Alibi:
    """The attention biases of a decoder's passes.

    Args:
        decoder: its modelling file has a function named ``FUNCTION``.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._module = sys.modules[type(decoder).__module__]

    @classmethod
    def supports(cls, config: Any, decoder: nn.Module) -> bool:
        """Whether the model has biases that this class computes; Falcon may have rotary embeddings instead."""
        has = hasattr(sys.modules[type(decoder).__module__], FUNCTION)
        return has and (getattr(config, "alibi", True) is not False)

    def with_positions(self, mask: Tensor, positions: Tensor) -> Tensor:
        """The mask of a pass, with the positions of its slots, (batch, slots) int64."""
        setattr(mask, _POSITIONS, positions)
        return mask

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replaces the modelling file's function during a pass. Passes of several threads may overlap; calls with other
        masks keep transformers' function."""
        with _LOCK:
            if not _PASSES[self._module]:
                setattr(self._module, FUNCTION, _by_position(getattr(self._module, FUNCTION)))
            _PASSES[self._module] += 1
        try:
            yield
        finally:
            with _LOCK:
                _PASSES[self._module] -= 1
                if not _PASSES[self._module]:
                    setattr(self._module, FUNCTION, getattr(self._module, FUNCTION).__wrapped__)


@cache
def _by_position(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``original``, which also takes a mask with positions: (batch * heads, 1, slots)."""

    @wraps(original)
    def biases(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions: Tensor | None = getattr(attention_mask, _POSITIONS, None)
        if positions is None:
            return original(attention_mask, num_heads, dtype)
        line = attention_mask.new_ones(1, int(positions.max()) + 1, dtype=torch.long)
        by_position = original(line, num_heads, dtype)[:, 0]  # (heads, positions)
        return by_position[:, positions].transpose(0, 1).reshape(-1, 1, positions.shape[1])

    return biases
