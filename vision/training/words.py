"""First targets of smol-llava's connector: each visual token is the embedding of a word that describes its position.

In a drawn scene, each cell of 2 x 2 positions says "red star" and "large left", a character says itself. In a picture,
rows alternate between the thing's name and its kind ("golden retriever", "dog"), around it is the background's colour.
The frozen language model understands that much from the start, so that training through it begins close to the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.vision.efficientnet import in_blocks
from mmspec.vision.pictures.compose import GRID as SIDE
from mmspec.vision.pictures.compose import Composed
from mmspec.vision.pictures.conversations import thing
from mmspec.vision.pictures.nouns import Noun
from mmspec.vision.scenes.scene import Scene, Sign

Words = tuple[np.ndarray, np.ndarray]
"""Token id of each position and the weight of its loss, (36,) int64 and float32."""

_COLUMNS = (" left", " middle", " right")
_OUTSIDE = 0.15
"""Weight of positions without a thing."""

_NAME = 3
"""Columns of a name: as many tokens of it, the last ones of a longer name, or repeated."""

_SHARPNESS = 8.0


def _ordered(grid: np.ndarray) -> np.ndarray:
    """A grid as the tower's positions follow each other."""
    return in_blocks(torch.from_numpy(grid)).flatten().numpy()


def scene_words(scene: Scene, extra_signs: Sequence[Sign], token: Callable[[str], list[int]]) -> Words:
    """Returns the words of a drawn scene at rest.

    Args:
        scene: of the image.
        extra_signs: drawn besides that of the scene.
        token: token ids of a text.
    """
    words = np.full((SIDE, SIDE), token(" plain")[0])
    words[1::2, 1::2] = token(f" {scene.background}")[0]
    weights = np.full((SIDE, SIDE), _OUTSIDE, np.float32)
    for item in scene.items:
        row, col = (2 * at for at in item.cell)
        said = (f" {item.colour}", f" {item.shape}", f" {item.size}", _COLUMNS[col // 2])
        words[row : row + 2, col : col + 2] = np.array([token(word)[0] for word in said]).reshape(2, 2)
        weights[row : row + 2, col : col + 2] = 1.0
    for sign in (*extra_signs, *([scene.sign] if scene.sign else [])):
        for index, character in enumerate(sign.text):
            words[sign.band, sign.slot + index], weights[sign.band, sign.slot + index] = token(character)[0], 1.0
    return _ordered(words), _ordered(weights)


def picture_words(picture: Composed, token: Callable[[str], list[int]]) -> Words:
    """Returns the words of a composed picture.

    Args:
        picture: of any number of things.
        token: token ids of a text.
    """
    behind = token(f" {picture.colour}" if picture.colour else " coloured")[0]
    words = np.full((SIDE, SIDE), behind)
    weights = np.full((SIDE, SIDE), _OUTSIDE, np.float32)
    steps = (np.arange(SIDE) + 0.5) / SIDE
    for placed in picture.things:
        noun, half = thing(placed), placed.size / 2 + 0.4 / SIDE
        rows, columns = (np.flatnonzero(np.abs(steps - at) <= half) for at in (placed.y, placed.x))
        for row in rows:
            ids = token(f" {noun.kind if row % 2 else noun.name}")[-_NAME:]
            words[row, columns] = [ids[column % _NAME % len(ids)] for column in columns]
        weights[np.ix_(rows, columns)] = 1.0
    return _ordered(words), _ordered(weights)


def class_words(noun: Noun, token: Callable[[str], list[int]]) -> np.ndarray:
    """Returns the words of a thing that fills a picture, (36,) int64."""
    rows = [np.resize(np.array(token(f" {text}")[-_NAME:]), _NAME) for text in (noun.name, noun.kind)]
    return _ordered(np.tile(np.stack([np.tile(row, SIDE // _NAME) for row in rows]), (SIDE // 2, 1)))


def word_loss(predicted: Tensor, words: Tensor, weights: Tensor, embeddings: Tensor) -> tuple[Tensor, float]:
    """Returns how far visual tokens are from their words: squared distance, and cross-entropy among the batch's words.

    The logits of the cross-entropy are negative squared distances; both are relative to the embeddings' length.

    Args:
        predicted: visual tokens (batch, 36, hidden).
        words: token ids (batch, 36).
        weights: (batch, 36).
        embeddings: of all tokens, (vocabulary, hidden).

    Returns:
        The loss, and the share of positions of weight 1 whose nearest word among those of the batch is the right one.
    """
    known, index = words.unique(return_inverse=True)
    goals = embeddings[known].float()
    distances = torch.cdist(predicted.float().flatten(0, 1), goals).square() / goals.square().sum(-1).mean()
    own = distances.gather(1, index.view(-1, 1))[:, 0]
    entropy = F.cross_entropy(-_SHARPNESS * distances, index.flatten(), reduction="none")
    at = weights.flatten()
    right = (distances.detach().argmin(-1) == index.flatten())[at == 1.0].float().mean().item()
    return ((own + entropy) * at).sum() / at.sum(), right
