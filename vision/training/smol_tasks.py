"""Training of smol-llava and its export: the connector learns words, then it and the norms learn from conversations.

What packages carry, the weights of tower and language model, is not exported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from mmspec import files
from mmspec.targets.completed import LABELS, PARTS, WEIGHTS
from mmspec.training.embedded import replacing
from mmspec.training.loss import LossOutput
from mmspec.training.optimisers import Optimisers
from mmspec.vision.efficientnet import MEAN, STD, STRIDE
from mmspec.vision.pictures.compose import SIDE, Composed
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
from mmspec.vision.training.smol_network import SmolLlava
from mmspec.vision.training.task import HELD_OUT, ConversationTask, SceneSampler
from mmspec.vision.training.text import ChatFormat, encode, square_processor
from mmspec.vision.training.words import class_words, picture_words, scene_words, word_loss

IMAGE = "<empty_output>"
"""Placeholder of a visual token: a special token of SmolLM2 that texts do not contain."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "\n{% endif %}"
    "{% if part['type'] == 'video' %}{% for frame in range(part.get('num_frames', 8)) %}" + IMAGE + "\n{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


CHAT_FORMAT = ChatFormat(
    image=IMAGE,
    image_tokens=VISUAL_TOKENS,
    start="",
    user="<|im_start|>user\n{images}{text}<|im_end|>\n<|im_start|>assistant\n",
    answer="{text}<|im_end|>",
    between="\n",
)
"""SmolLM2's format of conversations, without a system message."""


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    return square_processor(
        tokenizer,
        SIDE,
        STRIDE,
        MEAN,
        STD,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=0,
    )


def export_connector(network: SmolLlava, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes connector, norms, configuration and processor; tower and language model stay in their packages.

    Args:
        network: the trained model.
        tokenizer: of the language model; not written.
        folder: created if missing; other files in it are kept.
    """
    with replacing(folder) as part:
        make_processor(tokenizer).save_pretrained(part)
        for file in part.glob("tokenizer*"):
            file.unlink()
        config = network.config
        config.architectures, config.dtype = [type(network.model).__name__], torch.float32
        config.text_config.name_or_path = ""  # a folder of this machine
        config.save_pretrained(part)
        gains = "model.language_model."
        weights = {name: x if name.startswith(gains) else x.bfloat16() for name, x in network.folded().items()}
        weights[LABELS] = network.labels.int()
        save_file({name: x.contiguous() for name, x in weights.items()}, part / WEIGHTS, {"format": "pt"})
        files.write_text(part / PARTS, json.dumps({"language_model": "smollm2", "vision_tower": "efficientnet-lite0"}))


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
    """Returns the task of the second stage: connector and norms."""
    optimisers = Optimisers([(network.connector, 0.1), (network.model.model.language_model, 1.0)])
    encoded = partial(encode, tokenizer=tokenizer, chat=CHAT_FORMAT)
    sampler = ConversationSampler(encoded, size, conversation_kinds(library), 0.0, seed)
    batch = partial(collate, pad=tokenizer.pad_token_id)
    return ConversationTask(network, optimisers, sampler, batch, partial(export_connector, network, tokenizer))
