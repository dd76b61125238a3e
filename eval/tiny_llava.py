"""Accuracy of the embedded vision-language model on held-out scenes: ``python -m eval.tiny_llava``."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.harness.output import Column, benchmark, make_table
from mmspec.targets.support import from_pretrained
from vision.embedded import tiny_llava
from vision.training.accuracy import scene_accuracy

GOALS = {"objects": 0.9, "words": 0.8}
"""Accuracies that the model was trained to reach."""


def accuracy_table(report: dict[str, float]) -> Table:
    """One line per figure: shares in percent, token counts as they are."""
    rows = []
    for name, value in report.items():
        shown = f"{value:.1f}" if name.endswith("tokens") else f"{100 * value:.1f} %"
        goal = f"{100 * GOALS[name]:.0f} %" if name in GOALS else ""
        rows.append({"name": name, "shown": shown, "goal": goal})
    columns: list[Column] = [("held-out figure", "{name}"), ("value", "{shown}"), ("goal", "{goal}")]
    return make_table(columns, rows, title="greedy decoding, scenes never trained on")


@benchmark
@click.option("--model", default=None, help="Folder or hub id; the embedded model by default.")
@click.option("--scenes", type=click.IntRange(1), default=200, show_default=True, help="Scenes to caption.")
def main(model: str | None, scenes: int) -> dict[str, Any]:
    """Print a table of accuracies, then one JSON line."""
    folder = model or tiny_llava()
    began = time.monotonic()
    network = from_pretrained(AutoModelForImageTextToText, folder, dtype="float32")
    report = scene_accuracy(network, from_pretrained(AutoProcessor, folder), scenes)
    Console().print(accuracy_table(report))
    figures = {name: round(value, 4) for name, value in report.items()}
    about = {"model": model or "tiny-llava", "scenes": scenes, "seconds": round(time.monotonic() - began, 1)}
    return about | figures


if __name__ == "__main__":
    main()
