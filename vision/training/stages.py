"""What moves which part of the embedded vision-language model in its two stages."""

from __future__ import annotations

from torch import nn

from mmspec.training.optimisers import Optimisers
from vision.training.network import Network


def tower_optimisers(network: Network) -> Optimisers:
    """For the tower with its heads alone."""
    return Optimisers([(network.llava.model.vision_tower, 1.0), (network.heads, 1.0)])


def language_optimisers(network: Network) -> Optimisers:
    """For the whole model; the tower, which can see by then, moves slowly."""
    model = network.llava.model
    return Optimisers(
        [
            (model.vision_tower, 0.25),
            (network.heads, 0.25),
            (nn.ModuleDict({"projector": model.multi_modal_projector, "language": model.language_model}), 0.75),
        ]
    )
