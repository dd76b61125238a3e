"""Models and drafters that visitors of the demo may select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demos.chat_request import DEFAULT_MODELS, Kind
from mmspec import plugins
from mmspec.errors import UserError


@dataclass(frozen=True)
class Catalog:
    """Models and drafters that visitors may select.

    Attributes:
        models, drafters: names listed on the page.
        default: default model for images and videos.
        open: whether any other hub id or folder is allowed, too.
    """

    models: tuple[str, ...]
    drafters: tuple[str, ...]
    default: str
    open: bool

    def default_model(self, kind: Kind) -> str:
        """The model for requests that name none."""
        if kind != "text":
            return self.default
        return DEFAULT_MODELS["text"] if DEFAULT_MODELS["text"] in self.models else self.models[0]

    def check(self, model: str, drafter: str) -> None:
        """Raise ``UserError`` if a name is not allowed."""
        for option, name, names in (("model", model, self.models), ("drafter", drafter, self.drafters)):
            if not self.open and name not in names:
                raise UserError(
                    f"{option} must be one that this server offers: expected {', '.join(names)}, got {name!r}"
                )


def make_catalog(models: Sequence[str] = (), drafters: Sequence[str] = (), *, open: bool = True) -> Catalog:
    """Catalog of the given models and drafters; by default the embedded models and all registered drafters.

    Args:
        open: whether visitors may name others. Embedded models and registered drafters are then listed in any case.
    """
    embedded, registered = plugins.embedded(), plugins.names("drafters")
    all_models = [*models, *(embedded if open or not models else [])]
    all_drafters = [*drafters, *(registered if open or not drafters else [])]
    default = models[0] if models else DEFAULT_MODELS["image"]
    return Catalog(
        tuple(dict.fromkeys(all_models)), tuple(dict.fromkeys(["auto", *all_drafters, "none"])), default, open
    )
