"""`mmspec train tiny-hybrid --out DIR --minutes N` retrains the embedded hybrid model."""

from __future__ import annotations

from pathlib import Path

import click

from mmspec.cli.options import OUT_FOLDER


@click.command("tiny-hybrid")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the run.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=75.0, show_default=True, help="Wall-clock budget."
)
@click.option("--steps", type=click.IntRange(1), help="Steps, instead of --minutes.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples per step.")
@click.option("--examples", type=click.IntRange(8), default=120_000, show_default=True, help="Training examples.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=4e-3, show_default=True, help="Learning rate."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads.")
def tiny_hybrid(
    out: Path, minutes: float, steps: int | None, batch: int, examples: int, rate: float, threads: int
) -> None:
    """Train the embedded Mamba-2 and attention language model from scratch, on texts that the package generates.

    Run the same command again to resume an interrupted run from its last checkpoint. The model is written to OUT/model,
    metrics to OUT/log.jsonl.
    """
    import torch
    from accelerate import Accelerator
    from rich.console import Console
    from transformers.utils import logging

    from mmspec.training.console import train_with_progress
    from mmspec.training.plan import TrainingPlan
    from mmspec.training.trainer import MODEL, Trainer
    from ssm.training.task import HybridTask

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    plan = TrainingPlan(steps, None if steps else minutes, checkpoint_minutes=3.0)
    settings = {"batch": batch, "rate": rate, "examples": examples}
    task = HybridTask(out, examples, batch, rate)
    trainer = Trainer(out, plan, task, Accelerator(cpu=True), settings, MODEL)
    train_with_progress(trainer, Console(stderr=True), "tiny-hybrid")
