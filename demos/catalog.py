"""Models, drafters, methods of decoding and examples that visitors may select."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gradio

from mmspec import plugins
from mmspec.demos.chat_request import DEFAULT_MODELS, ChatRequest, Kind
from mmspec.drafters.registry import AUTO, PLAIN, Selection, drafter_spec, drafters_for
from mmspec.errors import UserError
from mmspec.vision.embedded import photograph, samples
from mmspec.vision.video import load_video

CHAIN = "@chain"
_PLAIN = "the model alone, one token per pass; the others guess tokens, which it checks (arXiv 2211.17192)"
_CHAIN = "the same method guesses one continuation, instead of a tree of several (arXiv 2305.09781)"
FEWEST, MOST = 2, 4  # methods of a race


def drafter_of(method: str) -> str:
    """A method without its shape."""
    return method if Selection.parse(method).chain is None else method.removesuffix(CHAIN)


def label(method: str) -> str:
    """Display name, such as "FLASH, chain"."""
    return Selection.parse(method).label()


def explained(methods: Sequence[str]) -> dict[str, str]:
    """One-line descriptions of the methods' drafters by label, with the paper's arXiv number."""
    lines = {label(PLAIN): _PLAIN}
    for method in methods:
        for name in Selection.parse(drafter_of(method)).drafters:
            if name in plugins.names("drafters"):
                lines[label(name)] = drafter_spec(name).summary.partition(";")[0].replace("target", "model")
    return {**lines, "Chain": _CHAIN} if any(method.endswith(CHAIN) for method in methods) else lines


def check_methods(methods: Sequence[str]) -> None:
    """Raise ``UserError`` unless these are two to four different methods."""
    if not FEWEST <= len(methods) <= MOST or len(set(methods)) < len(methods):
        named = ", ".join(map(label, methods)) or "none"
        raise UserError(f"a race compares methods: expected {FEWEST} to {MOST} different ones, got {named}")


@dataclass(frozen=True)
class Catalog:
    """Models and drafters that visitors may select: those listed, and others if ``open``. The ``default`` is for texts
    if it is ``text_only``, else for images and videos."""

    models: tuple[str, ...]
    drafters: tuple[str, ...]
    default: str
    open: bool
    text_only: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, models: Sequence[str] = (), drafters: Sequence[str] = (), texts: Iterable[str] = (), *, open: bool = True
    ) -> Catalog:
        """The given models and drafters; by default, and always if ``open``, also the installed models and all
        registered drafters. ``texts`` are further text models."""
        listed = dict.fromkeys([*models, *(plugins.installed() if open or not models else [])])
        named = dict.fromkeys([AUTO, *drafters, *(plugins.names("drafters") if open or not drafters else []), PLAIN])
        text_only = frozenset({*texts, *filter(plugins.reads_text_only, listed)})
        return cls(tuple(listed), tuple(named), models[0] if models else plugins.default_model(), open, text_only)

    def default_model(self, kind: Kind) -> str:
        suited = self.models_for(kind)
        own = (kind == "text") == self.opens_on_text
        if kind == "video" and self.default in plugins.CAPTIONERS:
            own = False  # the embedded model of drawn scenes is trained on clips
        first = [self.default] if own else []
        return next((name for name in (*first, *DEFAULT_MODELS[kind], *suited) if name in suited), self.default)

    @property
    def opens_on_text(self) -> bool:
        """Whether the first model reads text only."""
        return self.default in self.text_only

    def models_for(self, kind: Kind) -> list[str]:
        """Models listed for requests of a kind, without models known not to support it."""
        return [name for name in self.models if kind == "text" or name not in self.text_only]

    def methods(self, model: str) -> list[str]:
        """The methods listed for a model: plain decoding, the default drafter, then drafters that need no further
        checkpoint, their chains, and the drafters that the server was started with."""
        home = Path(plugins.model_path(model))
        default, *others = drafters_for(home)
        names = [default, *others] if home.exists() else []
        chains = [f"{name}{CHAIN}" for name in names if "+" not in name and drafter_spec(name).chains]
        folders = [name for name in self.drafters if name not in (AUTO, PLAIN, *plugins.names("drafters"))]
        allowed = [name for name in (*others, *chains, *folders) if self._allows(name)]
        return list(dict.fromkeys([PLAIN, default if self._allows(default) else AUTO, *allowed]))

    def _allows(self, method: str) -> bool:
        return self.open or drafter_of(method) in self.drafters

    def check(self, model: str, drafter: str) -> None:
        """Raise ``UserError`` if a name is not allowed."""
        for option, name, names in (("model", model, self.models), ("drafter", drafter, self.drafters)):
            if not self.open and name not in names:
                offered = ", ".join(names)
                raise UserError(f"{option} must be one that this server offers: expected {offered}, got {name!r}")


_SHAPES = {"five-shapes.png": "Five shapes", "three-shapes.png": "Three shapes"}
_DRAWN: dict[Kind, dict[str, str]] = {
    "image": {"two-rings.png": "Two rings", "scene.png": "A sign", **_SHAPES},
    "video": {"clip.mp4": "A clip", "another-clip.mp4": "Another clip"},
}
"""Labels of the package's samples. A tab opens on the first, which ``tiny-llava`` describes without a mistake."""

