"""Options that the training commands of drafters share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from mmspec.cli.options import OUT_FOLDER, Number

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
POSITIVE = Number(0, min_open=True)
SHARE = Number(0, 1)

FREE = ("out", "threads", "cache", "device", "checkpoint_minutes", "report_minutes", "tensorboard")
"""Options that may change when a run goes on; all others make it another run."""

DATA = (
    click.option(
        "--model",
        "--target",
        "target",
        default="tiny-llava",
        show_default=True,
        metavar="NAME",
        help="The model to draft for.",
    ),
    click.option("--text", type=FILE, multiple=True, help="Conversations without media (stage 1); repeatable."),
    click.option("--data", type=FILE, multiple=True, help="Conversations with images or videos; repeatable."),
    click.option("--images", type=FOLDER, help="Folder of the media; by default each file's own."),
    click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the run."),
    click.option(
        "--held-out", type=Number(0), default=0.02, show_default=True, help="Not trained on: share or number."
    ),
    click.option("--cache", type=OUT_FOLDER, help="Keep the target's features here between runs."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--dtype", default="auto", show_default=True, help="Of the target: as in `mmspec generate`."),
)
LENGTH = (
    click.option("--steps", type=click.IntRange(1), help="Length of the run."),
    click.option("--minutes", type=POSITIVE, help="Or its wall clock."),
    click.option("--epochs", type=POSITIVE, help="Or how often to see all data; 1 where nothing is given."),
    click.option("--text-share", type=SHARE, default=0.3, show_default=True, help="Of the run: stage 1."),
    click.option("--batch", type=click.IntRange(1), default=16, show_default=True, help="Over all processes."),
    click.option("--optimiser", type=click.Choice(["muon", "adamw"]), default="muon", show_default=True),
    click.option("--rate", type=POSITIVE, help="Learning rate; by default 3e-3 with muon, 5e-5 with adamw."),
    click.option("--warmup", type=click.IntRange(1), default=50, show_default=True, help="Steps of rising rate."),
    click.option("--hold", type=SHARE, default=0.4, show_default=True, help="Share before the rate falls to zero."),
    click.option("--seed", type=click.IntRange(0, 2**22), default=0, show_default=True),
    click.option(
        "--precision",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Of the drafter's passes; auto: bfloat16 on a GPU that has it, else float32.",
    ),
    click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads."),
)
REPORTS = (
    click.option("--checkpoint-minutes", type=Number(0), default=5.0, show_default=True),
    click.option("--report-minutes", type=Number(0), default=5.0, show_default=True, help="Between held-out reports."),
    click.option("--prompts", type=click.IntRange(0), default=8, show_default=True, help="Decoded in each report."),
    click.option("--max-new-tokens", type=click.IntRange(2), default=96, show_default=True, help="Of each of them."),
    click.option("--tensorboard", is_flag=True, help="Log to OUT/tensorboard too."),
)
TREES = (
    click.option("--draft-vocabulary", type=click.IntRange(1), metavar="N", help="Draft the N likeliest tokens only."),
    click.option("--top-k", type=click.IntRange(1), default=10, show_default=True, help="Saved: nodes per level."),
    click.option("--depth", type=click.IntRange(1), default=6, show_default=True, help="Saved: levels of its trees."),
    click.option("--total-tokens", type=click.IntRange(1), default=59, show_default=True, help="Saved: nodes at most."),
)


def options(*groups: tuple[Callable, ...]) -> Callable:
    """A decorator that adds groups of options to a command, in their order."""

    def decorate(function: Callable) -> Callable:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate
