"""The command that rebuilds the embedded model: `mmspec train tiny-llava --out DIR --minutes N`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import OUT_FOLDER
from mmspec.training.stopping import stoppable


@click.command("tiny-llava")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the run.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=107.0,
    show_default=True,
    help="Wall-clock budget.",
)
@click.option("--steps", type=click.IntRange(1), nargs=2, help="Steps of the two stages, instead of --minutes.")
@click.option("--size", type=click.FloatRange(0.05, 8), default=1.0, show_default=True, help="Factor on batch sizes.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads.")
@click.option("--scenes", type=click.IntRange(0), default=100, show_default=True, help="Held-out scenes at the end.")
def tiny_llava(
    out: Path, minutes: float, steps: tuple[int, int] | None, size: float, threads: int, scenes: int
) -> None:
    """Train the embedded vision-language model from nothing, on scenes drawn on the fly.

    A run that was interrupted goes on where its last checkpoint in --out left it. The model comes to lie in
    OUT/model, figures in OUT/log.jsonl.
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    from vision.training.loop import MODEL, Plan, Run

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    plan = Plan(steps=steps, size=size) if steps else Plan(minutes=minutes, size=size)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar, stoppable() as stopped:
        task = bar.add_task("tower", total=1.0, figures="")

        def show(row: dict[str, Any]) -> None:
            figures = f"step {row['step']} loss {row['loss']}" if "loss" in row else row["event"]
            bar.update(task, description=row["stage"], completed=row.get("progress", 0.0), figures=figures)

        run = Run(out, plan, show)
        run.train(stop=stopped)
    if run.stage != "done":
        click.echo(f"stopped at step {run.step} of stage {run.stage}; the same command goes on from here", err=True)
        return
    if scenes:
        console.print(f"measuring on {scenes} held-out scenes")
        click.echo(json.dumps(_accuracy(out / MODEL, scenes)))


def _accuracy(folder: Path, scenes: int) -> dict[str, float]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmspec.support import from_pretrained
    from vision.training.accuracy import measure

    model = from_pretrained(AutoModelForImageTextToText, folder, dtype="float32")
    report = measure(model, from_pretrained(AutoProcessor, folder), scenes)
    return {name: round(value, 4) for name, value in report.items()}
