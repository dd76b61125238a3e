"""Plug-in interface for layers other than attention, such as Mamba-2.

These layers have a state of fixed size instead of keys and values. A plug-in (group ``layers``) makes them
verify trees and returns the ``TreeCache`` that owns and commits their states. Functions of transformers' modelling
files may be replaced during passes (``replaced``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from mmspec import plugins
from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"})


class TreeLayers(Protocol):
    """Tree verification for one model's layers other than attention.

    The constructor takes the model; it raises ``UserError`` if the installed transformers lacks a function it needs.

    Attributes:
        kinds: names of ``config.layer_types`` that can verify trees.
        mixers: descriptions of mixers for the C++ kernels, see ``SublayerStack``.
        attends: whether any layer has keys and values.
        static_shapes: whether passes can have static shapes.
    """

    kinds: frozenset[str]
    mixers: Sequence[Callable[[Any], dict[str, Any] | None]]
    attends: bool
    static_shapes: bool

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether this class supports models of this text configuration."""

    def applied(self) -> AbstractContextManager[None]:
        """Apply the changes outside the model that the layers need during a pass."""

    def cache(self, reserve: int, static_shapes: bool = False, centre: Tensor | None = None) -> TreeCache:
        """An empty cache with ``reserve`` KV slots; other arguments as for ``TreeCache``."""


def tree_layers(model: PreTrainedModel, config: Any) -> TreeLayers | None:
    """The plug-in for a model's layers; None if all are attention, or no plug-in supports them. Raises ``UserError``:
    the installed transformers lacks a function that the plug-in needs."""
    kinds = getattr(config, "layer_types", None)
    if kinds and ATTENTION.issuperset(kinds):
        return None
    plugin = plugins.layer_class(config)
    if plugin and not kinds:
        raise UserError(
            f"tree verification of {type(model).__name__} requires layer_types in {type(config).__name__}: "
            f"not found in transformers {transformers.__version__}"
        )
    return plugin(model) if plugin else None


Place = tuple[Any, str]
"""Module or class of a function, and the function's name in it."""

_LOCK = threading.Lock()
_PASSES: Counter[Place] = Counter()  # running passes by place


@contextmanager
def replaced(replacements: Mapping[Place, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace functions during a pass. Passes of several threads may overlap: the first replaces, the last restores.
    ``replacements``: by place, a function that makes the replacement from the original, with ``functools.wraps``. Other
    threads call the replacement too."""
    with _LOCK:
        for place, replace in replacements.items():
            if not _PASSES[place]:
                setattr(*place, replace(getattr(*place)))
            _PASSES[place] += 1
    try:
        yield
    finally:
        with _LOCK:
            for place in replacements:
                _PASSES[place] -= 1
                if not _PASSES[place]:
                    setattr(*place, getattr(*place).__wrapped__)
