"""`mmspec train tiny-llava` and `mmspec train smol-llava` train the embedded vision-language models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmspec.checks import whole
from mmspec.cli.help import Command
from mmspec.cli.options import FOLDER, derived, stack
from mmspec.distil.options import RunOptions

if TYPE_CHECKING:
    from mmspec.training.trainer import Trainer


_OPTIONS = stack(
    derived(RunOptions, "out"),
    click.option(
        "--size", type=click.FloatRange(0.05, 8), default=1.0, show_default=True, help="Factor on batch sizes."
    ),
    derived(RunOptions, "threads"),
    click.option("--scenes", type=click.IntRange(0), default=100, show_default=True, help="Held-out scenes evaluated."),
)
"""Options that both commands have."""


@click.command("tiny-llava", cls=Command)
@_OPTIONS
@derived(RunOptions, "minutes", default=107.0, text="Wall-clock budget.")
@click.option("--steps", type=click.IntRange(1), nargs=2, help="Steps of the two stages, instead of --minutes.")
def tiny_llava(out: Path, minutes: float, steps: tuple[int, int] | None, size: float, **rest: Any) -> None:
    """Train the embedded vision-language model from scratch, on scenes drawn on the fly.

    The vision tower is trained alone first. Run the same command again to resume an interrupted run from its last
    checkpoint. The model is written to OUT/model, metrics to OUT/log.jsonl, those of the tower to OUT/tower/log.jsonl.
    """
    from mmspec.vision.training.task import stages

    _train(lambda: stages(out, size, minutes=None if steps else minutes, steps=steps), **rest)


@click.command("smol-llava", cls=Command)
@_OPTIONS
@derived(RunOptions, "minutes", default=100.0, text="Wall-clock budget.")
@click.option("--steps", type=click.IntRange(1), nargs=2, help="Steps of the two stages, instead of --minutes.")
@click.option("--start", type=FOLDER, help="Continue from this trained model, with the last stage only.")
@derived(RunOptions, "seed", rule=whole(0), text="Of the conversations; with --start, take another one.")
@click.option("--emoji", type=FOLDER, help="Pictures named by code points in hexadecimal, to learn from as well.")
@click.option(
    "--fetch", is_flag=True, help="First fetch photographs of packages to learn from, 700 MB, into the cache."
)
@click.option("--compile", is_flag=True, help="Use torch.compile: half the time per step, a minute at the start.")
def smol_llava(
    out: Path,
    minutes: float,
    steps: tuple[int, ...] | None,
    size: float,
    start: Path | None,
    seed: int,
    emoji: Path | None,
    fetch: bool,
    compile: bool,
    **rest: Any,
) -> None:
    """Train a connector between EfficientNet-lite0 and SmolLM2, on pictures of packages and on drawn scenes.

    Both models come from their packages and stay as they are, but for the gains of SmolLM2's norms. What is missing is
    said with the command that installs it. Run the same command again to resume an interrupted run from its last
    checkpoint. Stages have folders in OUT; the model is written to OUT/conversations/model.
    """
    from mmspec.vision.pictures.fetching import fetch as fetch_package
    from mmspec.vision.pictures.fetching import is_fetched
    from mmspec.vision.pictures.library import photograph_packages, pictures
    from mmspec.vision.training.smol import stages

    budget: dict[str, Any] = {"minutes": None if steps else minutes, "steps": steps}
    for package in [one for one in photograph_packages() if fetch and not is_fetched(one)]:
        click.echo(f"fetching {package.name} {package.version} ({package.manager})", err=True)
        fetch_package(package)
    library = pictures(emoji)
    _train(lambda: stages(out, library, size, **budget, start=start, seed=seed, compile=compile), **rest)


def _train(stages: Callable[[], Iterator[tuple[str, Trainer]]], threads: int, scenes: int) -> None:
    """Train all stages, and print the accuracy of the last one's model on held-out scenes."""
    import torch
    from rich.console import Console
    from transformers.utils import logging

    import mmspec
    from mmspec.training.trainer import train_with_progress
    from mmspec.vision.training.accuracy import scene_accuracy

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    for stage, trainer in stages():
        if not train_with_progress(trainer, console, stage):
            return
    if scenes:
        console.print(f"evaluating on {scenes} held-out scenes")
        pipe = mmspec.load(str(trainer.result), drafter=None, dtype="float32")
        report = scene_accuracy(pipe.model, pipe.hf_processor, scenes)
        click.echo(json.dumps({name: round(value, 4) for name, value in report.items()}))
