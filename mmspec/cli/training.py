"""Options shared by the training commands of drafters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from mmspec import checks
from mmspec.cli.options import OUT_FOLDER, Value
from mmspec.errors import UserError

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
POSITIVE = Value(checks.POSITIVE)
SHARE = Value(checks.SHARE)


def target_option(text: str) -> Callable:
    """Returns the option that names the target model, with this help."""
    names = ("--model", "--target", "target")
    return click.option(*names, default="tiny-llava", show_default=True, metavar="NAME", help=text)


DATA = (
    target_option("Target model."),
    click.option("--text", type=FILE, multiple=True, help="Conversations without media (stage 1); repeatable."),
    click.option("--data", type=FILE, multiple=True, help="Conversations with images or videos; repeatable."),
    click.option("--images", type=FOLDER, help="Folder of the media; by default the folder of each file."),
    click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the run."),
    click.option(
        "--held-out",
        type=Value(checks.NOT_NEGATIVE),
        default=0.02,
        show_default=True,
        help="Held-out conversations: share or number.",
    ),
    click.option(
        "--recorded", type=FOLDER, multiple=True, help="Features that `make-data --record` wrote; repeatable."
    ),
    click.option("--cache", type=OUT_FOLDER, help="Cache the target's features in this folder."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--dtype", default="auto", show_default=True, help="Of the target, as in `mmspec generate`."),
)
LENGTH = (
    click.option("--steps", type=click.IntRange(1), help="Length of the run in optimiser steps."),
    click.option("--minutes", type=POSITIVE, help="Or in minutes of wall clock."),
    click.option("--epochs", type=POSITIVE, help="Or in passes over all data.  [default: 1]"),
    click.option("--text-share", type=SHARE, default=0.3, show_default=True, help="Share of stage 1 in the run."),
    click.option("--batch", type=click.IntRange(1), default=16, show_default=True, help="Over all processes."),
    click.option("--optimiser", type=click.Choice(["muon", "adamw"]), default="muon", show_default=True),
    click.option("--rate", type=POSITIVE, help="Learning rate; by default 3e-3 with muon, 5e-5 with adamw."),
    click.option("--warmup", type=click.IntRange(1), default=50, show_default=True, help="Steps of linear warm-up."),
    click.option("--hold", type=SHARE, default=0.4, show_default=True, help="Share of the run before decay."),
    click.option("--seed", type=click.IntRange(0, 2**22), default=0, show_default=True),
    click.option(
        "--precision",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Of the drafter's forward passes; auto: bfloat16 on GPUs that support it, else float32.",
    ),
    click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads."),
)
REPORTS = (
    click.option("--checkpoint-minutes", type=Value(checks.NOT_NEGATIVE), default=5.0, show_default=True),
    click.option(
        "--report-minutes", type=Value(checks.NOT_NEGATIVE), default=5.0, show_default=True, help="Between evaluations."
    ),
    click.option("--prompts", type=click.IntRange(0), default=8, show_default=True, help="Decoded per evaluation."),
    click.option("--max-new-tokens", type=click.IntRange(2), default=96, show_default=True, help="Per decoded prompt."),
    click.option("--tensorboard", is_flag=True, help="Log to OUT/tensorboard too."),
)
TREES = (
    click.option(
        "--draft-vocabulary",
        type=click.IntRange(1),
        metavar="N",
        help="Draft the N most frequent tokens only.",
    ),
    click.option("--top-k", type=click.IntRange(1), default=10, show_default=True, help="Saved: nodes per tree level."),
    click.option("--depth", type=click.IntRange(1), default=6, show_default=True, help="Saved: tree depth."),
    click.option(
        "--total-tokens",
        type=click.IntRange(1),
        default=59,
        show_default=True,
        help="Saved: maximum tree nodes.",
    ),
)
PASSES = (
    click.option(
        "--passes",
        type=click.IntRange(1),
        default=3,
        show_default=True,
        help="Forward passes over a batch, each fed with the predictions before.",
    ),
    click.option("--decay", type=POSITIVE, default=0.8, show_default=True, help="Weight of a pass to the one before."),
    click.option(
        "--loss",
        type=click.Choice(["kl", "lk"]),
        default="kl",
        show_default=True,
        help="Token loss: cross-entropy, or mixed with the expected acceptance (LK, arXiv 2602.23881).",
    ),
)
START = (
    click.option(
        "--start",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Initialise from this drafter: its settings, draft vocabulary and weights, unless options differ.",
    ),
)
SHAPE = (
    click.option("--heads", type=click.IntRange(1), help="Attention heads; by default the target's."),
    click.option("--kv-heads", type=click.IntRange(1), help="By default the target's."),
    click.option("--head-dim", type=click.IntRange(2), help="By default the target's."),
    click.option("--mlp", type=click.IntRange(1), help="Intermediate size of the MLP; by default the target's."),
)


def read_layers(text: str | None) -> list[int] | None:
    """Layers of a list such as ``2,16,29``.

    Raises:
        UserError: it is none.
    """
    if text is None:
        return None
    numbers = text.split(",")
    if not all(one.isdecimal() for one in numbers):
        raise UserError(f"layers must be numbers as in 2,16,29: got {text}")
    return [int(one) for one in numbers]


def option_groups(*groups: tuple[Callable, ...]) -> Callable:
    """Returns a decorator that adds groups of options to a command, in order."""

    def decorate(function: Callable) -> Callable:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate
