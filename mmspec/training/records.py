"""What a training run tells of itself: a log of figures, the settings that it was begun with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import UserError


def append(log: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a log."""
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def forget(log: Path, step: int) -> None:
    """Drop the rows behind a step: those steps are taken again."""
    lines = log.read_text().splitlines() if log.exists() else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    write(log, "".join(f"{line}\n" for line in kept))


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def refuse_others(folder: Path, begun: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under other settings than those it was begun with.

    Raises:
        UserError: naming the first setting that differs.
    """
    for name in begun:  # settings that a later version has added are not compared
        before, now = (json.dumps(found.get(name)) for found in (begun, settings))
        if before != now:
            raise UserError(
                f"{folder} holds a run with {name} = {before}: expected the same to go on, received {now}; "
                "choose another --out for a new run"
            )


class Tally:
    """Mean loss and figures of the steps since it was last asked."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, dict[str, float]]] = []

    def add(self, loss: Tensor, figures: dict[str, float]) -> None:
        """Count a step; `loss` is a scalar and stays on its device until asked."""
        self._rows.append((loss.detach(), figures))

    def means(self) -> dict[str, float]:
        """The means, the loss under "loss"; begins anew."""
        means = {"loss": torch.stack([loss for loss, _ in self._rows]).mean().item()}
        for name in dict.fromkeys(name for _, figures in self._rows for name in figures):
            values = [figures[name] for _, figures in self._rows if name in figures]
            means[name] = sum(values) / len(values)
        self._rows = []
        return means
