"""Lossless speculative decoding of vision-language and state-space models.

A drafter proposes a tree of tokens, the target verifies it in one forward pass, and the longest path that the target
itself would have generated is accepted.

Public names are imported lazily, so that ``mmspec --help`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.core.drafter import Drafter
    from mmspec.core.tree import TokenTree
    from mmspec.core.verify import Verdict, accept_path, verify
    from mmspec.engine.stats import Stats
    from mmspec.errors import UserError
    from mmspec.hook import decode, generate
    from mmspec.loading import load
    from mmspec.pipeline import Generation, Piece, Pipeline
    from mmspec.sampling.params import SamplingParams
    from mmspec.sampling.processors import TreeProcessor

__version__ = "0.2.0"
__all__ = [
    "Drafter",
    "Generation",
    "Piece",
    "Pipeline",
    "SamplingParams",
    "Stats",
    "TokenTree",
    "TreeProcessor",
    "UserError",
    "Verdict",
    "accept_path",
    "decode",
    "generate",
    "load",
    "verify",
]
_HOMES = {
    "errors": ("UserError",),
    "hook": ("decode", "generate"),
    "pipeline": ("Generation", "Piece", "Pipeline"),
    "loading": ("load",),
    "sampling.processors": ("TreeProcessor",),
    "sampling.params": ("SamplingParams",),
    "engine.stats": ("Stats",),
    "core.drafter": ("Drafter",),
    "core.tree": ("TokenTree",),
    "core.verify": ("Verdict", "verify", "accept_path"),
}
_HOME = {name: f"mmspec.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmspec' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
