"""Configuration of Kangaroo's adapter."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import option, whole
from mmspec.drafters.shape import RotaryShape


@dataclass(frozen=True)
class KangarooConfig(RotaryShape):
    """Configuration of a ``KangarooNetwork``: a ``RotaryShape`` of the target's hidden size, and

    Attributes:
        mlp: 0, as the layer has none.
        exit_layer: number of the target's first layers whose output the network reads.
    """

    mlp: int = option(0, whole(0, 0))
    exit_layer: int = option(2, whole(1, 2**10))
