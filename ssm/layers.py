"""Mamba-2 layers of transformers' models, mixers unmodified, made to verify trees.

The six modelling files share the names of two module-level functions through which every mixer computes: the causal
convolution and the chunked scan. Both are replaced, in the modelling module, by dispatchers. Told of no tree they call
transformers' own function (and with it whatever kernels are installed); told of one by a keyword argument of the
decoder's forward, which reaches them through all layers, they leave the work to the cache, which owns the states.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from mmspec.errors import UserError
from ssm.cache import STATES, StateCache

FAMILIES = ("mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid")

_FUNCTIONS = {
    "causal_conv1d_fn": ("conv", ("hidden_states", "weight", "bias", "activation")),
    "mamba2_chunk_scan": ("scan", ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus")),
}
"""Module-level names: which method of ``StateCache`` takes over, and the parameters that it relies on."""

_CACHE_METHODS = ("has_previous_state", "update_conv_state", "update_recurrent_state")
_RECURRENT, _BOTH = "linear_attention", "hybrid"


class Mamba2Layers:
    """The Mamba-2 layers of one model. See ``mmspec.layers.TreeLayers``.

    Raises:
        UserError: the installed transformers lacks a function or method that this builds on, or its mixers do not call
            them.
    """

    kinds = frozenset({_RECURRENT, _BOTH, "full_attention", "moe", "mlp"})

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        module = sys.modules[type(decoder).__module__]
        _check(module)
        for name, (method, _) in _FUNCTIONS.items():
            _install(module, name, method)
        types = list(decoder.config.layer_types)
        self._layers = len(types)
        self._recurrent = [layer for layer, kind in enumerate(types) if kind in (_RECURRENT, _BOTH)]
        self._attending = [layer for layer, kind in enumerate(types) if kind in ("full_attention", _BOTH)]
        self.attends = bool(self._attending)

    @classmethod
    def supports(cls, config: Any) -> bool:
        return getattr(config, "model_type", None) in FAMILIES

    def cache(self, reserve: int, in_place: bool = False) -> StateCache:
        return StateCache(self._layers, self._recurrent, attending=self._attending, reserve=reserve, in_place=in_place)


def _check(module: ModuleType) -> None:
    lacking = [f"Cache.{name}" for name in _CACHE_METHODS if not hasattr(Cache, name)]
    for name, (_, needed) in _FUNCTIONS.items():
        function = getattr(module, name, None)
        taken = inspect.signature(function).parameters if callable(function) else {}
        if missing := [parameter for parameter in needed if parameter not in taken]:
            lacking.append(f"{name}({', '.join(missing)})")
    if lacking:
        raise UserError(
            f"trees through Mamba-2 layers need {', '.join(lacking)} in {module.__name__}: "
            f"transformers {transformers.__version__} has no such"
        )


def _install(module: ModuleType, name: str, method: str) -> None:
    """Put a dispatcher in a function's place, if there is none yet."""
    original: Callable[..., Any] = getattr(module, name)
    if hasattr(original, "without_tree"):
        return

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        states = kwargs.pop(STATES, None)
        return original(*args, **kwargs) if states is None else getattr(states, method)(*args, **kwargs)

    dispatch.without_tree = original  # type: ignore[attr-defined]
    setattr(module, name, dispatch)
