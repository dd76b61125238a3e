"""Training tasks of vision-language models, the vision tower alone, then the whole model, and its architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, PreTrainedTokenizerFast

from mmspec.training.embedded import export, folder_tokenizer
from mmspec.training.loss import LossOutput, TokenBatch
from mmspec.training.optimisers import Optimisers
from mmspec.training.plan import TrainingPlan, TrainingTask
from mmspec.training.trainer import CHECKPOINT, MODEL, Trainer
from mmspec.vision.scenes.conversations import DrawnConversation
from mmspec.vision.scenes.scene import seeded
from mmspec.vision.scenes.vocabulary import SIDE, SLOT
from mmspec.vision.training.batches import (
    CONVERSATIONS,
    ConversationSampler,
    EncodedExample,
    collate,
    held_out_examples,
    perception_batch,
)
from mmspec.vision.training.network import TrainedLlava
from mmspec.vision.training.perception import perception_accuracy, perception_loss
from mmspec.vision.training.text import corpus, encode, make_processor, token_ids, train_tokenizer


@dataclass(frozen=True)
class Architecture:
    """Sizes of the model; `context` and `vocabulary` in tokens."""

    width: int = 192
    """Hidden size of both the tower and the language model."""
    tower_layers: int = 4
    tower_heads: int = 6
    tower_mlp: int = 512
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 384
    context: int = 2048
    vocabulary: int = 896


def llava_config(size: Architecture, tokens: dict[str, int]) -> LlavaConfig:
    """Returns the transformers configuration.

    Args:
        size: sizes of the model.
        tokens: ids of the tokens named "bos", "eos", "pad" and "image".
    """
    text = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=tokens["bos"],
        eos_token_id=tokens["eos"],
        pad_token_id=tokens["pad"],
    )
    vision = CLIPVisionConfig(
        hidden_size=size.width,
        intermediate_size=size.tower_mlp,
        num_hidden_layers=size.tower_layers,
        num_attention_heads=size.tower_heads,
        image_size=SIDE,
        patch_size=SLOT,
        projection_dim=size.width,
        hidden_act="gelu_pytorch_tanh",
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokens["image"],
        image_seq_length=(SIDE // SLOT) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )


TOKENIZER_SCENES = 3000
"""Scenes whose conversations, one of each kind, the tokenizer is trained on."""

HELD_OUT = 12
"""Held-out conversations of each kind per evaluation; four times as many scenes for the tower."""

TOWER_SHARE = 0.1
"""Share of a run's minutes in which the tower is trained alone."""


def stages(
    folder: Path,
    size: float = 1.0,
    *,
    minutes: float | None = None,
    steps: tuple[int, int] | None = None,
    checkpoint_minutes: float = 3.0,
    architecture: Architecture | None = None,
) -> Iterator[tuple[str, Trainer]]:
    """Yields the trainers of the two stages by name: "tower", then "language". Train each before taking the next.

    Args:
        folder: of the run. The tower's stage has the subfolder `tower`.
        size: factor on the batch sizes.
        minutes: wall clock of both stages together.
        steps: of each stage, instead of `minutes`.
        checkpoint_minutes: interval between checkpoints.
        architecture: sizes of the model.
    """
    network, tokenizer = _new_network(folder, architecture or Architecture())
    accelerator = Accelerator(cpu=True)

    def trainer(stage: int, task: TrainingTask, folder: Path, share: float, hold: float) -> Trainer:
        plan = TrainingPlan(
            steps=steps[stage] if steps else None,
            minutes=minutes * share if minutes else None,
            hold=hold,
            checkpoint_minutes=checkpoint_minutes,
            report_minutes=8.0,
        )
        return Trainer(folder, plan, task, accelerator, {"size": size}, MODEL)

    if not (folder / CHECKPOINT).exists():
        yield "tower", trainer(0, TowerTask(network, size), folder / "tower", TOWER_SHARE, hold=0.0)
    task = llava_task(network, tokenizer, size)
    yield "language", trainer(1, task, folder, 1.0 - TOWER_SHARE, hold=0.4)


def llava_task(network: TrainedLlava, tokenizer: PreTrainedTokenizerFast, size: float = 1.0) -> ConversationTask:
    """Returns the task of the second stage: tower, connector and language model."""
    model = network.llava.model
    rates = [(model.vision_tower, 0.25), (network.heads, 0.25)]
    rates += [(model.multi_modal_projector, 0.75), (model.language_model, 0.75)]
    sampler = ConversationSampler(partial(encode, tokenizer=tokenizer), size)
    write = partial(export, network.llava, make_processor(tokenizer))
    return ConversationTask(network, Optimisers(rates), sampler, partial(collate, pad=tokenizer.pad_token_id), write)


