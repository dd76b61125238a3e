"""`mmspec train mamba`: trains a small Mamba-2 drafter of any target, best on the target's own answers."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.cli.training import DATA, LENGTH, REPORTS, TREES, option_groups

NETWORK = (
    click.option("--hidden-size", type=click.IntRange(1), default=128, show_default=True, help="Width."),
    click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Mamba-2 layers."),
    click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="Heads per layer."),
    click.option("--head-dim", type=click.IntRange(1), default=32, show_default=True, help="Channels per head."),
    click.option("--state", type=click.IntRange(1), default=32, show_default=True, help="State size per channel."),
    click.option("--window", type=click.IntRange(1), default=4, show_default=True, help="Width of its convolution."),
)


@click.command("mamba")
@option_groups(DATA, LENGTH, REPORTS, NETWORK, TREES)
def mamba(**options: Any) -> None:
    """Train a Mamba drafter: a small language model distilled from the target's next-token distribution.

    Its input is tokens only: images and videos in --data are placeholder tokens to the drafter. Run the same command
    again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to OUT/log.jsonl and
    OUT/curve.svg. On several devices: `accelerate launch -m mmspec.ssm.cli.drafters mamba OPTIONS`.
    """
    from mmspec.ssm.distil.mamba import train_mamba

    train_mamba(options)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
