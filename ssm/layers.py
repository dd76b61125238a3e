"""Tree verification for transformers' recurrent layers, with unmodified mixers.

The mixers of most modelling files call module-level functions: the causal convolution and usually a chunked scan.
During forward passes of a target, dispatchers replace these functions. Calls with a keyword argument that only verify
passes have go to the ``StateCache``; all other calls, including other threads', go to transformers' own function, with
the installed kernels. For mixers that pass no keyword arguments, the cache is an attribute of the convolution's inputs,
and the next scan uses the same cache.

For mixers that compute their recurrence themselves, and other modules that read more than their own token, methods are
dispatched: calls with a ``StateCache``, or after a convolution with one, go to an adapter (``mmspec.ssm.recurrences``).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from mmspec.errors import UserError
from mmspec.ssm.cache import STATES, StateCache
from mmspec.ssm.recurrences import CONVOLVED, INKLING2_BIASES, RECURRENCES, Adapter, Functions, Mamba1
from mmspec.ssm.sublayers import delta, mamba, short_convolution
from mmspec.targets.tree_layers import Place, replaced

_CACHE_METHODS = ("has_previous_state", "update_conv_state", "update_recurrent_state")
_RECURRENT, _BOTH, _CONVOLVED = "linear_attention", "hybrid", "conv"
_ATTENDING = ("full_attention", "sliding_attention", _BOTH, "hybrid_sliding")

_LAST: ContextVar[StateCache | None] = ContextVar("_LAST", default=None)
"""The cache of a thread's last convolution or adapter, for the call after it."""


class RecurrentLayers:
    """``TreeLayers`` plug-in for recurrent layers; ``functions`` and methods are replaced during passes. Raises
    ``UserError``: transformers lacks one of them, or tree verification does not support a setting of the model."""

    mixers = delta, mamba, short_convolution
    kinds = frozenset({_RECURRENT, _CONVOLVED, *_ATTENDING, "moe", "mlp"})

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        config = decoder.config
        self._module = sys.modules[type(decoder).__module__]
        recurrence = RECURRENCES.get(config.model_type)
        self.functions = functions_of(config.model_type, self._module)
        _check(self._module, self.functions, "convolution" if recurrence is None else recurrence.name)
        types = list(config.layer_types)
        scans = getattr(config, "n_mamba_heads", 1) if recurrence is Mamba1 else 1  # several in Zamba
        recurrent = [layer for layer, kind in enumerate(types) if kind in (_RECURRENT, _BOTH)]
        attending = [layer for layer, kind in enumerate(types) if kind in _ATTENDING]
        self._cache = partial(StateCache, len(types), recurrence, recurrent, attending, scans)
        self.attends = bool(attending)
        # Inkling's bias is computed from positions of keys and queries, which differ by row.
        self.static_shapes = not config.model_type.startswith("inkling")
        if config.model_type == "minimax" and (window := config.sliding_window):
            raise UserError(f"attention layers next to lightning attention must have no window: got {window} tokens")
        if config.model_type == "zaya" and config.attention_bias:
            raise UserError("ZAYA's projections must have no bias: transformers adds it to padding, and not before it")
        if config.model_type == "recurrent_gemma":
            for layer in recurrent:
                decoder.layers[layer].temporal_block.layer_idx = layer  # as in other mixers

    @classmethod
    def supports(cls, config: Any) -> bool:
        return getattr(config, "model_type", None) in {*RECURRENCES, *CONVOLVED}

    def applied(self) -> AbstractContextManager[None]:
        return _dispatching(self._module, self.functions)

    def cache(self, reserve: int, static_shapes: bool = False, centre: Tensor | None = None) -> StateCache:
        return self._cache(reserve, static_shapes, centre)


def functions_of(model_type: str, module: ModuleType) -> Functions:
    """The functions of a modelling file to replace during passes, without the biases that its version lacks."""
    functions = RECURRENCES[model_type].functions if model_type in RECURRENCES else CONVOLVED[model_type]
    lacking = {name for name in INKLING2_BIASES if not hasattr(*_place(module, name))}
    return {name: one for name, one in functions.items() if name not in lacking}


def _place(module: ModuleType, name: str) -> Place:
    """The owner of a function, a module or class, and the function's name in it."""
    *classes, name = name.split(".")
    return (getattr(module, classes[0], None) if classes else module), name


def _check(module: ModuleType, functions: Functions, layers: str) -> None:
    lacking = [f"Cache.{name}" for name in _CACHE_METHODS if not hasattr(Cache, name)]
    for name, (_, needed) in functions.items():
        function = getattr(*_place(module, name), None)
        taken = inspect.signature(function).parameters if callable(function) else {}
        if missing := [parameter for parameter in needed if parameter not in taken]:
            lacking.append(f"{name}({', '.join(missing)})")
    if lacking:
        raise UserError(
            f"tree verification of {layers} layers requires {', '.join(lacking)} in {module.__name__}: "
            f"not found in transformers {transformers.__version__}"
        )


@contextmanager
def _dispatching(module: ModuleType, functions: Functions) -> Iterator[None]:
    """Replace a modelling file's functions by dispatchers during a forward pass."""
    places = {_place(module, name): replacement for name, (replacement, _) in functions.items()}
    with replaced({place: partial(_dispatcher, replacement=own) for place, own in places.items()}):
        try:
            yield
        finally:
            _LAST.set(None)


@cache
def _dispatcher(original: Callable[..., Any], replacement: str | Adapter) -> Callable[..., Any]:
    """Wrap ``original``: calls with a ``StateCache`` go to its method or to an adapter."""

    @wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(replacement, str):
            caches = (value for value in (*args, *kwargs.values()) if isinstance(value, StateCache))
            if (states := next(caches, _LAST.get())) is None:
                return original(*args, **kwargs)
            _LAST.set(states if states.verifying else None)
            return replacement(states, original, *args, **kwargs)
        if replacement == "conv":
            # Mixers of Mamba-1, and of LFM2 in transformers 5.21, pass no keyword arguments.
            states = kwargs.pop(STATES, None if not args else getattr(args[0], STATES, None))
            _LAST.set(states)
        else:
            states = kwargs.pop(STATES, _LAST.get())
        return original(*args, **kwargs) if states is None else getattr(states, replacement)(*args, **kwargs)

    return dispatch
