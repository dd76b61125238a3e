"""Training of smol-llava: a connector between EfficientNet-lite0 and SmolLM2, whose own weights stay as they are.

Two stages: the connector learns words (`mmspec.vision.training.words`); then it and the gains of the norms in the
language model learn from conversations about drawn scenes and about pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mmspec import plugins
from mmspec.targets import gguf
from mmspec.targets.support import from_pretrained
from mmspec.training.plan import TrainingPlan
from mmspec.training.trainer import CHECKPOINT, MODEL, Trainer
from mmspec.vision.pictures.conversations import Pictures
from mmspec.vision.pictures.library import Picture
from mmspec.vision.pictures.nouns import classes
from mmspec.vision.scenes.scene import seeded
from mmspec.vision.training.batches import perception_scenes, render
from mmspec.vision.training.picture_batches import enlarged, to_pixels
from mmspec.vision.training.smol_network import SmolLlava
from mmspec.vision.training.smol_tasks import IMAGE, WordsTask, conversation_task
from mmspec.vision.training.words import phrase

SHARES = {"words": 0.1, "conversations": 0.9}
"""Stages, and their shares of a run's minutes."""

_STATISTICS = 768
"""Pictures from which means and covariances of features are taken."""


def language_model() -> tuple[Any, PreTrainedTokenizerFast]:
    """Returns SmolLM2 from its package in bfloat16, and its tokenizer."""
    folder = gguf.resolved(plugins.smollm2())
    model = from_pretrained(AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    return model.eval(), from_pretrained(AutoTokenizer, folder)


def statistics_pictures(library: Sequence[Picture], count: int = _STATISTICS) -> Tensor:
    """Returns the pixels of composed pictures and of drawn scenes, (4 / 3 of count, 3, 192, 192)."""
    pictures = Pictures(library)
    images = [pictures.one(seeded("train", index)).scenes[0].draw() for index in range(count)]
    images += [enlarged(render(scene, rng, signs)) for scene, signs, rng in perception_scenes(range(count // 3))]
    return to_pixels(images)


def class_labels(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Returns the tokens of the classes' phrases, (classes, 4)."""
    token = partial(tokenizer.encode, add_special_tokens=False)
    return torch.from_numpy(np.stack([phrase(noun, token) for noun in classes()]))


def stages(
    folder: Path,
    library: Sequence[Picture],
    size: float = 1.0,
    *,
    minutes: float | None = None,
    steps: tuple[int, ...] | None = None,
    checkpoint_minutes: float = 4.0,
    start: Path | None = None,
    seed: int = 0,
    compile: bool = False,
    language: tuple[Any, PreTrainedTokenizerFast] | None = None,
    tower: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Trainer]]:
    """Yields the trainers of the stages by name. Train each before taking the next.

    Args:
        folder: of the run. The stages have subfolders.
        library: named pictures.
        size: factor on the batch sizes, and on the number of pictures that statistics are taken of.
        minutes: wall clock of all stages together.
        steps: of each stage, instead of `minutes`.
        checkpoint_minutes: interval between checkpoints.
        start: folder of a trained model to continue from, with the last stage only.
        seed: of the conversations. A run that continues from another one takes another seed, to see others.
        compile: run the language model's layers through `torch.compile`.
        language: model and tokenizer; by default SmolLM2 from its package.
        tower: weights of the tower and its classifier; by default those of the package.
    """
    model, tokenizer = language or language_model()
    torch.manual_seed(0)
    sample = statistics_pictures(library, max(round(_STATISTICS * min(size, 1.0)), 12))
    network = SmolLlava(model, tokenizer.get_vocab()[IMAGE], class_labels(tokenizer), sample, tower)
    if start:
        network.restore(start)
    if compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    accelerator = Accelerator(cpu=True)
    shares = {"conversations": 1.0} if start else SHARES
    settings = {"size": size, **({"start": str(start)} if start else {}), **({"seed": seed} if seed else {})}
    done = [(folder / stage / CHECKPOINT).exists() for stage in shares]
    for index, (stage, share) in enumerate(shares.items()):
        if any(done[index + 1 :]):
            continue
        plan = TrainingPlan(
            steps=steps[list(SHARES).index(stage)] if steps else None,
            minutes=minutes * share if minutes else None,
            warmup=20,
            hold=0.3,
            checkpoint_minutes=checkpoint_minutes,
            report_minutes=15.0,
        )
        task: Any = WordsTask(network, tokenizer, library, size)
        if stage == "conversations":
            task = conversation_task(network, tokenizer, library, size, seed)
        yield stage, Trainer(folder / stage, plan, task, accelerator, settings, MODEL)
