"""Methods of decoding that visitors may race: plain decoding, and drafters with trees or chains.

A method is ``none`` (plain decoding), a drafter as for ``mmspec.load``, or ``DRAFTER@chain`` (one child per node).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmspec import plugins
from mmspec.drafters.registry import PLAIN, Selection, drafter_spec, drafters_for
from mmspec.errors import UserError

CHAIN = "@chain"
_PLAIN = "the model alone, one token per pass; the others guess tokens, which it checks (arXiv 2211.17192)"
_CHAIN = "the same method guesses one continuation, instead of a tree of several (arXiv 2305.09781)"
FEWEST, MOST = 2, 4  # methods of a race


def drafter_of(method: str) -> str:
    """A method's drafter, without its shape."""
    return method.removesuffix(CHAIN)


def label(method: str) -> str:
    """A method's name for people, such as "FLASH, chain"."""
    return Selection.parse(method).label()


def explained(methods: Sequence[str]) -> dict[str, str]:
    """What the drafters among methods do, by their labels: one line each, with the paper's number at arXiv."""
    lines = {label(PLAIN): _PLAIN}
    for method in methods:
        for name in Selection.parse(drafter_of(method)).drafters:
            if name in plugins.names("drafters"):
                lines[label(name)] = drafter_spec(name).summary.partition(";")[0].replace("target", "model")
    return {**lines, "Chain": _CHAIN} if any(method.endswith(CHAIN) for method in methods) else lines


def available(model: str) -> list[str]:
    """Methods that a model can run without further checkpoints: plain decoding, its default drafter, and others.

    Of a model that is not in a local folder, only the drafters without weights are known, besides ``auto``.
    """
    home = Path(plugins.model_path(model))
    drafters = drafters_for(home)
    chains = [f"{name}{CHAIN}" for name in drafters if home.exists() and "+" not in name and drafter_spec(name).chains]
    return [PLAIN, *drafters, *chains]


def check_methods(methods: Sequence[str]) -> None:
    """Raise ``UserError`` unless these are two to four different methods."""
    if not FEWEST <= len(methods) <= MOST or len(set(methods)) < len(methods):
        named = ", ".join(map(label, methods)) or "none"
        raise UserError(f"a race compares methods: expected {FEWEST} to {MOST} different ones, got {named}")
