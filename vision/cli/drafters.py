"""`mmspec train msd` and `flash`: train drafters of any target, best on the target's own answers."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.cli.options import derived
from mmspec.vision.distil.options import FlashOptions, MSDOptions


@click.command("msd")
@derived(MSDOptions)
def msd(**options: Any) -> None:
    """Train an MSD drafter: first on text, then on a growing share of images and videos.

    Run the same command again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to
    OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m mmspec.vision.cli.drafters msd
    OPTIONS`.
    """
    from mmspec.vision.distil.msd import train_msd

    train_msd(MSDOptions(**options))


@click.command("flash")
@derived(FlashOptions)
def flash(**options: Any) -> None:
    """Train a FLASH drafter: MSD with images compressed to latents and several tokens per forward pass.

    --latents 0 turns off the compression, --slots 1 the semi-autoregression. All else is as in `train msd`.
    """
    from mmspec.vision.distil.msd import train_msd
    from mmspec.vision.drafters.msd.drafter import Flash

    train_msd(FlashOptions(**options), Flash)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
