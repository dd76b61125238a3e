"""Auxiliary task of the vision tower: each patch classifies its cell's object, the background and its own character.

Every patch of a cell has the labels of the whole cell, so that any one visual token describes an object completely.
The heads are not part of the exported model.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.training.loss import IGNORE
from mmspec.vision.scenes.scene import Scene, Sign
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, CHARACTERS, COLOURS, GRID, MAX_SIGN, SHAPES, SIZES

SLOTS = 2 * GRID
"""Rows and columns of character slots."""

TASKS: dict[str, int] = {
    "colour": len(COLOURS) + 1,
    "shape": len(SHAPES) + 1,
    "size": len(SIZES) + 1,
    "character": len(CHARACTERS) + 1,
    "place": MAX_SIGN + 1,
    "background": len(BACKGROUNDS),
}
"""Number of classes per task; the last class of the first five is "none". "place" is the index within a sign."""

_COLOUR = {name: i for i, name in enumerate(COLOURS)}
_SHAPE = {name: i for i, name in enumerate(SHAPES)}
_SIZE = {name: i for i, name in enumerate(SIZES)}
_BACKGROUND = {name: i for i, name in enumerate(BACKGROUNDS)}


def patch_labels(scene: Scene, extra_signs: Iterable[Sign] = ()) -> np.ndarray:
    """Returns the labels of a scene without motion: (6 tasks, 36 patches) int64.

    Args:
        scene: of the image.
        extra_signs: drawn besides that of the scene.
    """
    labels = np.empty((len(TASKS), SLOTS, SLOTS), np.int64)
    for index, classes in enumerate(TASKS.values()):
        labels[index] = classes - 1
    for item in scene.items:
        row, col = item.cell
        window = labels[:3, 2 * row : 2 * row + 2, 2 * col : 2 * col + 2]
        window[:] = np.array([_COLOUR[item.colour], _SHAPE[item.shape], _SIZE[item.size]])[:, None, None]
    signs = list(extra_signs) if scene.sign is None else [scene.sign, *extra_signs]
    for sign in signs:
        for index, character in enumerate(sign.text):
            labels[3:5, sign.band, sign.slot + index] = CHARACTERS.index(character), index
    labels[5] = _BACKGROUND[scene.background]
    return labels.reshape(len(TASKS), -1)


class PerceptionHeads(nn.Module):
    """Classification heads of all tasks: layer norm and one linear layer over the tower's patch features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, sum(TASKS.values()))

    def forward(self, features: Tensor) -> list[Tensor]:
        """Returns the logits of each task from features (batch, patches, width)."""
        return list(self.linear(self.norm(features)).split(list(TASKS.values()), dim=-1))


def perception_loss(logits: list[Tensor], labels: Tensor) -> Tensor:
    """Returns the sum of the tasks' cross-entropies; `labels` (batch, tasks, patches) are negative where there is none.

    Patches with an object or a character have a higher weight than empty ones, which are many and easy.
    """
    total = torch.zeros(())
    for index, scores in enumerate(logits):
        truth = labels[:, index].flatten()
        losses = F.cross_entropy(scores.flatten(0, 1).float(), truth, ignore_index=IGNORE, reduction="none")
        if index < 5:
            present = (truth >= 0) & (truth < scores.shape[-1] - 1)
            weight = present.float() + 0.15 * (truth >= 0).float()
        else:
            weight = 0.3 * (truth >= 0).float()
        total = total + (losses * weight).sum() / weight.sum().clamp(min=1.0)
    return total


@torch.no_grad()
def perception_accuracy(logits: list[Tensor], labels: Tensor) -> dict[str, float]:
    """Returns the accuracy of each task over patches with an object or character; tasks without any are left out."""
    report = {}
    for index, (name, scores) in enumerate(zip(TASKS, logits, strict=True)):
        truth = labels[:, index]
        present = (truth >= 0) & ((truth < scores.shape[-1] - 1) if index < 5 else (truth >= 0))
        if bool(present.any()):
            report[name] = (scores.argmax(-1) == truth)[present].float().mean().item()
    return report
