"""Training of smol-llava: a vision tower and a connector for SmolLM2, whose own weights stay as they are.

Three stages: the tower learns attributes while the connector learns words (`mmspec.vision.training.words`); then both
learn from conversations through the language model, first with every other row of visual tokens, then with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mmspec import files, plugins
from mmspec.errors import UserError
from mmspec.targets import gguf
from mmspec.targets.completed import LACKS, WEIGHTS
from mmspec.targets.support import from_pretrained
from mmspec.training.export import replacing
from mmspec.training.loss import LossOutput
from mmspec.training.optimisers import Optimisers
from mmspec.training.plan import TrainingPlan
from mmspec.training.trainer import CHECKPOINT, MODEL, Trainer
from mmspec.vision.scenes.conversations import lists_only, one_image, questions_only, several_images, video, words_only
from mmspec.vision.scenes.vocabulary import SIDE
from mmspec.vision.training.architecture import Architecture, with_tower
from mmspec.vision.training.batches import ConversationKind, perception_scenes, render, to_pixels
from mmspec.vision.training.network import TrainedModel
from mmspec.vision.training.perception import patch_labels, perception_accuracy, perception_loss
from mmspec.vision.training.task import HELD_OUT, ConversationTask, SceneSampler
from mmspec.vision.training.text import ChatFormat, make_processor
from mmspec.vision.training.words import PER_SLOT, patch_words, word_loss

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

TOWER = Architecture(patch=8)
VISUAL_TOKENS = (SIDE // TOWER.patch) ** 2

SHARES = {"tower": 0.15, "half": 0.35, "whole": 0.5}
"""Stages, and their shares of a run's minutes."""

KINDS: dict[str, ConversationKind] = {
    "image": ConversationKind(one_image, 24, 0.5),
    "questions": ConversationKind(questions_only, 24, 0.22),
    "lists": ConversationKind(lists_only, 24, 0.08),
    "several": ConversationKind(several_images, 16, 0.05),
    "video4": ConversationKind(lambda rng: video(rng, 4), 12, 0.08),
    "video8": ConversationKind(lambda rng: video(rng, 8), 6, 0.04),
    "words": ConversationKind(words_only, 24, 0.03),
}


def chat_format(image_tokens: int = VISUAL_TOKENS) -> ChatFormat:
    """Returns SmolLM2's format of conversations, without a system message."""
    return ChatFormat(
        image=IMAGE,
        image_tokens=image_tokens,
        start="",
        user="<|im_start|>user\n{images}{text}<|im_end|>\n<|im_start|>assistant\n",
        answer="{text}<|im_end|>",
        between="\n",
    )


class SmolLlava(TrainedModel):
    """A LLaVA model around a language model of which the gains of its norms are trained, and nothing else.

    Only what is trained is in its `state_dict()`. Tuning the norms adapts a language model to images about as well as
    low-rank updates of its matrices do (Zhao et al., 2312.11420), and leaves the matrices as they were quantised.

    Args:
        language: a causal language model.
        image_token: id of the placeholder of visual tokens.
        tower: sizes of the vision tower.
    """

    def __init__(self, language: Any, image_token: int, tower: Architecture = TOWER) -> None:
        config = with_tower(tower, language.config, image_token)
        with torch.device("meta"):
            llava: Any = LlavaForConditionalGeneration(config)
        for name in ("vision_tower", "multi_modal_projector"):
            part = getattr(llava.model, name)
            setattr(llava.model, name, type(part)(part.config if name == "vision_tower" else config))
        llava.model.language_model, llava.lm_head = language.model, language.lm_head
        language.requires_grad_(False)
        for name, gain in language.named_parameters():
            if name.endswith("norm.weight"):
                gain.data = gain.data.float()  # in bfloat16, small steps would be lost
                gain.requires_grad_()
        super().__init__(llava, config)

    @property
    def connector(self) -> nn.Module:
        return self.llava.model.multi_modal_projector

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the tensors that are trained."""
        state, trained = super().state_dict(*args, **kwargs), self.trained()
        return {name: x for name, x in state.items() if name in trained}

    def trained(self) -> set[str]:
        """Returns the names of the parameters that are trained."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def restore(self, folder: Path) -> None:
        """Loads what `export_connector` wrote. Perception heads keep their weights.

        Raises:
            UserError: the folder holds no such model.
        """
        file = folder / WEIGHTS
        state = {f"llava.{name}": x for name, x in load_file(file).items()} if file.is_file() else {}
        if missing := sorted(name for name in self.trained() - set(state) if not name.startswith("heads.")):
            raise UserError(f"--start must be a model that this command trained: {file} lacks {missing[0]}")
        self.load_state_dict(state)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        """Restores a `state_dict()`."""
        return super().load_state_dict({**super().state_dict(), **state}, strict, assign)


