"""`mmspec train mamba`: trains a small Mamba-2 drafter of any target, best on the target's own answers."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.cli.options import derived
from mmspec.ssm.distil.options import MambaOptions


@click.command("mamba")
@derived(MambaOptions)
def mamba(**options: Any) -> None:
    """Train a Mamba drafter: a small language model distilled from the target's next-token distribution.

    Its input is tokens only: images and videos in --data are placeholder tokens to the drafter. Run the same command
    again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to OUT/log.jsonl and
    OUT/curve.svg. On several devices: `accelerate launch -m mmspec.ssm.cli.drafters mamba OPTIONS`.
    """
    from mmspec.ssm.distil.mamba import train_mamba

    train_mamba(MambaOptions(**options))


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