def _new_network(folder: Path, size: Architecture) -> tuple[TrainedLlava, PreTrainedTokenizerFast]:
    """A network with random weights, and the tokenizer in `folder`, which is trained first if missing."""
    texts = corpus(islice(_examples(), TOKENIZER_SCENES * len(CONVERSATIONS)))
    tokenizer = folder_tokenizer(folder, lambda: train_tokenizer(texts, size.vocabulary))
    torch.manual_seed(0)
    size = replace(size, vocabulary=len(tokenizer))
    return TrainedLlava(llava_config(size, token_ids(tokenizer))), tokenizer


def _examples() -> Iterator[DrawnConversation]:
    """Training conversations, one of each kind per scene index."""
    for index in count():
        rng = seeded("train", index)
        for kind in CONVERSATIONS.values():
            yield kind.make(rng)


class SceneSampler:
    """Samples training scenes by consecutive index."""

    def __init__(self, batch: int) -> None:
        self._batch, self._next = batch, 0
        self.info: dict[str, Any] = {}

    def next(self, progress: float) -> list[int]:
        self._next += self._batch
        return list(range(self._next - self._batch, self._next))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


class TowerTask:
    """Trains the vision tower and its perception heads alone. Implements `mmspec.training.plan.TrainingTask`.

    Args:
        network: the whole model; only the tower and the heads are trained.
        size: factor on the batch size.
    """

    def __init__(self, network: TrainedLlava, size: float = 1.0) -> None:
        self.network = network
        self.optimisers = Optimisers([(network.llava.model.vision_tower, 1.0), (network.heads, 1.0)])
        self.sampler = SceneSampler(max(2, round(48 * size)))

    def batch(self, examples: list[int]) -> tuple[Tensor, Tensor]:
        """Returns pixels (batch, 3, 96, 96) and labels (batch, tasks, patches) of scenes."""
        return perception_batch(examples)

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[0])

    def loss(
        self, network: Any, batch: tuple[Tensor, Tensor], generator: torch.Generator | None, progress: float
    ) -> LossOutput:
        """Returns the perception loss, and the accuracy of each perception task."""
        pixels, labels = batch
        with torch.autocast("cpu", torch.bfloat16):
            logits = network.heads(network.see(pixels))
        return LossOutput(perception_loss(logits, labels), perception_accuracy(logits, labels))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns loss and accuracies on held-out scenes."""
        output = self.loss(self.network, perception_batch(range(4 * HELD_OUT), "heldout"), None, 1.0)
        return {"loss": output.total.item(), **output.metrics}

    def save(self, folder: Path) -> None:
        """Exports nothing: the whole model is trained next."""


class ConversationTask:
    """Trains a model on conversations. Implements `mmspec.training.plan.TrainingTask`.

    Args:
        network: returns the losses of a batch.
        optimisers: of its parameters.
        sampler: of the conversations, of whose kinds held-out ones are evaluated.
        collate: makes a batch of conversations.
        export: writes the trained model to a folder.
    """

    def __init__(
        self,
        network: nn.Module,
        optimisers: Optimisers,
        sampler: ConversationSampler,
        collate: Callable[[list[EncodedExample]], Any],
        export: Callable[[Path], None],
    ) -> None:
        self.network, self.optimisers, self.sampler = network, optimisers, sampler
        self.batch, self.save = collate, export

    def weight(self, batch: TokenBatch) -> int:
        return batch.label_count

    def loss(self, network: Any, batch: TokenBatch, generator: torch.Generator | None, progress: float) -> LossOutput:
        """Returns the network's losses."""
        with torch.autocast("cpu", torch.bfloat16):
            return network(batch)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns loss and next-token accuracy on held-out conversations of each kind, and the mean loss."""
        report = {"loss": 0.0}
        for name, kind in self.sampler.kinds.items():
            batch = self.batch(held_out_examples(kind, self.sampler.encode, HELD_OUT))
            metrics = self.loss(self.network, batch, None, 1.0).metrics
            report["loss"] += metrics["language"] / len(self.sampler.kinds)
            report |= {f"{name} loss": metrics["language"], f"{name} right": metrics["right"]}
        return report
