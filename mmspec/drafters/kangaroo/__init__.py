"""Kangaroo drafter: declaration and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmspec.checks import option, whole
from mmspec.drafters.shape import RotaryShape
from mmspec.drafters.spec import DrafterSpec, published_as


@dataclass(frozen=True)
class KangarooConfig(RotaryShape):
    """Configuration of a ``KangarooNetwork``: a ``RotaryShape`` of the target's hidden size, and

    Attributes:
        mlp: 0, as the layer has none.
        exit_layer: number of the target's first layers whose output the network reads.
    """

    mlp: int = option(0, whole(0, 0))
    exit_layer: int = option(2, whole(1, 2**10))


def parse_argument(argument: str) -> tuple[str, dict[str, Any]]:
    """Split the text after ``kangaroo:`` into a folder and arguments of ``Kangaroo.from_checkpoint``.

    ``FOLDER@2`` exits after the target's first two layers.
    """
    folder, at, layers = argument.rpartition("@")
    return (folder, {"exit_layer": int(layers)}) if at and layers.isdecimal() else (argument, {})


SPEC = DrafterSpec(
    "kangaroo",
    "Kangaroo",
    "the target's own first layers, and a trained attention layer before its output layer (arXiv 2404.18911)",
    "mmspec.drafters.kangaroo.drafter:Kangaroo",
    weights="required",
    recognises=published_as("kangaroo"),
    parse_argument=parse_argument,
    train="kangaroo",
)
