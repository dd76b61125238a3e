"""The training run: first the tower alone, then everything; planned by minutes or by steps, resumable at any time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from mmspec.training.export import export
from mmspec.training.optimisers import Optimisers, rate
from vision.scenes.conversations import Example
from vision.scenes.scene import seeded
from vision.training.architecture import Architecture, llava_config
from vision.training.batches import (
    ALL_LESSONS,
    FIRST_LESSONS,
    POOL,
    Kind,
    Lessons,
    held_out_batch,
    perception_batch,
)
from vision.training.network import Network
from vision.training.perception import perception_accuracy, perception_loss
from vision.training.stages import language_optimisers, tower_optimisers
from vision.training.text import corpus, make_processor, token_ids, train_tokenizer

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
MODEL = "model"

STAGES = ("tower", "language")


@dataclass(frozen=True)
class Plan:
    """How long to train and on how much at a time. Exactly one of `minutes` and `steps` is given."""

    minutes: float | None = None
    """Wall-clock budget of the whole run, earlier parts of a resumed run included."""
    steps: tuple[int, int] | None = None
    """Steps of the two stages; makes a run exactly repeatable."""
    tower_share: float = 0.1
    """Share of the minutes that the tower trains alone."""
    first_share: float = 0.08
    """Share of the language stage with short lists before everything else."""
    size: float = 1.0
    """Factor on the batch sizes."""
    checkpoint_minutes: float = 3.0
    report_minutes: float = 0.5
    export_minutes: float = 8.0
    architecture: Architecture = field(default_factory=Architecture)


class Run:
    """A training run in a folder. Making one picks up the folder's checkpoint when there is one."""

    def __init__(self, folder: Path, plan: Plan, notify: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        if (plan.minutes is None) == (plan.steps is None):
            raise ValueError(f"give minutes or steps: received minutes={plan.minutes}, steps={plan.steps}")
        self.folder, self.plan, self.notify = folder, plan, notify
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer()
        torch.manual_seed(0)
        self.network = Network(llava_config(self._architecture(), token_ids(self.tokenizer)))
        self.lessons = Lessons(self.tokenizer)
        self.stage = STAGES[0]
        self.step = 0
        self.elapsed = 0.0
        self.optimisers: Optimisers = tower_optimisers(self.network)
        if (folder / CHECKPOINT).exists():
            self._load(folder / CHECKPOINT)

    def train(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Trains to the end of the plan, or until `stop()`; then writes a checkpoint, and the model if at the end."""
        clock = _Clock(self.elapsed)
        saved = reported = exported = self.elapsed
        while self.stage != "done" and not stop():
            self.elapsed = clock.seconds()
            progress = self._progress()
            if progress >= 1.0:
                self._next_stage()
                continue
            row = self._tower_step(progress) if self.stage == "tower" else self._language_step(progress)
            self.step += 1
            self.elapsed = clock.seconds()
            if self.elapsed - reported > 60 * self.plan.report_minutes:
                reported = self.elapsed
                self._report(row | {"progress": progress})
            if self.elapsed - saved > 60 * self.plan.checkpoint_minutes:
                saved = self.elapsed
                self.save()
            if self.elapsed - exported > 60 * self.plan.export_minutes and self.stage == "language":
                exported = self.elapsed
                self._report(self.held_out())
                self.export(self.folder / MODEL)
        self.save()
        if self.stage == "done":
            self.export(self.folder / MODEL)

    def export(self, folder: Path) -> None:
        """Writes the model in the layout that transformers loads."""
        export(self.network.llava, make_processor(self.tokenizer), folder)

    @torch.no_grad()
    def held_out(self) -> dict[str, Any]:
        """Loss and share of next tokens guessed right on held-out examples of every kind."""
        row: dict[str, Any] = {"event": "held-out"}
        for name in ALL_LESSONS:
            with torch.autocast("cpu", torch.bfloat16):
                losses = self.network(held_out_batch(name, self.tokenizer, 12), 0.0)
            row[name] = {"loss": round(losses.language, 4), "right": round(losses.right / max(losses.labels, 1), 4)}
        return row

    def save(self) -> None:
        """Writes the checkpoint whole or not at all."""
        state = {
            "network": self.network.state_dict(),
            "optimisers": self.optimisers.state_dict(),
            "stage": self.stage,
            "step": self.step,
            "elapsed": self.elapsed,
        }
        temporary = self.folder / (CHECKPOINT + ".part")
        torch.save(state, temporary)
        os.replace(temporary, self.folder / CHECKPOINT)

    def _load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.stage, self.step, self.elapsed = state["stage"], state["step"], state["elapsed"]
        if self.stage != "tower":
            self.optimisers = language_optimisers(self.network)
        if state["optimisers"]:
            self.optimisers.load_state_dict(state["optimisers"])

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """The folder's tokenizer, trained first when it has none."""
        path = self.folder / "tokenizer"
        if not path.exists():
            texts = corpus(_examples(3000))
            trained = train_tokenizer(texts, self.plan.architecture.vocabulary)
            temporary = self.folder / "tokenizer.part"
            trained.save_pretrained(temporary)
            os.replace(temporary, path)
        return PreTrainedTokenizerFast.from_pretrained(path)

    def _architecture(self) -> Architecture:
        fields = self.plan.architecture.__dict__ | {"vocabulary": len(self.tokenizer)}
        return Architecture(**fields)

    def _progress(self) -> float:
        """Share of the current stage that is behind us."""
        index = STAGES.index(self.stage)
        if self.plan.steps is not None:
            return self.step / max(self.plan.steps[index], 1)
        assert self.plan.minutes is not None
        budget = 60 * self.plan.minutes
        change = budget * self.plan.tower_share
        return self.elapsed / change if index == 0 else (self.elapsed - change) / (budget - change)

    def _next_stage(self) -> None:
        self._report({"event": "end of stage"})
        if self.stage == "tower":
            self.stage, self.step = "language", 0
            self.optimisers = language_optimisers(self.network)
        else:
            self.stage = "done"
        self.save()

    def _tower_step(self, progress: float) -> dict[str, Any]:
        pixels, labels = perception_batch(self.step, max(2, round(48 * self.plan.size)))
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network.heads(self.network.see(pixels))
        loss = perception_loss(logits, labels)
        loss.backward()
        self.optimisers.step(rate(progress, self.step, warmup=50, hold=0.0))
        right = {name: round(share, 4) for name, share in perception_accuracy(logits, labels).items()}
        return {"event": "tower", "loss": round(loss.item(), 4), "right": right}

    def _language_step(self, progress: float) -> dict[str, Any]:
        batch = self.lessons.batch(self.step, *self._lesson(progress))
        with torch.autocast("cpu", torch.bfloat16):
            losses = self.network(batch, perception_weight=0.1)
        losses.total.backward()
        self.optimisers.step(rate(progress, self.step, warmup=50, hold=0.4))
        return {
            "event": "language",
            "kind": batch.kind,
            "loss": round(losses.language, 4),
            "perception": round(losses.perception, 4),
            "right": round(losses.right / max(losses.labels, 1), 4),
        }

    def _lesson(self, progress: float) -> tuple[dict[str, Kind], float]:
        """What to teach at this stage of progress, and the factor on the batch sizes: larger as the loss falls."""
        if self.plan.steps is not None:
            # A pool of batches belongs to its first step, also when a run is resumed within it.
            progress = (self.step - self.step % POOL) / self.plan.steps[1]
        if progress < self.plan.first_share:
            return FIRST_LESSONS, 0.5 * self.plan.size
        return ALL_LESSONS, (0.75 if progress < 0.6 else 1.0) * self.plan.size

    def _report(self, row: dict[str, Any]) -> None:
        row = {"stage": self.stage, "step": self.step, "minutes": round(self.elapsed / 60, 2), **row}
        with (self.folder / LOG).open("a") as log:
            log.write(json.dumps(row) + "\n")
        self.notify(row)


class _Clock:
    """Seconds of training so far, those of earlier parts of the run included."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before

    def seconds(self) -> float:
        return time.monotonic() - self._start


def _examples(count: int) -> islice[Example]:
    """Training examples of every kind, for the tokenizer."""

    def every() -> Any:
        index = 0
        while True:
            rng = seeded("train", index)
            for kind in ALL_LESSONS.values():
                yield kind.make(rng)
            index += 1

    return islice(every(), count * len(ALL_LESSONS))
