"""Accuracy of the embedded vision-language model on held-out scenes: `python -m eval.tiny_llava`."""

from __future__ import annotations

import json
import time

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmspec.support import from_pretrained
from vision.embedded import tiny_llava
from vision.training.accuracy import scene_accuracy

GOALS = {"objects": 0.9, "words": 0.8}
"""What the model was built to reach."""


def table(report: dict[str, float]) -> Table:
    """The figures as a table: shares in percent, other figures as they are."""
    view = Table("held-out figure", "value", "goal", title="greedy decoding, scenes never trained on")
    for name, value in report.items():
        shown = f"{value:.1f}" if name.endswith("tokens") else f"{100 * value:.1f} %"
        goal = f"{100 * GOALS[name]:.0f} %" if name in GOALS else ""
        view.add_row(name, shown, goal)
    return view


@click.command()
@click.option("--model", default=None, help="Folder or hub id; the embedded model by default.")
@click.option("--scenes", type=click.IntRange(1), default=200, show_default=True, help="Scenes to caption.")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads; torch's choice by default.")
def main(model: str | None, scenes: int, threads: int | None) -> None:
    """Print a table of what the model gets right, then the same as one JSON line."""
    if threads:
        torch.set_num_threads(threads)
    folder = model or tiny_llava()
    began = time.monotonic()
    network = from_pretrained(AutoModelForImageTextToText, folder, dtype="float32")
    report = scene_accuracy(network, from_pretrained(AutoProcessor, folder), scenes)
    Console().print(table(report))
    figures = {name: round(value, 4) for name, value in report.items()}
    click.echo(
        json.dumps(
            {"model": model or "tiny-llava", "scenes": scenes, "seconds": round(time.monotonic() - began, 1), **figures}
        )
    )


if __name__ == "__main__":
    main()
