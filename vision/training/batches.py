"""Training batches of scenes and conversations, drawn on the fly; determined by seed, step and progress."""

from __future__ import annotations

import io
import random
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspec.training.loss import IGNORE, TokenBatch, pad_tokens
from mmspec.vision.scenes.conversations import (
    DrawnConversation,
    lists_only,
    one_image,
    questions_only,
    several_images,
    video,
    words_only,
)
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.scene import Scene, Sign, sample_dense, sample_scene, seeded
from mmspec.vision.scenes.vocabulary import SIDE
from mmspec.vision.training.perception import SLOTS, TASKS, patch_labels

Encode = Callable[[Any], tuple[list[int], list[bool]]]
"""Token ids of a conversation, and for each whether it belongs to an answer."""

KINDS_PER_POOL = 4
BATCHES_PER_KIND = 4
POOL = KINDS_PER_POOL * BATCHES_PER_KIND
"""Batches drawn together: sorted by length within a kind, which saves padding, then shuffled."""

LENGTH_MULTIPLE = 16
"""Sequence lengths are padded to multiples of this."""

LISTS_UNTIL = 0.08
"""Progress until which conversations are short lists, by default: object names are learned sooner from them."""

LARGER_FROM = 0.6
"""Progress from which batches have their full size; before it, they are smaller while the loss falls fast."""


@dataclass
class EncodedExample:
    """A conversation as token ids.

    Attributes:
        ids: token ids, image placeholders expanded.
        answers: for each token whether it belongs to an answer.
        example: its scenes, to be drawn.
        rng: random state to draw them with.
    """

    ids: list[int]
    answers: list[bool]
    example: Any
    rng: random.Random


@dataclass
class ConversationBatch(TokenBatch):
    """A batch of conversations and their images.

    Attributes:
        pixels: (images, 3, 96, 96), in order of their placeholders.
        perception: (images, tasks, patches) int64, as of `patch_labels`.
    """

    pixels: Tensor
    perception: Tensor


@dataclass(frozen=True)
class ConversationKind:
    """A kind of conversation.

    Attributes:
        make: draws one.
        batch: conversations per batch at size 1.0.
        share: of the batches.
        held_out: draws one for evaluations, where that is not `make` with another random state.
    """

    make: Callable[[random.Random], DrawnConversation]
    batch: int
    share: float
    held_out: Callable[[random.Random], DrawnConversation] | None = None


FIRST_CONVERSATIONS: Mapping[str, ConversationKind] = {
    "lists": ConversationKind(lists_only, 64, 0.9),
    "video4": ConversationKind(lambda rng: video(rng, 4), 24, 0.1),
}

CONVERSATIONS: Mapping[str, ConversationKind] = {
    "image": ConversationKind(one_image, 48, 0.3),
    "questions": ConversationKind(questions_only, 56, 0.28),
    "lists": ConversationKind(lists_only, 64, 0.03),
    "several": ConversationKind(several_images, 32, 0.03),
    "video4": ConversationKind(lambda rng: video(rng, 4), 28, 0.18),
    "video8": ConversationKind(lambda rng: video(rng, 8), 16, 0.09),
    "video16": ConversationKind(lambda rng: video(rng, 16), 8, 0.05),
    "words": ConversationKind(words_only, 64, 0.04),
}


def render(scene: Scene, rng: random.Random, extra_signs: Sequence[Sign] = ()) -> np.ndarray:
    """Draws a scene with random degradation (resampling, JPEG, noise), uint8 (96, 96, 3)."""
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
    """Normalises uint8 images (96, 96, 3) as the processor does: (images, 3, 96, 96) float32 from -1 to 1."""
    if not images:
        return torch.zeros(0, 3, SIDE, SIDE)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def perception_batch(indices: Iterable[int], split: str = "train") -> tuple[Tensor, Tensor]:
    """Draws scenes, most of them crowded: pixels (batch, 3, 96, 96) and labels (batch, tasks, patches)."""
    images, labels = [], []
    for scene, signs, rng in perception_scenes(indices, split):
        images.append(render(scene, rng, signs))
        labels.append(patch_labels(scene, signs))
    return to_pixels(images), torch.from_numpy(np.stack(labels))


