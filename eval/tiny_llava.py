"""Accuracy of the embedded vision-language model on held-out scenes: ``python -m mmspec.eval tiny_llava``."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import mmspec
from mmspec.eval.harness.output import Column, benchmark, make_table
from mmspec.vision.training.accuracy import scene_accuracy

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
@click.option("--model", default="tiny-llava", show_default=True, help="Embedded name, folder or hub id.")
@click.option("--scenes", type=click.IntRange(1), default=200, show_default=True, help="Scenes to caption.")
@click.option("--dtype", default="float32", show_default=True, help="As for mmspec.load.")
def main(model: str, scenes: int, dtype: str) -> dict[str, Any]:
    """Print a table of accuracies, then one JSON line."""
    began = time.monotonic()
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    report = scene_accuracy(pipe.model, pipe.hf_processor, scenes)
    Console().print(accuracy_table(report))
    figures = {name: round(value, 4) for name, value in report.items()}
    about = {"model": model, "dtype": dtype, "scenes": scenes, "seconds": round(time.monotonic() - began, 1)}
    return about | figures
