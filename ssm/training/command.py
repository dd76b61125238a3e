"""The command that rebuilds the embedded hybrid model: `mmspec train tiny-hybrid --out DIR --minutes N`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import OUT_FOLDER
from mmspec.training.stopping import stoppable


@click.command("tiny-hybrid")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the run.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=75.0, show_default=True, help="Wall-clock budget."
)
@click.option("--steps", type=click.IntRange(1), help="Steps, instead of --minutes.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples per step.")
@click.option("--examples", type=click.IntRange(8), default=120_000, show_default=True, help="To train on.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=4e-3, show_default=True, help="Of learning."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads.")
def tiny_hybrid(
    out: Path, minutes: float, steps: int | None, batch: int, examples: int, rate: float, threads: int
) -> None:
    """Train the embedded Mamba-2 and attention language model from nothing, on texts that the package generates.

    A run that was interrupted goes on where its last checkpoint in --out left it. The model comes to lie in
    OUT/model, figures in OUT/log.jsonl.
    """
    import torch
    from accelerate import Accelerator
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    from mmspec.training.trainer import Trainer
    from ssm.training.task import HybridTask, Lessons

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    duration: dict[str, Any] = {"steps": steps} if steps else {"minutes": minutes}
    plan = Lessons(batch=batch, rate=rate, checkpoint_minutes=3.0, report_minutes=5.0, hold=0.4, **duration)
    settings = {"batch": batch, "rate": rate, "examples": examples}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, stoppable() as stopped:
        shown = bar.add_task("tiny-hybrid", total=1.0, figures="")

        def show(row: dict[str, Any]) -> None:
            bar.update(shown, completed=row["progress"], figures=f"step {row['step']} loss {row['loss']}")

        trainer = Trainer(out, plan, HybridTask(out, examples), Accelerator(cpu=True), settings, show, result="model")
        trainer.train(stop=stopped)
    if not trainer.done:
        click.echo(f"stopped at step {trainer.step}; the same command goes on from here", err=True)
