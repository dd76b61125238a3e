"""Training batches of conversations about pictures and drawn scenes, and the conversations' kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspec.training.loss import TokenBatch, pad_tokens
from mmspec.vision.efficientnet import MEAN, STD, in_blocks
from mmspec.vision.pictures.compose import GRID, SIDE, Composed
from mmspec.vision.pictures.conversations import Pictures
from mmspec.vision.pictures.library import Picture
from mmspec.vision.scenes.conversations import lists_only, one_image, questions_only, several_images, video, words_only
from mmspec.vision.scenes.scene import Scene
from mmspec.vision.training.batches import LENGTH_MULTIPLE, ConversationKind, EncodedExample, render

VISUAL_TOKENS = GRID**2


def conversation_kinds(library: Sequence[Picture]) -> dict[str, ConversationKind]:
    """Returns the kinds of conversations: about drawn scenes, and about pictures of a library."""
    shown, kept = Pictures(library), Pictures(library, held_out=True)
    return {
        "image": ConversationKind(one_image, 24, 0.3),
        "questions": ConversationKind(questions_only, 24, 0.08),
        "lists": ConversationKind(lists_only, 24, 0.08),
        "several": ConversationKind(several_images, 16, 0.02),
        "video4": ConversationKind(lambda rng: video(rng, 4), 12, 0.04),
        "pictures": ConversationKind(shown.one, 24, 0.2, kept.one),
        "imagined": ConversationKind(shown.imagined, 24, 0.16, kept.imagined),
        "both": ConversationKind(shown.both, 16, 0.04, kept.both),
        "clips": ConversationKind(shown.clip, 16, 0.05, kept.clip),
        "words": ConversationKind(words_only, 24, 0.03),
    }


@dataclass
class PictureBatch(TokenBatch):
    """A batch of conversations and their pictures, in the order of their placeholders.

    Attributes:
        pixels: (images, 3, 192, 192), as of `to_pixels`.
        imagined: class whose features are put in the thing's place, (images,) int64, -1 for none.
        strengths: of the class, (images,).
        masks: share of each position that the thing covers, (images, 36).
    """

    pixels: Tensor
    imagined: Tensor
    strengths: Tensor
    masks: Tensor


def to_pixels(images: Sequence[np.ndarray]) -> Tensor:
    """Normalises uint8 images (192, 192, 3) as the processor does: (images, 3, 192, 192) float32."""
    stacked = np.stack(images) if images else np.zeros((0, SIDE, SIDE, 3), np.uint8)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).float().div_(255).sub_(MEAN).div_(STD)


def enlarged(image: np.ndarray) -> np.ndarray:
    """Returns a drawn scene, uint8 (96, 96, 3), in the size that the tower takes, as the processor resizes it."""
    return np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def drawn(scenes: Sequence[Scene | Composed], rng: Any) -> dict[str, Tensor]:
    """Draws pictures and scenes: the fields of a `PictureBatch` besides tokens and labels.

    Args:
        scenes: in order.
        rng: random state of the scenes' degradation.
    """
    images, imagined, strengths, masks = [], [], [], []
    for scene in scenes:
        number, strength, mask = -1, 0.0, np.ones((GRID, GRID), np.float32)
        if isinstance(scene, Composed):
            images.append(scene.draw())
            if scene.things and scene.things[0].imagined:
                (number, strength), mask = scene.things[0].imagined, scene.mask()
        else:
            images.append(enlarged(render(scene, rng)))
        imagined.append(number)
        strengths.append(strength)
        masks.append(mask)
    return {
        "pixels": to_pixels(images),
        "imagined": torch.tensor(imagined, dtype=torch.long),
        "strengths": torch.tensor(strengths),
        "masks": in_blocks(torch.from_numpy(np.array(masks, np.float32).reshape(-1, GRID, GRID))).flatten(1),
    }


def collate(rows: Sequence[EncodedExample], pad: int) -> PictureBatch:
    """Pads conversations to one length and draws their pictures. Draws from each row's `rng`: call it once per row."""
    text = pad_tokens([(row.ids, row.answers) for row in rows], pad, LENGTH_MULTIPLE)
    parts = [drawn(row.example.scenes, row.rng) for row in rows]
    return PictureBatch(
        text.tokens, text.labels, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )
