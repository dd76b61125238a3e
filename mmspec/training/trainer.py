"""The training run of a drafter or another model, on one device or many: planned by steps, minutes or epochs,
resumable at any time.

It knows nothing of what it trains: a `Task` brings the network, its examples and its loss.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from mmspec.errors import UserError
from mmspec.training import records
from mmspec.training.curve import draw
from mmspec.training.optimisers import rate
from mmspec.training.order import Order
from mmspec.training.plan import Plan, Task

CHECKPOINT, SETTINGS, LOG, CURVE, DRAFTER = "checkpoint.pt", "settings.json", "log.jsonl", "curve.svg", "drafter"
ROWS = 400
"""Rows of training figures in the log of a whole run."""


class Trainer:
    """A training run in a folder. Making one picks up the folder's checkpoint when there is one.

    Args:
        folder: of the run: `checkpoint.pt`, `settings.json`, `log.jsonl`, `curve.svg` and what `result` names.
        settings: what makes the run what it is, by name; a folder begun with others is refused.
        notify: is given each row of the log, with the run's progress.
        result: subfolder that the task saves to.

    Raises:
        UserError: not one of steps, minutes and epochs, no examples, fewer examples per batch than processes, or a
            folder begun with other settings.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        task: Task,
        accelerator: Accelerator,
        settings: Mapping[str, Any] | None = None,
        notify: Callable[[dict[str, Any]], None] = lambda row: None,
        result: str = DRAFTER,
    ) -> None:
        _check(plan, task, accelerator)
        self.folder, self.plan, self.task, self.accelerator, self.notify = folder, plan, task, accelerator, notify
        self.settings, self.result = json.loads(json.dumps(settings or {})), folder / result
        self.steps = plan.length(task.lengths)
        self.order = Order(task.lengths, plan.batch, plan.seed)
        self.optimisers = plan.optimisers(task.network)
        self.learner = accelerator.prepare(_Learner(task))
        self.step, self.seconds = 0, 0.0
        self._tally = records.Tally()
        self._logged = 0
        if (folder / CHECKPOINT).exists():
            self._resume()
        self._began = time.monotonic() - self.seconds

    @property
    def progress(self) -> float:
        """Share of the run that is behind us."""
        if self.steps is not None:
            return min(1.0, self.step / self.steps)
        assert self.plan.minutes is not None
        return min(1.0, self.seconds / (60 * self.plan.minutes))

    @property
    def done(self) -> bool:
        return self.progress >= 1.0

    def train(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Trains to the end of the plan, or until `stop()` in any process; writes a checkpoint either way."""
        if self.done:
            return
        if self.step == 0:
            self._begin()
        saved = reported = self.seconds
        while not self._asked(stop) and not self.done:
            row = self._learn()
            if self.step == 1 or int(self.progress * ROWS) > self._logged:
                self._log(row | self._tally.means())
            if self.seconds - reported >= 60 * self.plan.report_minutes and not self.done:
                self.report()
                reported = self.seconds
            if self.seconds - saved >= 60 * self.plan.checkpoint_minutes:
                self.save()
                saved = self.seconds
        if self.done:
            self.report()
        self.save()
        self.accelerator.wait_for_everyone()

    def report(self) -> None:
        """Measures on held-out examples, writes the drafter and draws the curve; the first process alone."""
        if not self.accelerator.is_main_process:
            return
        self._log({"event": "held-out", **self.task.held_out()})
        self.task.save(self.result)
        draw([self.folder / LOG], self.folder / CURVE)

    def save(self) -> None:
        """Writes the checkpoint whole or not at all; the first process alone."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "network": self.task.network.state_dict(),
            "optimisers": self.optimisers.state_dict(),
            "order": self.order.state_dict(),
            "step": self.step,
            "seconds": time.monotonic() - self._began,
            "settings": self.settings,
        }
        part = self.folder / (CHECKPOINT + ".part")
        torch.save(state, part)
        os.replace(part, self.folder / CHECKPOINT)

    def _learn(self) -> dict[str, Any]:
        """One step; what to log of it."""
        share = self.plan.share(self.progress, self.task.lengths)
        examples = self.order.next(share)
        batch = self.task.batch(examples[self.accelerator.process_index :: self.accelerator.num_processes])
        loss, figures = self.learner(batch, self._generator(), self.progress)
        self.accelerator.backward(loss * self._weight(batch))
        factor = rate(self.progress, self.step, self.plan.warmup, self.plan.hold)
        self.optimisers.step(factor)
        self._tally.add(loss, figures)
        self.step += 1
        stage = 1 if share == 0.0 else 2
        return {"event": "train", "stage": stage, "share": round(share, 4), "rate": factor * self.plan.rate}

    def _weight(self, batch: Any) -> float | Tensor:
        """Factor on this process's mean loss that makes the mean over processes that of the joint batch."""
        if self.accelerator.num_processes == 1:
            return 1.0
        own = torch.tensor([float(self.task.weight(batch))], device=self.accelerator.device)
        counts = self.accelerator.gather(own)
        return own / counts.mean().clamp(min=1.0)

    def _generator(self) -> torch.Generator:
        """This step's randomness, another in each process."""
        index = self.step * self.accelerator.num_processes + self.accelerator.process_index
        # Of a CPU generator's seed only the low 32 bits count.
        seed = zlib.crc32(f"{self.plan.seed} {index}".encode())
        return torch.Generator(self.accelerator.device).manual_seed(seed)

    def _asked(self, stop: Callable[[], bool]) -> bool:
        """Whether any process was asked to stop. All take the first one's clock."""
        self.seconds = time.monotonic() - self._began
        if self.accelerator.num_processes == 1:
            return stop()
        mine = torch.tensor([[float(stop()), self.seconds]], device=self.accelerator.device)
        said = self.accelerator.gather(mine)
        self.seconds = said[0, 1].item()
        return bool(said[:, 0].any())

    def _begin(self) -> None:
        """A new run: what an earlier one has left without a checkpoint is overwritten."""
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            records.write(self.folder / SETTINGS, json.dumps(self.settings, indent=2) + "\n")
            (self.folder / LOG).unlink(missing_ok=True)
        self.report()

    def _resume(self) -> None:
        state = torch.load(self.folder / CHECKPOINT, weights_only=True, map_location="cpu")
        records.refuse_others(self.folder, state["settings"], self.settings)
        self.task.network.load_state_dict(state["network"])
        self.optimisers.load_state_dict(state["optimisers"])
        self.order.load_state_dict(state["order"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._logged = int(self.progress * ROWS)
        if self.accelerator.is_main_process:
            records.forget(self.folder / LOG, self.step)

    def _log(self, row: dict[str, Any]) -> None:
        """Adds a row to the log, the tracker and what is shown; a loss that is not finite ends the run."""
        self._logged = int(self.progress * ROWS)
        if not math.isfinite(loss := row.get("loss", 0.0)):
            raise UserError(f"the loss must stay finite: {loss} at step {self.step}; try a lower --rate")
        if not self.accelerator.is_main_process:
            return
        figures = {name: float(f"{x:.6g}") for name, x in row.items() if isinstance(x, float)}
        minutes = round((time.monotonic() - self._began) / 60, 3)
        row = {"step": self.step, "minutes": minutes, **row, **figures}
        records.append(self.folder / LOG, row)
        self.accelerator.log({f"{row['event']}/{name}": x for name, x in figures.items()}, step=self.step)
        self.notify({**row, "progress": self.progress})


class _Learner(nn.Module):
    """The network under its loss: what is copied to many devices, so that one forward pass is one step's."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.network = task.network
        self._loss = task.loss

    def forward(self, batch: Any, generator: torch.Generator, progress: float) -> tuple[Tensor, dict[str, float]]:
        losses = self._loss(self.network, batch, generator, progress)
        # Every process must have gradients of everything, also where its batch has no use for a part of the network.
        unused = 0.0 * sum(parameter.sum() for parameter in self.network.parameters())
        return losses.total + unused, losses.figures


def _check(plan: Plan, task: Task, accelerator: Accelerator) -> None:
    given = {name: getattr(plan, name) for name in ("steps", "minutes", "epochs") if getattr(plan, name) is not None}
    if len(given) != 1:
        raise UserError(f"give one of steps, minutes and epochs: received {given or 'none'}")
    if not any(task.lengths.values()):
        raise UserError("training needs at least one conversation beside those held out: received none")
    if plan.batch < accelerator.num_processes:
        raise UserError(f"batch must be at least the {accelerator.num_processes} processes: received {plan.batch}")
    replicated = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in replicated:
        raise UserError(f"the drafter is copied to every device: {accelerator.distributed_type} would split it")
