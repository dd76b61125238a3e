"""Layers other than attention: what must be on offer so that a tree can pass through them.

Such layers keep a state of fixed size in place of keys and values. A plug-in (group ``mmspec.layers``) makes them
verify trees; their states are owned by the cache that it makes, a ``TreeCache`` that also commits and forgets them.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedModel

from mmspec import plugins
from mmspec.cache.tree_cache import TreeCache

ATTENTION = frozenset({"full_attention", "sliding_attention"})


class TreeLayers(Protocol):
    """One model's layers other than attention.

    Made as ``cls(model)``; raises ``UserError`` where the installed transformers lacks what it builds on.

    Attributes:
        kinds: names of ``config.layer_types`` that trees can pass.
        attends: whether any layer has keys and values too.
    """

    kinds: frozenset[str]
    attends: bool

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether this class serves the layers of models of this text configuration."""

    def cache(self, reserve: int, in_place: bool = False) -> TreeCache:
        """An empty cache; ``reserve`` is the number of slots for keys and values, ``in_place`` as for ``TreeCache``."""


def tree_layers(model: PreTrainedModel, config: Any) -> TreeLayers | None:
    """What serves a model's layers; None where all are attention, or no plug-in knows them."""
    if ATTENTION.issuperset(getattr(config, "layer_types", None) or ()):
        return None
    served = plugins.layer_class(config)
    return served(model) if served else None
