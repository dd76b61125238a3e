"""`mmspec train tiny-llava --out DIR --minutes N` retrains the embedded vision-language model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mmspec.cli.options import OUT_FOLDER


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
    """Train the embedded vision-language model from scratch, on scenes drawn on the fly.

    The vision tower is trained alone first. Run the same command again to resume an interrupted run from its last
    checkpoint. The model is written to OUT/model, metrics to OUT/log.jsonl, those of the tower to OUT/tower/log.jsonl.
    """
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from mmspec.training.console import train_with_progress
    from mmspec.training.trainer import MODEL
    from vision.training.task import stages

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    for stage, trainer in stages(out, size, minutes=None if steps else minutes, steps=steps):
        if not train_with_progress(trainer, console, stage):
            return
    if scenes:
        console.print(f"evaluating on {scenes} held-out scenes")
        click.echo(json.dumps(_accuracy(out / MODEL, scenes)))


def _accuracy(folder: Path, scenes: int) -> dict[str, float]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmspec.targets.support import from_pretrained
    from vision.training.accuracy import scene_accuracy

    model = from_pretrained(AutoModelForImageTextToText, folder, dtype="float32")
    report = scene_accuracy(model, from_pretrained(AutoProcessor, folder), scenes)
    return {name: round(value, 4) for name, value in report.items()}