class WordsTask:
    """Trains tower, heads and connector on single scenes. Implements `mmspec.training.plan.TrainingTask`.

    Args:
        network: only the language model's embeddings are used besides what is trained.
        tokenizer: of the language model.
        size: factor on the batch size.
    """

    def __init__(self, network: SmolLlava, tokenizer: PreTrainedTokenizerFast, size: float = 1.0) -> None:
        self.network, self.tokenizer = network, tokenizer
        trained = (network.llava.model.vision_tower, network.heads, network.connector)
        self.optimisers = Optimisers([(part, 1.0) for part in trained])
        self.sampler = SceneSampler(max(2, round(48 * size)))
        self._ids: dict[str, list[int]] = {}

    def batch(self, examples: list[int], split: str = "train") -> tuple[Tensor, ...]:
        """Returns pixels (batch, 3, 96, 96), labels (batch, tasks, 144), words and their weights (batch, 144)."""
        images, labels, words, weights = [], [], [], []
        for scene, signs, rng in perception_scenes(examples, split):
            images.append(render(scene, rng, signs))
            labels.append(patch_labels(scene, signs, PER_SLOT))
            word, weight = patch_words(scene, signs, self._tokens)
            words.append(word)
            weights.append(weight)
        return to_pixels(images), *(torch.from_numpy(np.stack(rows)) for rows in (labels, words, weights))

    def _tokens(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._ids[text]

    def weight(self, batch: tuple[Tensor, ...]) -> int:
        """Returns the number of scenes."""
        return len(batch[0])

    def loss(
        self, network: Any, batch: tuple[Tensor, ...], generator: torch.Generator | None, progress: float
    ) -> LossOutput:
        """Returns perception plus word loss, and the accuracy of each perception task and of the words."""
        pixels, labels, words, weights = batch
        with torch.autocast("cpu", torch.bfloat16):
            features = network.see(pixels)
            logits, visual = network.heads(features), network.connector(features)
        embeddings = network.llava.get_input_embeddings().weight
        loss, right = word_loss(visual, words, weights, embeddings)
        metrics = {"distance": loss.item(), "words": right, **perception_accuracy(logits, labels)}
        return LossOutput(perception_loss(logits, labels) + loss, metrics)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns loss and accuracies on held-out scenes."""
        batch = self.batch(list(range(4 * HELD_OUT)), "heldout")
        output = self.loss(self.network, batch, None, 1.0)
        return {"loss": output.total.item(), **output.metrics}

    def save(self, folder: Path) -> None:
        """Exports nothing: later stages do."""


def language_model() -> tuple[Any, PreTrainedTokenizerFast]:
    """Returns SmolLM2 from its package in bfloat16, and its tokenizer."""
    folder = gguf.resolved(plugins.smollm2())
    model = from_pretrained(AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    return model.eval(), from_pretrained(AutoTokenizer, folder)


def stages(
    folder: Path,
    size: float = 1.0,
    *,
    minutes: float | None = None,
    steps: tuple[int, ...] | None = None,
    checkpoint_minutes: float = 4.0,
    start: Path | None = None,
    seed: int = 0,
    compile: bool = False,
    language: tuple[Any, PreTrainedTokenizerFast] | None = None,
) -> Iterator[tuple[str, Trainer]]:
    """Yields the trainers of the stages by name. Train each before taking the next.

    Args:
        folder: of the run. The first two stages have subfolders.
        size: factor on the batch sizes.
        minutes: wall clock of all stages together.
        steps: of each stage, instead of `minutes`.
        checkpoint_minutes: interval between checkpoints.
        start: folder of a trained model to continue from, with the last stage only.
        seed: of the conversations. A run that continues from another one takes another seed, to see others.
        compile: run the language model's layers through `torch.compile`.
        language: model and tokenizer; by default SmolLM2 from its package.
    """
    model, tokenizer = language or language_model()
    torch.manual_seed(0)
    network = SmolLlava(model, tokenizer.get_vocab()[IMAGE])
    if start:
        network.restore(start)
    if compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    accelerator = Accelerator(cpu=True)

    def task(stage: str) -> Any:
        if stage == "tower":
            return WordsTask(network, tokenizer, size)
        tokens = VISUAL_TOKENS // 2 if stage == "half" else VISUAL_TOKENS
        export = partial(export_connector, network, tokenizer)
        chat = chat_format(tokens)
        rates = {"tower": 0.02, "connector": 0.5, "language": 1.0}
        return ConversationTask(network, rates, tokenizer, export, size, chat, KINDS, PER_SLOT, start is not None, seed)

    shares = {"whole": 1.0} if start else SHARES
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
            report_minutes=25.0,
        )
        yield stage, Trainer(folder / stage, plan, task(stage), accelerator, settings, MODEL)


def export_connector(network: SmolLlava, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tower, connector, configuration and processor; the language model stays in its package.

    Args:
        network: the trained model.
        tokenizer: of the language model; not written.
        folder: created if missing; other files in it are kept.
    """
    with replacing(folder) as part:
        make_processor(tokenizer, TOWER.patch, CHAT_TEMPLATE, IMAGE).save_pretrained(part)
        for file in part.glob("tokenizer*"):
            file.unlink()
        config = network.llava.config
        config.architectures, config.dtype = [type(network.llava).__name__], torch.float32
        config.text_config.name_or_path = ""  # a folder of this machine
        config.save_pretrained(part)
        state = {name.removeprefix("llava."): x for name, x in network.state_dict().items() if "heads." not in name}
        gains = "model.language_model."
        weights = {name: x if name.startswith(gains) else x.bfloat16() for name, x in state.items()}
        save_file(weights, part / WEIGHTS, {"format": "pt"})
        files.write_text(part / LACKS, json.dumps({"name": "smollm2"}))
