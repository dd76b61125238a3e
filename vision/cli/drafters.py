"""`mmspec train msd`, `flash` and `eagle3`: train drafters of any target, best on the target's own answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import Number
from mmspec.cli.training import DATA, LENGTH, POSITIVE, REPORTS, SHARE, TREES, option_groups
from mmspec.errors import UserError


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
LOSSES = (
    click.option(
        "--hidden-weight",
        type=Number(0),
        default=0.1,
        show_default=True,
        help="Weight of the hidden-state loss.",
    ),
    click.option("--token-weight", type=Number(0), default=1.0, show_default=True, help="Weight of the token loss."),
    click.option("--noise", type=Number(0), default=0.1, show_default=True, help="Noise on the input hidden states."),
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


EAGLE3 = (
    click.option("--layers", type=click.IntRange(1), help="Decoder layers of the head.  [default: 1]"),
    click.option(
        "--reads",
        metavar="N,N,N",
        callback=lambda context, option, value: read_layers(value),
        help="Layers of the target whose inputs the head reads; by default 2, L/2 and L-3 of L.",
    ),
    click.option("--outputs/--inputs", default=None, help="Read the outputs of these layers.  [default: inputs]"),
    *(
        click.option(f"--{name}/--no-{name}", default=None, help=text)
        for name, text in (
            ("norm-before-residual", "The residual of the first layer is the normed state.  [default: off]"),
            ("norm-before-fc", "Norm of the states that are read, together.  [default: off]"),
            ("fc-norm", "Norm of each of them (EAGLE-3.1).  [default: on, unless they are normed together]"),
            ("norm-output", "Feed normed states to the next level (EAGLE-3.1).  [default: on]"),
        )
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
    from mmspec.vision.drafters.msd import Flash

    train_msd(options, Flash)


@click.command("eagle3", context_settings={"default_map": {"passes": 5, "depth": 8}})
@option_groups(DATA, LENGTH, REPORTS, PASSES, START, EAGLE3, SHAPE, TREES)
def eagle3(**options: Any) -> None:
    """Train an EAGLE-3 head, which reads several layers of the target, over several self-fed steps.

    Image positions are placeholder tokens to it. All else is as in `train msd`.
    """
    from mmspec.vision.distil.eagle3 import train_eagle3

    train_eagle3(options)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
