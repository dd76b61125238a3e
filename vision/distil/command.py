"""`mmspec train msd` and `mmspec train flash`: drafters for any target, from conversations that the target has (best)
answered itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import Number
from mmspec.distil.options import DATA, LENGTH, POSITIVE, REPORTS, SHARE, TREES, option_groups

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
        "--start",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Begin from this drafter: its shape, draft vocabulary and weights where nothing else is asked for.",
    ),
    click.option("--decoupled/--no-decoupled", default=None, help="Off: EAGLE, without MSD's paths.  [default: on]"),
    click.option(
        "--visual-states/--no-visual-states",
        default=None,
        help="Visual positions see the target's hidden states too, by a projection of their own.  [default: off]",
    ),
    click.option("--heads", type=click.IntRange(1), help="Of its attention; by default the target's."),
    click.option("--kv-heads", type=click.IntRange(1), help="By default the target's."),
    click.option("--head-dim", type=click.IntRange(2), help="By default the target's."),
    click.option("--mlp", type=click.IntRange(1), help="Inside its MLP; by default the target's."),
)
FLASH = (
    click.option(
        "--slots", type=click.IntRange(1), default=12, show_default=True, help="Tokens per pass; 1 guesses as MSD does."
    ),
    click.option("--latents", type=click.IntRange(0), help="Per image; 0 keeps all visual tokens, as MSD does."),
    click.option("--ratio", type=POSITIVE, default=9.0, show_default=True, help="Or visual tokens per latent."),
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


# What `python -m eval.flash` found best: a tree from one pass. MSD's trees are wider, and take a pass per level.
FLASH_DEFAULTS = {"passes": 1, "top_k": 4, "depth": 12}


@click.command("msd")
@option_groups(DATA, LENGTH, REPORTS, OBJECTIVE, DRAFTER, TREES)
def msd(**given: Any) -> None:
    """Train an MSD drafter: first on text, then on a growing share of images and videos.

    A run that was interrupted goes on when the same command is given again. The drafter comes to lie in OUT/drafter,
    figures in OUT/log.jsonl and OUT/curve.svg. Several devices: `accelerate launch -m vision.distil.command msd
    OPTIONS`.
    """
    from vision.distil.msd import train_msd

    train_msd(given)


@click.command("flash", context_settings={"default_map": FLASH_DEFAULTS})
@option_groups(DATA, LENGTH, REPORTS, OBJECTIVE, DRAFTER, TREES, FLASH)
def flash(**given: Any) -> None:
    """Train a FLASH drafter: as `train msd` does, with latents in place of images and several tokens per pass.

    Each of the two is switched apart: --latents 0 sees all visual tokens, --slots 1 guesses one token per pass. All
    else is as in `train msd`, on several devices too.
    """
    from vision.distil.msd import train_msd
    from vision.drafters.msd import Flash

    train_msd(given, Flash)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
