"""EAGLE-3 drafter."""

from __future__ import annotations

from typing import Any

from mmspec.drafters.spec import DrafterSpec, published_as
from mmspec.errors import UserError


def parse_argument(argument: str) -> tuple[str, dict[str, Any]]:
    """Split the text after ``eagle3:`` into a folder and arguments of ``Eagle3.from_checkpoint``.

    ``FOLDER@2,16,29`` reads the inputs of these layers of the target, ``FOLDER@outputs:1,15,28`` the outputs.
    """
    folder, at, layers = argument.rpartition("@")
    if not at:
        return argument, {}
    kind, _, numbers = layers.rpartition(":")
    if kind not in ("", "inputs", "outputs") or not all(number.isdecimal() for number in numbers.split(",")):
        raise UserError(f"layers to read must be as in FOLDER@2,16,29 or FOLDER@outputs:1,15,28: got @{layers}")
    return folder, {"reads": [int(number) for number in numbers.split(",")], "outputs": kind == "outputs"}


SPEC = DrafterSpec(
    "eagle3",
    "EAGLE-3",
    "EAGLE-3, EAGLE-3.1, EAGLE-4 and P-EAGLE heads, which read several layers of the target (arXiv 2503.01840)",
    "mmspec.drafters.eagle3.drafter:Eagle3",
    weights="required",
    recognises=published_as("eagle3"),
    parse_argument=parse_argument,
    train="eagle3",
)
