"""Functions of transformers' modelling files that are replaced during passes of a target."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Place = tuple[Any, str]
"""The module or class that a function belongs to, and the function's name there."""

_LOCK = threading.Lock()
_PASSES: Counter[Place] = Counter()  # that run now


@contextmanager
def replaced(replacements: Mapping[Place, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace functions during a pass. Passes of several threads may overlap: the first replaces, the last restores.

    Args:
        replacements: by place, a function that makes the replacement from the original, which it has as ``__wrapped__``
            (``functools.wraps``). Other threads call it too.
    """
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
