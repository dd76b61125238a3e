"""First targets of smol-llava's connector: each visual token is the embedding of a word that describes its position.

Four positions in a block say a phrase: in a drawn scene "large red star left top", the last token between two words, in
a picture the thing's name and its kind, "golden retriever dog". A character says itself, around a thing is the
background's colour. The frozen language model understands that much from the start, so that training through it begins
close to the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.vision.efficientnet import BLOCK, in_blocks
from mmspec.vision.pictures.compose import GRID as SIDE
from mmspec.vision.pictures.compose import Composed
from mmspec.vision.pictures.conversations import thing
from mmspec.vision.pictures.nouns import Noun
from mmspec.vision.scenes.scene import Scene, Sign

Words = tuple[np.ndarray, np.ndarray]
"""Two token ids of each position, whose embeddings' mean is the goal, and the weight of its loss: (36, 2) int64, (36,)
float32."""

_ROWS, _COLUMNS = (" top", " middle", " bottom"), (" left", " centre", " right")
_OUTSIDE = 0.15
"""Weight of positions without a thing."""

_SHARPNESS = 8.0


def _ordered(grid: np.ndarray) -> np.ndarray:
    """A grid as the tower's positions follow each other."""
    return in_blocks(torch.from_numpy(grid)).flatten().numpy()


def _pairs(words: np.ndarray) -> np.ndarray:
    return np.stack((words, words), -1)


def scene_words(scene: Scene, extra_signs: Sequence[Sign], token: Callable[[str], list[int]]) -> Words:
    """Returns the words of a drawn scene at rest.

    Args:
        scene: of the image.
        extra_signs: drawn besides that of the scene.
        token: token ids of a text.
    """
    words = np.full((SIDE, SIDE), token(" plain")[0])
    words[1::2, 1::2] = token(f" {scene.background}")[0]
    second = words.copy()
    weights = np.full((SIDE, SIDE), _OUTSIDE, np.float32)
    for item in scene.items:
        (row, col), block = item.cell, tuple(slice(2 * at, 2 * at + 2) for at in item.cell)
        said = (f" {item.size}", f" {item.colour}", f" {item.shape}")
        for grid, place in ((words, _ROWS[row]), (second, _COLUMNS[col])):
            grid[block] = np.array([token(word)[0] for word in (*said, place)]).reshape(2, 2)
        weights[block] = 1.0
    for sign in (*extra_signs, *([scene.sign] if scene.sign else [])):
        for index, character in enumerate(sign.text):
            at = sign.band, sign.slot + index
            words[at] = second[at] = token(character)[0]
            weights[at] = 1.0
    return np.stack((_ordered(words), _ordered(second)), -1), _ordered(weights)


def picture_words(picture: Composed, token: Callable[[str], list[int]]) -> Words:
    """Returns the words of a composed picture."""
    behind = token(f" {picture.colour}" if picture.colour else " coloured")[0]
    words = np.full((SIDE, SIDE), behind)
    weights = np.full((SIDE, SIDE), _OUTSIDE, np.float32)
    steps = (np.arange(SIDE) + 0.5) / SIDE
    for placed in picture.things:
        half = placed.size / 2 + 0.4 / SIDE
        rows, columns = (np.flatnonzero(np.abs(steps - at) <= half) for at in (placed.y, placed.x))
        inside = np.ix_(rows, columns)
        words[inside] = np.tile(phrase(thing(placed), token).reshape(2, 2), (SIDE // 2, SIDE // 2))[inside]
        weights[inside] = 1.0
    return _pairs(_ordered(words)), _ordered(weights)


def phrase(noun: Noun, token: Callable[[str], list[int]]) -> np.ndarray:
    """Returns the tokens of a block that shows a thing, (4,) int64: the first three of its name, and of its kind one.

    The last token of a shorter name is repeated.
    """
    name = token(f" {noun.name}")[:3]
    return np.array([*name, *name[-1:] * (3 - len(name)), token(f" {noun.kind}")[-1]])


def class_words(noun: Noun, token: Callable[[str], list[int]]) -> np.ndarray:
    """Returns the words of a thing that fills a picture, (36, 2) int64."""
    return _pairs(np.tile(phrase(noun, token), SIDE * SIDE // BLOCK))


def word_loss(predicted: Tensor, words: Tensor, weights: Tensor, embeddings: Tensor) -> tuple[Tensor, float]:
    """Returns how far visual tokens are from their words: squared distance, and cross-entropy among the batch's words.

    The logits of the cross-entropy are negative squared distances; both are relative to the embeddings' length.

    Args:
        predicted: visual tokens (batch, 36, hidden).
        words: token ids (batch, 36, 2).
        weights: (batch, 36).
        embeddings: of all tokens, (vocabulary, hidden).

    Returns:
        The loss, and the share of positions of weight 1 whose nearest word among those of the batch is the right one.
    """
    known, index = words.flatten(0, 1).unique(dim=0, return_inverse=True)
    goals = embeddings[known].float().mean(1)
    distances = torch.cdist(predicted.float().flatten(0, 1), goals).square() / goals.square().sum(-1).mean()
    own = distances.gather(1, index[:, None])[:, 0]
    entropy = F.cross_entropy(-_SHARPNESS * distances, index, reduction="none")
    at = weights.flatten()
    right = (distances.detach().argmin(-1) == index)[at == 1.0].float().mean().item()
    return ((own + entropy) * at).sum() / at.sum(), right