_ASSETS = Path(gradio.__file__).parent / "media_assets" / "images"
_PHOTOGRAPHS = {photograph(): "A goldfish", _ASSETS / "tower.jpg": "A tower", _ASSETS / "lion.jpg": "A lion"}
"""Photographs of this package and of gradio; smol-llava did not see them in training."""

TRAINED_TEXTS = {
    "A word problem": "Max has 24 apples. He buys 3 bags of 6 apples. How many apples does Max have now?",
    "A Python function": (
        "Write a Python function count_of_list(items) that gives how many there are of all items that are even."
    ),
    "A room": (
        "Describe the room.\n- lamp: round, red, near the door\n- bed: round, purple, under the window\n"
        "- carpet: tall, red, beside the wall"
    ),
}
"""Example prompts for ``tiny-hybrid``, by their label on the page."""

TEXTS = {
    "A Python class": "Write a Python class Stack with push, pop and peek.",
    "A process": "What is photosynthesis? Explain it in three steps.",
    "A city": "What is the capital of France, and what is it known for?",
}
"""Example prompts for other models, as many."""


class Example(NamedTuple):
    """An example on the page: its label, the prompt or the path of the file, and the path of a thumbnail."""

    label: str
    value: str
    icon: str | None = None


class Examples:
    """Examples of a tab, as many for all models; the package's samples are copied to ``folder``."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self._drawn = [_copied(samples() / name, label, folder) for name, label in _DRAWN.get(kind, {}).items()]
        found = {path: label for path, label in _PHOTOGRAPHS.items() if kind == "image" and path.is_file()}
        copied = [_copied(path, label, folder) for path, label in found.items()]
        self._photographs = [*copied, *self._drawn][: len(self._drawn)]

    def of(self, model: str) -> list[Example]:
        untrained = plugins.sees_photographs(model)
        if self.kind == "text":
            return [Example(*entry) for entry in (TEXTS if untrained else TRAINED_TEXTS).items()]
        return self._photographs if untrained else self._drawn

    def name_of(self, upload: str, model: str) -> str | None:
        """File name of the example that equals an upload; None without a match."""
        with suppress(OSError):  # the upload was removed: the request itself reports the error
            paths = (Path(example.value) for example in self.of(model))
            return next((path.name for path in paths if filecmp.cmp(upload, path, shallow=False)), None)
        return None

    def include(self, request: ChatRequest) -> bool:
        """Whether a request's uploads, or its text, are all among the examples for its model."""
        if self.kind == "text":
            return request.prompt in [example.value for example in self.of(request.model)]
        return all(self.name_of(upload, request.model) for upload in request.uploads)


def _copied(source: Path, label: str, folder: Path) -> Example:
    path = icon = Path(shutil.copyfile(source, folder / source.name))
    if source.suffix == ".mp4":
        icon = path.with_suffix(".png")
        load_video(path, frames=1).frames[0].save(icon)
    return Example(label, str(path), str(icon))
