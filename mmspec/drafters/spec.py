"""Declarations of drafters, read by commands, documentation and the loader, and shapes of their configurations."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from mmspec.errors import UserError
from mmspec.validation import option, options

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
            required; ``"published"``: only third parties publish checkpoints; ``"target"``: the target's own folder.
        argument: placeholder for TEXT, in capitals, if ``weights`` is ``"none"`` and TEXT is required.
        recognises: whether a folder without ``mmspec_drafter`` contains a published checkpoint of this drafter, in a
            layout that is not in ``LAYOUTS``.
        parse_settings: reads SETTINGS of ``NAME:TEXT@SETTINGS`` as keyword arguments of the constructor or
            ``from_checkpoint``; None if it is a part of TEXT.
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
    parse_settings: Callable[[str], dict[str, Any] | None] | None = None
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
        """TEXT and settings of an argument, without settings if it is a path that exists."""
        text, at, given = argument.rpartition("@")
        if self.parse_settings is None or not at or os.path.exists(argument):
            return argument, {}
        settings = self.parse_settings(given)
        return (argument, {}) if settings is None else (text, settings)

    def make(self, argument: str = "", trust_remote_code: bool = False) -> Drafter:
        """Construct the drafter without a checkpoint. Raises ``UserError``: it needs a checkpoint, or does not take the
        argument."""
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
        """Load a checkpoint of the drafter. Raises ``UserError``: it is invalid, or this drafter has none."""
        if self.weights == "none":
            raise UserError(f"{folder}: mmspec_drafter must name a drafter with a checkpoint: got {self.name!r}")
        return self.load().from_checkpoint(folder, **settings)


@options
class TreeShape:
    """Tree limits of a drafter that grows trees level by level."""

    top_k: int = option(..., ge=1, le=64)
    depth: int = option(..., ge=1, le=64)
    total_tokens: int = option(..., ge=1, le=512)


SCALINGS = ("linear", "llama3", "yarn")
"""Rotary scaling types whose frequencies do not depend on the length."""

TREE = tuple(one.name for one in fields(TreeShape))


@options
class LayerShape:
    """Shape of a drafter's decoder layers."""

    hidden_size: int = option(..., ge=1, le=2**16)
    heads: int = option(..., "Attention heads; by default the target's.", ge=1, le=2**10)
    kv_heads: int = option(..., "By default the target's.", ge=1, le=2**10)
    head_dim: int = option(..., "By default the target's.", ge=2, le=2**12)
    mlp: int = option(..., "Intermediate size of the MLP; by default the target's.", ge=1, le=2**18)
    rope_theta: float = option(10000.0, ge=1, le=1e12)
    norm_eps: float = option(1e-6, ge=1e-12, le=1)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(f"kv_heads must divide heads: got {self.kv_heads} for {self.heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even, as rotary positions turn pairs: got {self.head_dim}")

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Rotary positions as transformers' ``rope_parameters``."""
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @classmethod
    def like(cls, config: object, **changes: object) -> Self:
        """Configuration for a target's text configuration."""
        get = lambda name, default=None: getattr(config, name, None) or default  # noqa: E731
        heads = get("num_attention_heads")
        if heads is None:
            name = type(config).__name__
            raise UserError(f"the drafter requires a target with attention: {name} has no num_attention_heads")
        rope = get("rope_parameters", {})
        fields = {
            "hidden_size": get("hidden_size"),
            "heads": heads,
            "kv_heads": get("num_key_value_heads", heads),
            "head_dim": get("head_dim", get("hidden_size") // heads),
            "mlp": get("intermediate_size"),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "norm_eps": get("rms_norm_eps", 1e-6),
        }
        return cls(**(fields | changes))


@options
class RotaryShape(LayerShape):
    """Shape of decoder layers with the target's kind of rotary positions: a ``LayerShape``, and

    Attributes:
        rope: rotary positions as transformers' ``rope_parameters``; empty means unscaled, with ``rope_theta``.
    """

    rope: dict = option(dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        rope = self.rope_parameters
        if (kind := rope["rope_type"]) not in ("default", *SCALINGS):
            raise UserError(f"rotary positions must be default, {', '.join(SCALINGS)}: got {kind!r}")
        if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise UserError(f"rotary positions must turn whole heads: got a partial_rotary_factor of {factor}")
        sections, half = rope.get("mrope_section"), self.head_dim // 2
        if sections is not None:
            whole_numbers = isinstance(sections, list) and all(isinstance(one, int) and one >= 0 for one in sections)
            if not whole_numbers or len(sections) != 3 or sum(sections) != half:
                raise UserError(f"mrope_section must be three sections of {half} frequencies in all: got {sections!r}")

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return {**super().rope_parameters, **self.rope}


@options
class HeadShape(RotaryShape):
    """Shape of a network with an optional output layer and embedding: a ``RotaryShape``, and

    Attributes:
        head: rows of the network's output layer, the draft vocabulary; 0 uses the target's output layer.
        embedding: rows of the network's embedding; 0 uses the target's.
    """

    layers: int = option(1, "Decoder layers.", ge=1, le=64)
    head: int = option(0, ge=0, le=2**24)
    embedding: int = option(0, ge=0, le=2**24)