def perception_scenes(
    indices: Iterable[int], split: str = "train"
) -> Iterator[tuple[Scene, Sequence[Sign], random.Random]]:
    """Yields scenes, most of them crowded, each with its additional signs and the random state to draw it with."""
    for index in indices:
        rng = seeded(split, index)
        scene, signs = sample_dense(rng) if rng.random() < 0.75 else (sample_scene(rng), ())
        yield scene, signs, rng


class ConversationSampler:
    """Samples batches of conversations: short lists at first, then all kinds.

    Args:
        encode: token ids of a conversation, and for each whether it belongs to an answer.
        size: factor on the batch sizes.
        kinds: of conversations, once short lists are known.
        lists_until: progress until which conversations are short lists.
        seed: of the conversations.
    """

    def __init__(
        self,
        encode: Encode,
        size: float = 1.0,
        kinds: Mapping[str, ConversationKind] | None = None,
        lists_until: float = LISTS_UNTIL,
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.encode, self.size, self.kinds, self.lists_until = encode, size, kinds or CONVERSATIONS, lists_until
        self.info: dict[str, Any] = {}
        self._step, self._progress = 0, 0.0
        self._pool: list[list[EncodedExample]] = []
        self._pool_number = -1

    def next(self, progress: float) -> list[EncodedExample]:
        """Returns the next batch of conversations. The progress matters at the first batch of a pool only."""
        number, index = divmod(self._step, POOL)
        if index == 0:
            self._progress = progress
        if number != self._pool_number:
            self._pool, self._pool_number = self._draw_pool(number), number
        self._step += 1
        return self._pool[index]

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to continue the sequence of batches."""
        return {"step": self._step, "progress": self._progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state_dict()` of a sampler of the same size."""
        self._step, self._progress, self._pool_number = state["step"], state["progress"], -1

    def _draw_pool(self, number: int) -> list[list[EncodedExample]]:
        rng = random.Random(f"pool {number}")
        if self._progress < self.lists_until:
            kinds, factor = FIRST_CONVERSATIONS, 0.5
        else:
            kinds, factor = self.kinds, 0.75 if self._progress < LARGER_FROM else 1.0
        batches: list[list[EncodedExample]] = []
        for index, name in enumerate(_draw_kinds(kinds, rng.random())):
            size = max(2, round(kinds[name].batch * factor * self.size))
            first = (self.seed << 32) + (number * KINDS_PER_POOL + index << 12)
            indices = range(first, first + size * BATCHES_PER_KIND)
            rows = _make(kinds[name], "train", indices, self.encode)
            rows.sort(key=lambda row: len(row.ids))
            batches += [rows[start : start + size] for start in range(0, len(rows), size)]
        rng.shuffle(batches)
        return batches


def _draw_kinds(kinds: Mapping[str, ConversationKind], offset: float) -> list[str]:
    """Kinds of a pool's batches, by stratified sampling: the kinds of every pool are close to their shares."""
    bounds = list(accumulate(kind.share for kind in kinds.values()))
    points = [(k + offset) / KINDS_PER_POOL * bounds[-1] for k in range(KINDS_PER_POOL)]
    return [list(kinds)[bisect(bounds[:-1], point)] for point in points]


def held_out_examples(kind: ConversationKind, encode: Encode, count: int) -> list[EncodedExample]:
    return _make(kind, "heldout", range(count), encode)


def _make(kind: ConversationKind, split: str, indices: Iterable[int], encode: Encode) -> list[EncodedExample]:
    rows = []
    make = kind.held_out or kind.make if split == "heldout" else kind.make
    for index in indices:
        rng = seeded(split, index)
        example = make(rng)
        rows.append(EncodedExample(*encode(example), example, rng))
    return rows


def collate(rows: Sequence[EncodedExample], pad: int) -> ConversationBatch:
    """Pads conversations to one length and draws their images. Draws from each row's `rng`: call it once per row."""
    text = pad_tokens([(row.ids, row.answers) for row in rows], pad, LENGTH_MULTIPLE)
    images, perception = [], []
    unlabelled = np.full((len(TASKS), SLOTS**2), IGNORE)
    for row in rows:
        for scene in row.example.scenes:
            images.append(render(scene, row.rng))
            perception.append(patch_labels(scene) if row.example.at_rest else unlabelled)
    truth = np.stack(perception) if perception else unlabelled[None][:0]
    return ConversationBatch(text.tokens, text.labels, to_pixels(images), torch.from_numpy(truth))
