"""First targets of smol-llava's connector: each visual token is the embedding of a word that describes its patch.

The rows of patches read like text. An object's cell of 4 x 4 patches says "a large red star" and "at the top left" in
turn, a line of characters spells them ("B - A - R -"), an empty cell says "plain white background;". The frozen
language model understands that much from the start, so that training through it begins close to the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mmspec.vision.scenes.scene import Scene, Sign
from mmspec.vision.scenes.vocabulary import GRID

PER_SLOT = 2
"""Patches along a side of a character's slot."""

SIDE_PATCHES = 2 * GRID * PER_SLOT
"""Rows and columns of patches."""

_PLACES: tuple[tuple[str, ...], ...] = (
    (" at the top left", " at the top centre", " at the top right"),
    (" at the middle left", " in the centre;", " at the middle right"),
    (" at the bottom left", " at the bottom centre", " at the bottom right"),
)
_EMPTY_WEIGHT = 0.15


def patch_words(
    scene: Scene, extra_signs: Sequence[Sign], token: Callable[[str], list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the word of each patch and the weight of its loss, (144,) int64 and float32.

    Args:
        scene: of the image, at rest.
        extra_signs: drawn besides that of the scene.
        token: token ids of a text.
    """
    cell = 2 * PER_SLOT
    words = np.empty((SIDE_PATCHES, SIDE_PATCHES), np.int64)
    weights = np.full((SIDE_PATCHES, SIDE_PATCHES), _EMPTY_WEIGHT, np.float32)
    words[:] = np.tile(_four(f" plain {scene.background} background;", token), GRID)
    for item in scene.items:
        row, col = item.cell
        window = np.s_[row * cell : (row + 1) * cell, col * cell : (col + 1) * cell]
        phrases = [_four(text, token) for text in (f" a {item.size} {item.colour} {item.shape}", _PLACES[row][col])]
        words[window], weights[window] = np.tile(np.stack(phrases), (PER_SLOT, 1)).reshape(cell, cell), 1.0
    for sign in (*extra_signs, *([scene.sign] if scene.sign else [])):
        line = np.s_[PER_SLOT * sign.band : PER_SLOT * (sign.band + 1)]
        words[line], weights[line] = np.tile(token('"')[0], (2 * GRID, PER_SLOT)).reshape(-1), 0.5
        for index, character in enumerate(sign.text):
            at = PER_SLOT * (sign.slot + index)
            words[line, at : at + PER_SLOT] = token(character)[0], token("-")[0]
            weights[line, at : at + PER_SLOT] = 1.0, 0.5
    return words.reshape(-1), weights.reshape(-1)


def _four(text: str, token: Callable[[str], list[int]]) -> np.ndarray:
    ids = token(text)
    if len(ids) != 2 * PER_SLOT:
        raise ValueError(f"a phrase must have {2 * PER_SLOT} tokens: {text!r} has {len(ids)}")
    return np.array(ids)


def word_loss(predicted: Tensor, words: Tensor, weights: Tensor, embeddings: Tensor) -> tuple[Tensor, float]:
    """Returns the squared distance from the words' embeddings, relative to their length, and the accuracy.

    Args:
        predicted: visual tokens (batch, 144, hidden).
        words: token ids (batch, 144).
        weights: (batch, 144).
        embeddings: of all tokens, (vocabulary, hidden).

    Returns:
        The loss, and the share of patches of weight 1 whose nearest word among those of the batch is the right one.
    """
    goal = embeddings[words].float()
    distance = (predicted.float() - goal).square().sum(-1) / goal.square().sum(-1).mean()
    with torch.no_grad():
        known, index = words.unique(return_inverse=True)
        at = weights == 1.0
        nearest = torch.cdist(predicted[at].float(), embeddings[known].float()).argmin(-1)
        right = (nearest == index[at]).float().mean().item()
    return (distance * weights).sum() / weights.sum(), right
