"""`mmspec train msd` and `flash`: train drafters of any target, best on the target's own answers."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.checks import NOT_NEGATIVE
from mmspec.cli.options import Value
from mmspec.cli.training import (
    DATA,
    LENGTH,
    PASSES,
    POSITIVE,
    REPORTS,
    SHAPE,
    SHARE,
    START,
    TREES,
    option_groups,
    read_layers,
)

LOSSES = (
    click.option(
        "--hidden-weight",
        type=Value(NOT_NEGATIVE),
        default=0.1,
        show_default=True,
        help="Weight of the hidden-state loss.",
    ),
    click.option(
        "--token-weight", type=Value(NOT_NEGATIVE), default=1.0, show_default=True, help="Weight of the token loss."
    ),
    click.option(
        "--noise", type=Value(NOT_NEGATIVE), default=0.1, show_default=True, help="Noise on the input hidden states."
    ),
)
MSD = (
    click.option(
        "--fit",
        is_flag=True,
        help="Initialise by ridge regression of the target's hidden states, unless with --start: for little data.",
    ),
    click.option("--decoupled/--no-decoupled", default=None, help="Off: plain EAGLE.  [default: on]"),
    click.option(
        "--visual-states/--no-visual-states",
        default=None,
        help="Visual positions take the target's hidden states too, by their own projection.  [default: off]",
    ),
    click.option(
        "--hide-visual/--no-hide-visual", default=None, help="Visual positions are not read at all.  [default: off]"
    ),
    click.option(
        "--reads",
        metavar="N,N,...",
        callback=lambda context, option, value: read_layers(value),
        help="Also read the inputs of these layers of the target.  [default: none]",
    ),
    click.option(
        "--norm-output/--no-norm-output", default=None, help="Norm of predicted hidden states.  [default: off]"
    ),
    click.option(
        "--confidence/--no-confidence",
        default=None,
        help="Predict the target's probability of a node's children together.  [default: off]",
    ),
)
FLASH = (
    click.option(
        "--slots", type=click.IntRange(1), default=12, show_default=True, help="Tokens per forward pass; 1 as in MSD."
    ),
    click.option("--latents", type=click.IntRange(0), help="Latents per image; 0 keeps all visual tokens, as in MSD."),
    click.option("--ratio", type=POSITIVE, default=9.0, show_default=True, help="Or visual tokens per latent."),
    click.option(
        "--span",
        type=click.IntRange(1),
        help="Visual tokens per image; longer runs are split. By default that of the target's configuration, or 256.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(0),
        help="Rank of an output layer of their own for the slots after the first; 0: the target's head.  [default: 0]",
    ),
    click.option(
        "--slot-decay",
        type=POSITIVE,
        default=1.0,
        show_default=True,
        help="Weight of a slot to the one before.",
    ),
    click.option(
        "--glancing",
        type=SHARE,
        default=0.0,
        show_default=True,
        help="Share of wrong predictions replaced by the truth, decaying to 0.",
    ),
)


# The best settings of `python -m mmspec.eval flash`: a tree from one pass. MSD's trees are wider and take a pass per
# level.
FLASH_DEFAULTS = {"passes": 1, "top_k": 4, "depth": 12}


@click.command("msd")
@option_groups(DATA, LENGTH, REPORTS, PASSES, LOSSES, START, MSD, SHAPE, TREES)
def msd(**options: Any) -> None:
    """Train an MSD drafter: first on text, then on a growing share of images and videos.

    Run the same command again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to
    OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m mmspec.vision.cli.drafters msd
    OPTIONS`.
    """
    from mmspec.vision.distil.msd import train_msd

    train_msd(options)


@click.command("flash", context_settings={"default_map": FLASH_DEFAULTS})
@option_groups(DATA, LENGTH, REPORTS, PASSES, LOSSES, START, MSD, SHAPE, TREES, FLASH)
def flash(**options: Any) -> None:
    """Train a FLASH drafter: MSD with images compressed to latents and several tokens per forward pass.

    --latents 0 turns off the compression, --slots 1 the semi-autoregression. All else is as in `train msd`.
    """
    from mmspec.vision.distil.msd import train_msd
    from mmspec.vision.drafters.msd.drafter import Flash

    train_msd(options, Flash)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
