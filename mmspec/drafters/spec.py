"""Declaration of a drafter, read by commands, documentation and the loader."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmspec.errors import UserError

if TYPE_CHECKING:
    from mmspec.core.drafter import Drafter

Weights = Literal["none", "optional", "required", "published", "target"]


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter, a plug-in of the group ``drafters`` under its name.

    Attributes:
        implementation: its class, or the class's location ``"module:Class"``, imported when a drafter is made.
        weights: ``"none"``: the constructor takes the optional text of ``NAME:TEXT``. Otherwise the class has a
            ``from_checkpoint(folder, **settings)``, and TEXT is a folder or hub id. ``"optional"``: a checkpoint is not
            required; ``"published"``: only third parties publish checkpoints; ``"target"``: the checkpoint is the
            target's own folder.
        argument: placeholder for TEXT, in capitals, if ``weights`` is ``"none"`` and TEXT is required.
        recognises: whether a folder without ``mmspec_drafter`` contains a published checkpoint of this drafter.
        parse_argument: splits TEXT into the constructor's or ``from_checkpoint``'s first and keyword arguments.
        trusts: whether the constructor takes ``trust_remote_code``.
        chains: whether lists of methods also offer it as a chain (``NAME@chain``).
        train: its command of ``mmspec train``; empty without one.
    """

    name: str
    label: str
    summary: str
    implementation: str | Callable[..., Drafter]
    weights: Weights = "none"
    argument: str = ""
    recognises: Callable[[Path], bool] | None = None
    parse_argument: Callable[[str], tuple[str, dict[str, Any]]] | None = None
    trusts: bool = False
    chains: bool = True
    train: str = ""

    @staticmethod
    def of(name: str, registered: Any) -> DrafterSpec:
        """The declaration that is registered, or one for a class without."""
        if isinstance(registered, DrafterSpec):
            return registered
        summary = next(iter((registered.__doc__ or "").strip().splitlines()), "")
        weights: Weights = "optional" if hasattr(registered, "from_checkpoint") else "none"
        return DrafterSpec(name, name, summary, registered, weights)

    def load(self) -> Any:
        """The drafter's class."""
        if not isinstance(self.implementation, str):
            return self.implementation
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)

    @property
    def location(self) -> str:
        """Location of its class, as ``"module:Class"``."""
        source = self.implementation
        return source if isinstance(source, str) else f"{source.__module__}:{source.__qualname__}"

    @property
    def alone(self) -> bool:
        """Whether the name alone makes a drafter for any target."""
        return self.weights in ("none", "optional") and not self.argument

    def parsed(self, argument: str) -> tuple[str, dict[str, Any]]:
        """Apply ``parse_argument``, unless ``argument`` is a path that exists."""
        if self.parse_argument is None or os.path.exists(argument):
            return argument, {}
        return self.parse_argument(argument)

    def make(self, argument: str = "", trust_remote_code: bool = False) -> Drafter:
        """Construct the drafter without a checkpoint.

        Raises:
            UserError: it needs a checkpoint, or does not take the argument.
        """
        if self.weights in ("required", "published", "target"):
            raise UserError(f"{self.name} needs a checkpoint: expected {self.name}:FOLDER, or the folder itself")
        if self.argument and not argument:
            raise UserError(f"the {self.name} drafter needs an argument: expected {self.name}:{self.argument}")
        kind = self.load()
        options: dict[str, Any] = {}
        if argument:
            argument, options = self.parsed(argument)
        if self.trusts and trust_remote_code:
            options["trust_remote_code"] = True
        try:
            return kind(argument, **options) if argument else kind(**options)
        except TypeError as error:
            raise UserError(f"drafter {self.name!r} does not take the argument {argument!r}") from error

    def from_checkpoint(self, folder: Path, **settings: Any) -> Drafter:
        """Load a checkpoint of the drafter.

        Raises:
            UserError: it is invalid, or this drafter has none.
        """
        if self.weights == "none":
            raise UserError(f"{folder}: mmspec_drafter must name a drafter with a checkpoint: got {self.name!r}")
        return self.load().from_checkpoint(folder, **settings)
