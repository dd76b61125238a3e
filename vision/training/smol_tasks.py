"""Training tasks of smol-llava: the connector learns words, then it and the norms learn from conversations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmspec.training.loss import LossOutput
from mmspec.training.optimisers import Optimisers
from mmspec.vision.pictures.compose import Composed
from mmspec.vision.pictures.conversations import STRONG, WEAK, Pictures
from mmspec.vision.pictures.library import Picture
from mmspec.vision.pictures.nouns import classes
from mmspec.vision.scenes.scene import Scene, seeded
from mmspec.vision.training.batches import (
    ConversationSampler,
    perception_scenes,
    render,
)
from mmspec.vision.training.picture_batches import (
    VISUAL_TOKENS,
    PictureBatch,
    collate,
    conversation_kinds,
    drawn,
    enlarged,
    to_pixels,
)
from mmspec.vision.training.smol_export import chat_format, export_connector
from mmspec.vision.training.smol_network import SmolLlava
from mmspec.vision.training.task import HELD_OUT, ConversationTask, SceneSampler
from mmspec.vision.training.text import encode
from mmspec.vision.training.words import class_words, picture_words, scene_words, word_loss

_CLASSES_PER_PICTURE, _POSITIONS = 24, 12
"""Imagined classes per picture of a batch, and the positions, drawn anew for each batch, at which they are learnt."""


class WordsTask:
    """Trains the connector on single scenes and pictures. Implements `mmspec.training.plan.TrainingTask`.

    Args:
        network: only the language model's embeddings are used besides what is trained.
        tokenizer: of the language model.
        library: named pictures.
        size: factor on the batch size.
    """

    def __init__(
        self, network: SmolLlava, tokenizer: PreTrainedTokenizerFast, library: Sequence[Picture], size: float = 1.0
    ) -> None:
        self.network, self.tokenizer = network, tokenizer
        self.optimisers = Optimisers([(network.connector, 0.2)])
        self.sampler = SceneSampler(max(2, round(16 * size)))
        self._pictures = {"train": Pictures(library), "heldout": Pictures(library, held_out=True)}
        self._ids: dict[str, list[int]] = {}

    def batch(self, examples: list[int], split: str = "train") -> tuple[PictureBatch, Tensor, Tensor]:
        """Returns as many scenes as pictures, the words of their positions and their weights (images, 36)."""
        shown: list[Scene | Composed] = []
        images, words = [], []
        for scene, signs, rng in perception_scenes(examples, split):
            images.append(enlarged(render(scene, rng, signs)))
            words.append(scene_words(scene, signs, self._tokens))
        for index in examples:
            [picture] = self._pictures[split].one(seeded(split, index)).scenes
            shown.append(picture)
            words.append(picture_words(picture, self._tokens))
        parts, pixels = drawn(shown, None), to_pixels(images)
        plain = {"imagined": torch.full((len(pixels),), -1), "strengths": torch.zeros(len(pixels))}
        plain |= {"pixels": pixels, "masks": torch.ones(len(pixels), VISUAL_TOKENS)}
        none = torch.zeros(0, 0, dtype=torch.long)
        joined = {name: torch.cat((plain[name], parts[name])) for name in parts}
        ids, weights = (torch.from_numpy(np.stack(rows)) for rows in zip(*words, strict=True))
        return PictureBatch(none, none, **joined), ids, weights

    def _tokens(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._ids[text]

    def weight(self, batch: tuple[PictureBatch, Tensor, Tensor]) -> int:
        """Returns the number of scenes and pictures."""
        return len(batch[1])

    def loss(
        self,
        network: Any,
        batch: tuple[PictureBatch, Tensor, Tensor],
        generator: torch.Generator | None,
        progress: float,
    ) -> LossOutput:
        """Returns the word loss and the accuracy of the words of scenes, of pictures and of imagined classes."""
        pictures, words, weights = batch
        raw = network.features(pictures.pixels)
        half = len(raw) // 2
        again, names = self._imagined(raw[half:], pictures.masks[half:], generator)
        goals = {
            "scenes": (raw[:half], words[:half], weights[:half]),
            "pictures": (raw[half:], words[half:], weights[half:]),
            "imagined": (again, names, torch.ones(names.shape[:2])),
        }
        embeddings = network.model.get_input_embeddings().weight
        losses, metrics = [], {}
        for name, (features, ids, weight) in goals.items():
            with torch.autocast("cpu", torch.bfloat16):
                visual = network.connector((features - network.mean) / network.std)
            loss, metrics[name] = word_loss(visual, ids, weight, embeddings)
            losses.append(loss)
        return LossOutput(torch.stack(losses).mean(), metrics)

    def _imagined(self, raw: Tensor, masks: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Classes in the place of what the pictures show, and the words of their names, at some positions."""
        raw, masks = raw.repeat(_CLASSES_PER_PICTURE, 1, 1), masks.repeat(_CLASSES_PER_PICTURE, 1)
        numbers = torch.randint(len(classes()), (len(raw),), generator=generator)
        strengths = WEAK[0] + (STRONG[1] - WEAK[0]) * torch.rand(len(raw), generator=generator)
        at = torch.randperm(VISUAL_TOKENS, generator=generator)[:_POSITIONS]
        words = np.stack([class_words(classes()[number], self._tokens) for number in numbers.tolist()])
        return self.network.imagine(raw, numbers, strengths, masks)[:, at], torch.from_numpy(words)[:, at]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns loss and accuracies on held-out scenes and pictures."""
        batch = self.batch(list(range(4 * HELD_OUT)), "heldout")
        output = self.loss(self.network, batch, torch.Generator().manual_seed(0), 1.0)
        return {"loss": output.total.item(), **output.metrics}

    def save(self, folder: Path) -> None:
        """Exports nothing: the next stage does."""


def conversation_task(
    network: SmolLlava,
    tokenizer: PreTrainedTokenizerFast,
    library: Sequence[Picture],
    size: float = 1.0,
    seed: int = 0,
) -> ConversationTask:
    """Returns the task of the second stage: connector and norms.

    Args:
        network: whose connector has learnt words.
        tokenizer: of the language model.
        library: named pictures.
        size: factor on the batch sizes.
        seed: of the conversations.
    """
    optimisers = Optimisers([(network.connector, 0.1), (network.model.model.language_model, 1.0)])
    encoded = partial(encode, tokenizer=tokenizer, chat=chat_format())
    sampler = ConversationSampler(encoded, size, conversation_kinds(library), 0.0, seed)
    batch = partial(collate, pad=tokenizer.pad_token_id)
    return ConversationTask(network, optimisers, sampler, batch, partial(export_connector, network, tokenizer))
