"""`mmspec train msd` and `mmspec train flash`: drafters for any target, from conversations that the target has (best)
answered itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import Number

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = Number(0, min_open=True)
SHARE = Number(0, 1)

FREE = ("out", "threads", "cache", "device", "checkpoint_minutes", "report_minutes", "tensorboard")
"""Options that may change when a run goes on; all others make it another run."""

DATA = (
    click.option("--target", default="tiny-llava", show_default=True, metavar="NAME", help="The model to draft for."),
    click.option("--text", type=FILE, multiple=True, help="Conversations without media (stage 1); repeatable."),
    click.option("--data", type=FILE, multiple=True, help="Conversations with images or videos; repeatable."),
    click.option("--images", type=FOLDER, help="Folder of the media; by default each file's own."),
    click.option("--out", type=FOLDER, required=True, help="Folder of the run."),
    click.option(
        "--held-out", type=Number(0), default=0.02, show_default=True, help="Not trained on: share or number."
    ),
    click.option("--cache", type=FOLDER, help="Keep the target's features here instead of computing them each time."),
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
OBJECTIVE = (
    click.option(
        "--passes",
        type=click.IntRange(1),
        default=3,
        show_default=True,
        help="Passes over a batch, each fed with the guesses of the one before.",
    ),
    click.option("--decay", type=POSITIVE, default=0.8, show_default=True, help="Weight of a pass to the one before."),
    click.option("--hidden-weight", type=Number(0), default=0.1, show_default=True, help="Of hidden states' distance."),
    click.option("--token-weight", type=Number(0), default=1.0, show_default=True, help="Of tokens' cross-entropy."),
    click.option("--noise", type=Number(0), default=0.1, show_default=True, help="On the states that are read."),
)
DRAFTER = (
    click.option(
        "--decoupled/--no-decoupled", default=True, show_default=True, help="Off: EAGLE, without MSD's paths."
    ),
    click.option(
        "--visual-states/--no-visual-states",
        default=False,
        show_default=True,
        help="Visual positions see the target's hidden states too, by a projection of their own.",
    ),
    click.option("--heads", type=click.IntRange(1), help="Of its attention; by default the target's."),
    click.option("--kv-heads", type=click.IntRange(1), help="By default the target's."),
    click.option("--head-dim", type=click.IntRange(2), help="By default the target's."),
    click.option("--mlp", type=click.IntRange(1), help="Inside its MLP; by default the target's."),
    click.option("--draft-vocabulary", type=click.IntRange(1), metavar="N", help="Draft the N likeliest tokens only."),
    click.option("--top-k", type=click.IntRange(1), default=10, show_default=True, help="Saved: nodes per level."),
    click.option("--depth", type=click.IntRange(1), default=6, show_default=True, help="Saved: levels of its trees."),
    click.option("--total-tokens", type=click.IntRange(1), default=59, show_default=True, help="Saved: nodes at most."),
)
FLASH = (
    click.option(
        "--slots", type=click.IntRange(1), default=4, show_default=True, help="Tokens per pass; 1 guesses as MSD does."
    ),
    click.option("--latents", type=click.IntRange(0), help="Per image; 0 keeps all visual tokens, as MSD does."),
    click.option("--ratio", type=POSITIVE, default=4.0, show_default=True, help="Or visual tokens per latent."),
    click.option(
        "--span",
        type=click.IntRange(1),
        help="Visual tokens of an image: longer runs are several images. By default as the target's configuration "
        "says, else 256.",
    ),
    click.option("--slot-decay", type=POSITIVE, default=1.0, show_default=True, help="Weight of a slot to the last."),
    click.option(
        "--glancing",
        type=SHARE,
        default=0.0,
        show_default=True,
        help="Of wrong guesses: replaced by the truth, falling to 0.",
    ),
)


def _options(*groups: tuple[Callable, ...]) -> Callable:
    def decorate(function: Callable) -> Callable:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


@click.command("msd")
@_options(DATA, LENGTH, REPORTS, OBJECTIVE, DRAFTER)
def msd(**options: Any) -> None:
    """Train an MSD drafter: first on text, then on a growing share of images and videos.

    A run that was interrupted goes on when the same command is given again. The drafter comes to lie in OUT/drafter,
    figures in OUT/log.jsonl and OUT/curve.svg. Several devices: `accelerate launch -m vision.distil.command msd
    OPTIONS`.
    """
    from vision.distil.msd import run

    run(options)


@click.command("flash")
@_options(DATA, LENGTH, REPORTS, OBJECTIVE, DRAFTER, FLASH)
def flash(**options: Any) -> None:
    """Train a FLASH drafter: as `train msd` does, with latents in place of images and several tokens per pass.

    Each of the two is switched apart: --latents 0 sees all visual tokens, --slots 1 guesses one token per pass. All
    else is as in `train msd`, on several devices too.
    """
    from vision.distil.msd import run
    from vision.drafters.msd import Flash

    run(options, Flash)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
