"""Models and drafters that visitors may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demos.questions import MODELS, Kind
from mmspec import plugins
from mmspec.errors import UserError


@dataclass(frozen=True)
class Offer:
    """Names that visitors may choose.

    Attributes:
        models, drafters: what the page lists.
        default: the model for images and videos.
        open: whether any other hub id or folder is allowed, too.
    """

    models: tuple[str, ...]
    drafters: tuple[str, ...]
    default: str
    open: bool

    def model_for(self, kind: Kind) -> str:
        """The model that answers where a visitor names none."""
        if kind != "text":
            return self.default
        return MODELS["text"] if MODELS["text"] in self.models else self.models[0]

    def check(self, model: str, drafter: str) -> None:
        """Raise ``UserError`` for any other name."""
        for option, name, names in (("model", model, self.models), ("drafter", drafter, self.drafters)):
            if not self.open and name not in names:
                raise UserError(
                    f"{option} must be one that this server offers: expected {', '.join(names)}, got {name!r}"
                )


def offer(models: Sequence[str] = (), drafters: Sequence[str] = (), *, open: bool = True) -> Offer:
    """The operator's models and drafters; the embedded models and the registered drafters where there are none.

    Args:
        open: whether visitors may name others. The embedded ones are then listed beside the operator's.
    """
    embedded, registered = plugins.names("models"), plugins.names("drafters")
    listed = [*models, *(embedded if open or not models else [])]
    drafting = [*drafters, *(registered if open or not drafters else [])]
    default = models[0] if models else MODELS["image"]
    return Offer(tuple(dict.fromkeys(listed)), tuple(dict.fromkeys(["auto", *drafting, "none"])), default, open)
