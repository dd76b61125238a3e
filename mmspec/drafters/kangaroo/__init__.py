"""Kangaroo drafter."""

from __future__ import annotations

from typing import Any

from mmspec.drafters.spec import DrafterSpec, published_as


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
