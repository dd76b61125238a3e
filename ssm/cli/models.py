"""`mmspec train tiny-hybrid --out DIR --minutes N` retrains the embedded hybrid model."""

from __future__ import annotations

from pathlib import Path

import click

from mmspec.cli.help import Command
from mmspec.cli.options import derived
from mmspec.distil.options import RunOptions


@click.command("tiny-hybrid", cls=Command)
@derived(RunOptions, "out")
@derived(RunOptions, "minutes", default=75.0, text="Wall-clock budget.")
@derived(RunOptions, "steps", text="Steps, instead of --minutes.")
@derived(RunOptions, "batch", default=32, text="Examples per step.")
@click.option("--examples", type=click.IntRange(8), default=120_000, show_default=True, help="Training examples.")
@derived(RunOptions, "rate", default=4e-3)
@click.option(
    "--recurrent",
    type=click.Choice(["mamba2", "gated-deltanet"]),
    default="mamba2",
    show_default=True,
    help="Recurrent layers: Mamba-2 in a Bamba, or Gated DeltaNet in a smaller Qwen3.5.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    default="bfloat16",
    show_default=True,
    help="Of forward passes. On a CPU without AVX-512, float32 is several times faster.",
)
@derived(RunOptions, "threads")
def tiny_hybrid(
    out: Path,
    minutes: float,
    steps: int | None,
    batch: int,
    examples: int,
    rate: float,
    recurrent: str,
    precision: str,
    threads: int,
) -> None:
    """Train the embedded hybrid language model from scratch, on texts that the package generates.

    Run the same command again to resume an interrupted run from its last checkpoint. The model is written to OUT/model,
    metrics to OUT/log.jsonl.
    """
    import torch
    from accelerate import Accelerator
    from rich.console import Console
    from transformers.utils import logging

    from mmspec.ssm.training.architecture import ARCHITECTURES
    from mmspec.ssm.training.task import HybridTask
    from mmspec.training.plan import TrainingPlan
    from mmspec.training.trainer import MODEL, Trainer, train_with_progress

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    plan = TrainingPlan(steps, None if steps else minutes, checkpoint_minutes=3.0)
    settings = {"batch": batch, "rate": rate, "examples": examples, "recurrent": recurrent, "precision": precision}
    task = HybridTask(out, examples, batch, rate, ARCHITECTURES[recurrent], bfloat16=precision == "bfloat16")
    trainer = Trainer(out, plan, task, Accelerator(cpu=True), settings, MODEL)
    train_with_progress(trainer, Console(stderr=True), "tiny-hybrid")
