"""`mmspec train mamba`: a small Mamba-2 that drafts for any target, from conversations that the target has (best)
answered itself."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.distil.options import DATA, LENGTH, REPORTS, TREES, option_groups

NETWORK = (
    click.option("--hidden-size", type=click.IntRange(1), default=128, show_default=True, help="Of its embeddings."),
    click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="More guess better, slower."),
    click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="Of each layer's scan."),
    click.option("--head-dim", type=click.IntRange(1), default=32, show_default=True, help="Channels of a head."),
    click.option("--state", type=click.IntRange(1), default=32, show_default=True, help="States of a channel."),
    click.option("--window", type=click.IntRange(1), default=4, show_default=True, help="Of its convolution, tokens."),
)


@click.command("mamba")
@option_groups(DATA, LENGTH, REPORTS, NETWORK, TREES)
def mamba(**given: Any) -> None:
    """Train a Mamba drafter: a small language model that learns the target's distribution of each next token.

    It reads tokens only; images and videos in --data tell the target what to say, and are placeholders to the drafter.
    A run that was interrupted goes on when the same command is given again. The drafter comes to lie in OUT/drafter,
    figures in OUT/log.jsonl and OUT/curve.svg. Several devices: `accelerate launch -m ssm.distil.command mamba
    OPTIONS`.
    """
    from ssm.distil.mamba import train_mamba

    train_mamba(given)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
