"""Models and drafters that visitors of the demo may select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmspec import plugins
from mmspec.demos.chat_request import DEFAULT_MODELS, Kind
from mmspec.demos.methods import available, drafter_of
from mmspec.drafters.registry import AUTO, PLAIN
from mmspec.errors import UserError


@dataclass(frozen=True)
class Catalog:
    """Models and drafters that visitors may select.

    Attributes:
        models, drafters: names listed on the page.
        default: the first model: the default for texts if it reads text only, else for images and videos.
        open: whether any other hub id or folder is allowed, too.
    """

    models: tuple[str, ...]
    drafters: tuple[str, ...]
    default: str
    open: bool

    def default_model(self, kind: Kind) -> str:
        """The model for requests that name none."""
        suited = self.models_for(kind)
        own = (kind == "text") == self.opens_on_text
        if kind == "video" and self.default in plugins.CAPTIONERS:
            own = False  # of the embedded models, the one of drawn scenes knows what happens in clips
        first = [self.default] if own else []
        return next((name for name in (*first, *DEFAULT_MODELS[kind], *suited) if name in suited), self.default)

    @property
    def opens_on_text(self) -> bool:
        """Whether the first model reads text only."""
        return plugins.reads_text_only(self.default)

    def models_for(self, kind: Kind) -> list[str]:
        """The models listed for requests of a kind: all but those that are known not to take it."""
        return [name for name in self.models if kind == "text" or not plugins.reads_text_only(name)]

    def methods(self, model: str) -> list[str]:
        """The methods listed for a model, plain decoding and the default drafter first."""
        plain, default, *others = available(model)
        folders = (name for name in self.drafters if "/" in name)
        allowed = [name for name in (*others, *folders) if self._allows(name)]
        return [plain, default if self._allows(default) else AUTO, *allowed]

    def _allows(self, method: str) -> bool:
        return self.open or drafter_of(method) in self.drafters

    def check(self, model: str, drafter: str) -> None:
        """Raise ``UserError`` if a name is not allowed."""
        for option, name, names in (("model", model, self.models), ("drafter", drafter, self.drafters)):
            if not self.open and name not in names:
                raise UserError(
                    f"{option} must be one that this server offers: expected {', '.join(names)}, got {name!r}"
                )


def make_catalog(models: Sequence[str] = (), drafters: Sequence[str] = (), *, open: bool = True) -> Catalog:
    """Catalog of the given models and drafters; by default the installed models (see
    ``plugins.installed``) and all registered drafters.

    Args:
        open: whether visitors may name others. Installed models and registered drafters are then listed in any case.
    """
    installed, registered = plugins.installed(), plugins.names("drafters")
    all_models = [*models, *(installed if open or not models else [])]
    all_drafters = [*drafters, *(registered if open or not drafters else [])]
    default = models[0] if models else plugins.default_model()
    return Catalog(tuple(dict.fromkeys(all_models)), tuple(dict.fromkeys([AUTO, *all_drafters, PLAIN])), default, open)
