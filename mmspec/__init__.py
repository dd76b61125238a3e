"""Lossless speculative decoding of vision-language and state-space models.

A drafter proposes a tree of tokens, the target checks it in one pass, and the longest path that the target itself would
have produced is kept.

Public names are imported at first use, so that ``mmspec --help`` need not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.errors import UserError
    from mmspec.hook import decode, generate
    from mmspec.pipeline import Generation, Piece, Pipeline, load
    from mmspec.processors import TreeProcessor
    from mmspec.sampling import SamplingParams
    from mmspec.stats import Stats
    from mmspec.tree import TokenTree
    from mmspec.verify import Verdict, verify, verify_greedy

__version__ = "0.1.0"
__all__ = [
    "Generation",
    "Piece",
    "Pipeline",
    "SamplingParams",
    "Stats",
    "TokenTree",
    "TreeProcessor",
    "UserError",
    "Verdict",
    "decode",
    "generate",
    "load",
    "verify",
    "verify_greedy",
]
_HOMES = {
    "errors": ("UserError",),
    "hook": ("decode", "generate"),
    "pipeline": ("Generation", "Piece", "Pipeline", "load"),
    "processors": ("TreeProcessor",),
    "sampling": ("SamplingParams",),
    "stats": ("Stats",),
    "tree": ("TokenTree",),
    "verify": ("Verdict", "verify", "verify_greedy"),
}
_HOME = {name: f"mmspec.{module}" for module, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'mmspec' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule binds it to its package; ``mmspec.verify`` stays the function of that name.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
