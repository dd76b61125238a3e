"""Batches drawn on the fly. What a step sees depends on its number, the seed and the stage alone."""

from __future__ import annotations

import io
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vision.scenes.conversations import (
    Example,
    lists_only,
    one_image,
    questions_only,
    several_images,
    video,
    words_only,
)
from vision.scenes.drawing import draw
from vision.scenes.scene import Scene, Sign, sample_dense, sample_scene, seeded
from vision.scenes.vocabulary import SIDE
from vision.training.perception import IGNORE, TASKS, patch_labels
from vision.training.text import IMAGE_TOKENS, encode

KINDS_PER_POOL = 4
BATCHES_PER_KIND = 4
POOL = KINDS_PER_POOL * BATCHES_PER_KIND
"""Batches drawn together: sorted by length within a kind to save padding, shuffled so that no kind is forgotten."""

BUCKET = 16
"""Sequence lengths are padded to multiples of this."""


@dataclass
class Batch:
    """A batch of conversations, padded on the right (causal attention needs no mask then).

    `tokens`, `labels`: (batch, length); `labels` are `IGNORE` where nothing is to be predicted, else the token that
    follows. `pixels`: (images, 3, 96, 96) in order of their placeholders. `perception`: (images, tasks, patches).
    """

    kind: str
    tokens: Tensor
    labels: Tensor
    pixels: Tensor
    perception: Tensor


@dataclass(frozen=True)
class Kind:
    """A sort of example: how it is made, how many fill a batch at size 1.0, and its share of the batches."""

    make: Callable[[random.Random], Example]
    batch: int
    share: float


FIRST_LESSONS: dict[str, Kind] = {
    "lists": Kind(lists_only, 64, 0.9),
    "video4": Kind(lambda rng: video(rng, 4), 24, 0.1),
}

ALL_LESSONS: dict[str, Kind] = {
    "image": Kind(one_image, 48, 0.3),
    "questions": Kind(questions_only, 56, 0.28),
    "lists": Kind(lists_only, 64, 0.03),
    "several": Kind(several_images, 32, 0.03),
    "video4": Kind(lambda rng: video(rng, 4), 28, 0.18),
    "video8": Kind(lambda rng: video(rng, 8), 16, 0.09),
    "video16": Kind(lambda rng: video(rng, 16), 8, 0.05),
    "words": Kind(words_only, 64, 0.04),
}


def render(scene: Scene, rng: random.Random, extra_signs: Sequence[Sign] = ()) -> np.ndarray:
    """The scene as the model may meet it, uint8 (96, 96, 3): clean, or enlarged, compressed, shrunk, noisy."""
    draw_ = rng.random()
    if draw_ < 0.75:
        pixels = draw(scene, 1, extra_signs)
    else:
        scale = rng.choice((2, 3, 4))
        large = Image.fromarray(draw(scene, scale, extra_signs))
        if draw_ > 0.93:
            stream = io.BytesIO()
            large.save(stream, "JPEG", quality=rng.randint(40, 90))
            large = Image.open(stream)
        pixels = np.asarray(large.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    if rng.random() < 0.15:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(1, 7), pixels.shape)
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return pixels


def to_pixels(images: Sequence[np.ndarray]) -> Tensor:
    """Images (96, 96, 3) uint8 as the processor would give them: (images, 3, 96, 96), -1..1, float32."""
    if not images:
        return torch.zeros(0, 3, SIDE, SIDE)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def perception_batch(step: int, size: int, split: str = "train") -> tuple[Tensor, Tensor]:
    """Pixels (size, 3, 96, 96) and labels (size, tasks, patches) of mostly crowded scenes."""
    images, labels = [], []
    for index in range(size):
        rng = seeded(split, step * size + index)
        if rng.random() < 0.75:
            scene, signs = sample_dense(rng)
        else:
            scene, signs = sample_scene(rng), ()
        images.append(render(scene, rng, signs))
        labels.append(patch_labels(scene, signs))
    return to_pixels(images), torch.from_numpy(np.stack(labels))


class Lessons:
    """Batches of conversations by step; pools are drawn when first needed."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._pool: list[Batch] = []
        self._pool_number = -1

    def batch(self, step: int, kinds: dict[str, Kind], size: float = 1.0) -> Batch:
        """The batch of a step. `kinds` and `size`, a factor on their batch sizes, matter when a pool is drawn."""
        number, index = divmod(step, POOL)
        if number != self._pool_number:
            self._pool = self._draw_pool(number, kinds, size)
            self._pool_number = number
        return self._pool[index]

    def _draw_pool(self, number: int, kinds: dict[str, Kind], factor: float) -> list[Batch]:
        rng = random.Random(f"pool {number}")
        batches: list[Batch] = []
        for index, name in enumerate(_draw_kinds(kinds, rng.random())):
            size = max(2, round(kinds[name].batch * factor))
            first = (number * KINDS_PER_POOL + index) << 12
            rngs = [seeded("train", first + k) for k in range(size * BATCHES_PER_KIND)]
            examples = [(kinds[name].make(each), each) for each in rngs]
            rows = [(*encode(example, self.tokenizer), example, each) for example, each in examples]
            rows.sort(key=lambda row: len(row[0]))
            for start in range(0, len(rows), size):
                batches.append(collate(name, rows[start : start + size], self.tokenizer.pad_token_id))
        rng.shuffle(batches)
        return batches


def _draw_kinds(kinds: dict[str, Kind], offset: float) -> list[str]:
    """Names of the kinds in a pool: evenly spaced points on the line of shares, so that every pool is a fair mix."""
    bounds = list(accumulate(kind.share for kind in kinds.values()))
    points = [(k + offset) / KINDS_PER_POOL * bounds[-1] for k in range(KINDS_PER_POOL)]
    return [list(kinds)[bisect(bounds[:-1], point)] for point in points]


def collate(kind: str, rows: Sequence[tuple[list[int], list[bool], Example, random.Random]], pad: int) -> Batch:
    """Pads encoded examples to one length and draws their images."""
    longest = max(len(row[0]) for row in rows) - 1
    length = -(-longest // BUCKET) * BUCKET
    tokens = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORE)
    images, perception = [], []
    nothing = np.full((len(TASKS), IMAGE_TOKENS), IGNORE)
    for index, (ids, answers, example, rng) in enumerate(rows):
        row = torch.tensor(ids)
        tokens[index, : len(ids) - 1] = row[:-1]
        labels[index, : len(ids) - 1] = torch.where(torch.tensor(answers[1:]), row[1:], IGNORE)
        for scene in example.scenes:
            images.append(render(scene, rng))
            perception.append(patch_labels(scene) if example.at_rest else nothing)
    truth = np.stack(perception) if perception else np.zeros((0, len(TASKS), IMAGE_TOKENS), np.int64)
    return Batch(kind, tokens, labels, to_pixels(images), torch.from_numpy(truth))


def held_out_batch(name: str, tokenizer: PreTrainedTokenizerFast, size: int) -> Batch:
    """The first `size` held-out examples of a kind."""
    rngs = [seeded("heldout", index) for index in range(size)]
    examples = [(ALL_LESSONS[name].make(rng), rng) for rng in rngs]
    rows = [(*encode(example, tokenizer), example, rng) for example, rng in examples]
    return collate(name, rows, tokenizer.pad_token_id)
