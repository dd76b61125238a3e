"""Drafter trainer: single- or multi-device, limited by steps or minutes, resumable.

A ``DrafterTask`` provides network, optimisers, examples and loss. On the console, the trainer shows a progress bar and
stops cleanly on SIGINT or SIGTERM.
"""

from __future__ import annotations

import json
import math
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from rich.console import Console
from torch import Tensor, nn

from mmspec import files
from mmspec.errors import UserError
from mmspec.progress import show_progress
from mmspec.training.curve import draw
from mmspec.training.options import Schedule
from mmspec.training.tasks import DrafterTask
from mmspec.workers import on_signals

CHECKPOINT, SETTINGS, LOG, CURVE = "checkpoint.pt", "settings.json", "log.jsonl", "curve.svg"
DRAFTER = "drafter"
LOG_ROWS = 400  # rows of training metrics in the log of a complete run
_REPLICATED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
_STATE = ("network", "optimisers", "order", "step", "seconds", "settings")  # entries of a checkpoint


class Trainer:
    """A training run in a folder: ``checkpoint.pt``, ``settings.json``, ``log.jsonl``, ``curve.svg`` and ``drafter``.
    The constructor resumes from a checkpoint; other ``settings``, JSON values by name, are an error. ``notify`` is
    called with each log row plus the run's ``progress``."""

    def __init__(
        self,
        folder: Path,
        plan: Schedule,
        task: DrafterTask,
        accelerator: Accelerator,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if accelerator.distributed_type not in _REPLICATED:
            raise UserError(f"the network must be replicated on every device: received {accelerator.distributed_type}")
        self.folder, self.plan, self.task, self.accelerator = folder, plan, task, accelerator
        self.notify: Callable[[dict[str, Any]], None] = lambda row: None
        self.settings = json.loads(json.dumps(settings or {}))
        self.loss = accelerator.prepare(_LossModule(task))
        self.step, self.seconds = 0, 0.0
        self._metrics: list[tuple[Tensor, dict[str, float]]] = []  # losses and metrics since the last row of the log
        self._logged = 0
        if (folder / CHECKPOINT).exists():
            self._resume()
        self._start = time.monotonic() - self.seconds

    @property
    def progress(self) -> float:
        """Completed share of the run, from 0 to 1."""
        if self.plan.steps is not None:
            return min(1.0, self.step / self.plan.steps)
        assert self.plan.minutes is not None
        return min(1.0, self.seconds / (60 * self.plan.minutes))

    @property
    def done(self) -> bool:
        return self.progress >= 1.0

    def train(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Train until the plan is complete or ``stop()`` is true in any process, and write a checkpoint."""
        if self.done:
            return
        with files.alone(self.folder / ".lock", self.folder) if self.accelerator.is_main_process else nullcontext():
            self._train(stop)
        self.accelerator.wait_for_everyone()

    def _train(self, stop: Callable[[], bool]) -> None:
        if self.step == 0:
            if self.accelerator.is_main_process:
                files.write_text(self.folder / SETTINGS, json.dumps(self.settings, indent=2) + "\n")
                (self.folder / LOG).unlink(missing_ok=True)  # of an earlier run without a checkpoint
            self.report()
        saved = reported = self.seconds
        while not self._should_stop(stop) and not self.done:
            row = self._train_step()
            if self.step == 1 or int(self.progress * LOG_ROWS) > self._logged:
                self._log(row | mean_metrics(self._metrics))
                self._metrics = []
            if self.seconds - reported >= 60 * self.plan.report_minutes and not self.done:
                self.report()
                reported = self.seconds
            if self.seconds - saved >= 60 * self.plan.checkpoint_minutes:
                self.save()
                saved = self.seconds
        if self.done:
            self.report()
        self.save()

    def report(self) -> None:
        """In the main process, evaluate on held-out examples, save the drafter and plot the curve."""
        if not self.accelerator.is_main_process:
            return
        self._log({"event": "held-out", **self.task.evaluate()})
        self.task.save(self.folder / DRAFTER)
        draw(self.folder / LOG, self.folder / CURVE)

    def save(self) -> None:
        """Write the checkpoint atomically, in the main process."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "network": self.task.network.state_dict(),
            "optimisers": self.task.optimisers.state_dict(),
            "order": self.task.sampler.state_dict(),
            "step": self.step,
            "seconds": time.monotonic() - self._start,
            "settings": self.settings,
        }
        with files.atomic(self.folder / CHECKPOINT) as part, part.open("wb") as file:
            torch.save(state, file)  # with a path, errors would hide a full disk

    def _train_step(self) -> dict[str, Any]:
        """Take one optimiser step; returns its log row without loss and metrics."""
        examples = self.task.sampler.next(self.progress)
        batch = self.task.batch(examples[self.accelerator.process_index :: self.accelerator.num_processes])
        index = self.step * self.accelerator.num_processes + self.accelerator.process_index
        # A CPU generator only uses the low 32 bits of its seed.
        seed = zlib.crc32(f"{self.plan.seed} {index}".encode())
        generator = torch.Generator(self.accelerator.device).manual_seed(seed)
        loss, metrics = self.loss(batch, generator, self.progress)
        self.accelerator.backward(loss * self._loss_weight(batch))
        factor = lr_factor(self.progress, self.step, self.plan.warmup, self.plan.hold)
        self.task.optimisers.step(factor)
        self._metrics.append((loss.detach(), metrics))
        self.step += 1
        return {"event": "train", **self.task.sampler.info, "rate": factor * self.task.optimisers.rate}

    def _loss_weight(self, batch: Any) -> float | Tensor:
        """Weight of this process's mean loss, so that the mean over processes equals the joint batch's loss."""
        if self.accelerator.num_processes == 1:
            return 1.0
        own = torch.tensor([float(self.task.weight(batch))], dtype=torch.float32, device=self.accelerator.device)
        counts = self.accelerator.gather(own)
        return own / counts.mean().clamp(min=1.0)

    def _should_stop(self, stop: Callable[[], bool]) -> bool:
        """Synchronise the clock with the main process; returns whether ``stop()`` is true in any process."""
        self.seconds = time.monotonic() - self._start
        if self.accelerator.num_processes == 1:
            return stop()
        own = torch.tensor([[float(stop()), self.seconds]], dtype=torch.float32, device=self.accelerator.device)
        gathered = self.accelerator.gather(own)
        self.seconds = gathered[0, 1].item()
        return bool(gathered[:, 0].any())

    def _resume(self) -> None:
        state = torch.load(self.folder / CHECKPOINT, weights_only=True, map_location="cpu")
        if missing := [name for name in _STATE if name not in state]:
            raise UserError(
                f"{self.folder} holds a run of another version: expected a checkpoint with {', '.join(_STATE)}, "
                f"received one without {', '.join(missing)}; choose another --out for a new run"
            )
        files.check_settings(self.folder, state["settings"], self.settings)
        self.task.network.load_state_dict(state["network"])
        self.task.optimisers.load_state_dict(state["optimisers"])
        self.task.sampler.load_state_dict(state["order"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._logged = int(self.progress * LOG_ROWS)
        if self.accelerator.is_main_process:
            files.truncate_log(self.folder / LOG, self.step)

    def _log(self, row: dict[str, Any]) -> None:
        """Write a row to the log and the trackers."""
        self._logged = int(self.progress * LOG_ROWS)
        if not math.isfinite(loss := row.get("loss", 0.0)):
            raise UserError(f"the loss must stay finite: {loss} at step {self.step}; try a lower --rate")
        if not self.accelerator.is_main_process:
            return
        metrics = {name: float(f"{x:.6g}") for name, x in row.items() if isinstance(x, float)}
        minutes = round((time.monotonic() - self._start) / 60, 3)
        row = {"step": self.step, "minutes": minutes, **row, **metrics}
        files.append_row(self.folder / LOG, row)
        self.accelerator.log({f"{row['event']}/{name}": x for name, x in metrics.items()}, step=self.step)
        self.notify({**row, "progress": self.progress})


class _LossModule(nn.Module):
    """Network and loss as one module, so that DistributedDataParallel wraps a whole step's forward pass."""

    def __init__(self, task: DrafterTask) -> None:
        super().__init__()
        self.network = task.network
        self._loss = task.loss

    def forward(self, batch: Any, generator: torch.Generator, progress: float) -> tuple[Tensor, dict[str, float]]:
        output = self._loss(self.network, batch, generator, progress)
        # DistributedDataParallel needs gradients of all parameters, unused parameters included.
        unused = 0.0 * sum(parameter.sum() for parameter in self.network.parameters() if parameter.requires_grad)
        return output.total + unused, output.metrics


def lr_factor(progress: float, step: int, warmup: int, hold: float) -> float:
    """Learning-rate factor: linear warm-up over ``warmup`` steps, 1 until progress ``hold``, then linear decay to 0."""
    decay = 1.0 if progress <= hold else max(0.0, (1.0 - progress) / (1.0 - hold))
    return min(1.0, (step + 1) / warmup) * decay


def mean_metrics(steps: Sequence[tuple[Tensor, dict[str, float]]]) -> dict[str, float]:
    """Means of the scalar losses, as "loss", and of each metric over the steps that have it."""
    means = {"loss": torch.stack([loss for loss, _ in steps]).mean().item()}
    for name in dict.fromkeys(name for _, metrics in steps for name in metrics):
        values = [metrics[name] for _, metrics in steps if name in metrics]
        means[name] = sum(values) / len(values)
    return means


def train_with_progress(trainer: Trainer, console: Console) -> bool:
    """Train with a progress bar; returns whether the run is complete. SIGINT and SIGTERM stop the run after the current
    step and its checkpoint."""
    received, shown = list[int](), dict[str, str]()

    def notify(row: dict[str, Any]) -> None:
        """Show a row of the log, with the latest stage, loss and acceptance length."""
        if row["event"] == "train":
            shown.update(stage=f"stage {row['stage']}", loss=f"loss {row['loss']:.3f}")
        if "mean_acceptance_length" in row:
            shown["acceptance"] = f"acceptance {row['mean_acceptance_length']:.2f}"
        bar(row["progress"], 1.0, " ".join([f"step {row['step']}", *shown.values()]))

    stop = on_signals(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM)
    with show_progress(console, "training") as bar, stop:
        trainer.notify = notify
        trainer.train(lambda: bool(received))
    if not trainer.done:
        console.print(f"training stopped at step {trainer.step}; run the same command again to resume", markup=False)
    return trainer.done
