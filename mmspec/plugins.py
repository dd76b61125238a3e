"""Targets, kinds of layers, drafters, logits processors, embedded models and commands, found through entry points.

Groups, each line of a package's ``[project.entry-points]`` being ``name = "module:object"``:

- ``mmspec.targets``: adapter classes (see ``TransformersTarget``); the first whose ``supports(config)`` holds is taken.
- ``mmspec.layers``: classes that let trees pass through layers other than attention (see ``mmspec/targets/layers.py``);
  the first whose ``supports(config)`` holds for a text configuration is taken.
- ``mmspec.drafters``: drafter classes, made with the text behind the colon of ``name:argument`` if there is one.
- ``mmspec.processors``: functions of a logits processor that return its form for trees, a ``TreeProcessor`` or an
  ``OnTrees`` (see ``mmspec/sampling/processors.py``), or None for those that they do not serve; the first is taken.
- ``mmspec.models``: ``EmbeddedModel`` objects, or functions that return a model's folder.
- ``mmspec.commands``, ``mmspec.train``: click commands of ``mmspec`` and ``mmspec train``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mmspec.errors import UserError


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that a package carries; calling it returns its folder.

    Attributes:
        folder: what ``from_pretrained`` loads.
        limits: one sentence on what it was trained on, for users who give it input of their own.
    """

    folder: str
    limits: str

    def __call__(self) -> str:
        return self.folder


def names(group: str) -> list[str]:
    """Registered names of a group (``"targets"``, ``"drafters"``, ...), sorted."""
    return sorted({entry.name for entry in _entries(group)})


def registered(group: str) -> list[EntryPoint]:
    """The entry points of a group, one per name, sorted by name, none of them imported."""
    by_name = {entry.name: entry for entry in reversed(_entries(group))}
    return [by_name[name] for name in sorted(by_name)]


def find(group: str, name: str) -> Any:
    """The object registered under a name.

    Raises:
        UserError: nothing of that name is registered; the message lists what is.
    """
    for entry in _entries(group):
        if entry.name == name:
            return entry.load()
    raise UserError(f"unknown {group.rstrip('s')}: expected one of {', '.join(names(group))}, got {name!r}")


def limits(model: str) -> str | None:
    """One sentence on what an embedded model was trained on; None for all other models."""
    return getattr(find("models", model), "limits", None) if model in names("models") else None


def target_class(config: Any) -> Any:
    """The adapter for models of this transformers configuration.

    Raises:
        UserError: no registered adapter supports it.
    """
    # Families with special needs come before the general text adapter, which would take some of them too.
    for entry in sorted(_entries("targets"), key=lambda e: (e.name == "text", e.name)):
        adapter = entry.load()
        if adapter.supports(config):
            return adapter
    raise UserError(
        f"no target adapter supports {type(config).__name__}: registered are {', '.join(names('targets')) or 'none'}"
    )


def layer_class(config: Any) -> Any | None:
    """What serves the layers other than attention of models of this text configuration; None where nothing does."""
    for entry in _entries("layers"):
        served = entry.load()
        if served.supports(config):
            return served
    return None


def tree_form(processor: Any) -> Any | None:
    """The form for trees that a plug-in has for a logits processor; None where none has."""
    for entry in registered("processors"):
        form = entry.load()(processor)
        if form is not None:
            return form
    return None


def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"mmspec.{group}"))
