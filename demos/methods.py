"""Methods of decoding that visitors may race: plain decoding, and drafters with trees or chains.

A method is ``none`` (plain decoding), a drafter as for ``mmspec.load``, or ``DRAFTER@chain`` (one child per node).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmspec import plugins
from mmspec.core.drafter import Drafter
from mmspec.core.target import Target
from mmspec.drafters import checkpoint
from mmspec.drafters.chain import LONGEST_CHAIN, as_chain
from mmspec.errors import UserError
from mmspec.loading import make_drafter

PLAIN, DEFAULT, CHAIN = "none", "auto", "@chain"
FEWEST, MOST = 2, 4  # methods of a race

_LABELS = {
    "none": "Plain",
    "auto": "Default drafter",
    "ngram": "n-gram",
    "recycle": "Recycle",
    "msd": "MSD",
    "flash": "FLASH",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "vispec": "ViSpec",
    "mtp": "MTP",
    "mamba": "Mamba",
    "small": "Small model",
}
_WITHOUT_WEIGHTS = ("recycle", "ngram")


def drafter_of(method: str) -> str:
    """A method's drafter, without its shape."""
    return method.removesuffix(CHAIN)


def label(method: str) -> str:
    """A method's name for people, such as "FLASH, chain"."""
    drafter = drafter_of(method)
    named = " + ".join(_LABELS.get(name, Path(name).name or name) for name in drafter.split("+"))
    return f"{named}, chain" if method.endswith(CHAIN) else named


def make_method(method: str, home: str, target: Target) -> Drafter | None:
    """The drafter of a method; None for plain decoding.

    Args:
        home: the target's folder or name.

    Raises:
        UserError: the drafter is unknown, made for another model, or does not draft chains.
    """
    drafter = make_drafter(drafter_of(method), home)
    if not method.endswith(CHAIN):
        return drafter
    if drafter is None:
        raise UserError(f"plain decoding drafts no chains: expected {PLAIN!r} or a drafter, got {method!r}")
    drafter.attach(target)
    return as_chain(drafter, LONGEST_CHAIN, target)


def available(model: str) -> list[str]:
    """Methods that a model can run without further checkpoints: plain decoding, its default drafter, and others.

    Of a model that is not in a local folder, only the drafters without weights are known, besides ``auto``.
    """
    home = Path(plugins.model_path(model))
    if not home.exists():
        return [PLAIN, DEFAULT, *_WITHOUT_WEIGHTS]
    folders = [folder for at in plugins.drafter_homes(home) for folder in sorted(at.glob("drafter*"))]
    trained = [name for folder in folders if (name := checkpoint.drafter_name(folder))]
    first = plugins.default_drafter(home)
    if first == DEFAULT:
        first = trained[0] if trained else _WITHOUT_WEIGHTS[0]
    drafters = list(dict.fromkeys([first, *trained, *_WITHOUT_WEIGHTS]))
    chains = [f"{name}{CHAIN}" for name in drafters if "+" not in name and name != "ngram"]
    return [PLAIN, *drafters, *chains]


def check_methods(methods: Sequence[str]) -> None:
    """Raise ``UserError`` unless these are two to four different methods."""
    if not FEWEST <= len(methods) <= MOST or len(set(methods)) < len(methods):
        named = ", ".join(map(label, methods)) or "none"
        raise UserError(f"a race compares methods: expected {FEWEST} to {MOST} different ones, got {named}")
