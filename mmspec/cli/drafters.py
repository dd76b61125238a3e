"""`mmspec train eagle3`, `dflash`, `medusa` and `kangaroo`: train drafters of any target, best on its own answers."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.cli.options import derived
from mmspec.distil.options import DFlashOptions, Eagle3Options, KangarooOptions, MedusaOptions


@click.command("eagle3")
@derived(Eagle3Options)
def eagle3(**options: Any) -> None:
    """Train an EAGLE-3 head, which reads several layers of the target, over several self-fed steps.

    With --parallel, a P-EAGLE head, which drafts all levels in one pass.

    Image positions are placeholder tokens to it. Run the same command again to resume an interrupted run. The drafter
    is written to OUT/drafter, metrics to OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m
    mmspec.cli.drafters eagle3 OPTIONS`.
    """
    from mmspec.distil.eagle3 import train_eagle3

    train_eagle3(Eagle3Options(**options))


@click.command("dflash")
@derived(DFlashOptions)
def dflash(**options: Any) -> None:
    """Train a DFlash drafter, which drafts a block of tokens in one pass.

    It reads several layers of the target, at image positions too. Run the same command again to resume an interrupted
    run. The drafter is written to OUT/drafter, metrics to OUT/log.jsonl and OUT/curve.svg. On several devices:
    `accelerate launch -m mmspec.cli.drafters dflash OPTIONS`.
    """
    from mmspec.distil.dflash import train_dflash

    train_dflash(DFlashOptions(**options))


@click.command("medusa")
@derived(MedusaOptions)
def medusa(**options: Any) -> None:
    """Train Medusa or Hydra heads, one per token ahead, on the target's last state.

    Run the same command again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to
    OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m mmspec.cli.drafters medusa OPTIONS`.
    """
    from mmspec.distil.medusa import train_medusa

    train_medusa(MedusaOptions(**options))


@click.command("kangaroo")
@derived(KangarooOptions)
def kangaroo(**options: Any) -> None:
    """Train a Kangaroo adapter, an attention layer between the target's first layers and its output layer.

    Run the same command again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to
    OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m mmspec.cli.drafters kangaroo OPTIONS`.
    """
    from mmspec.distil.kangaroo import train_kangaroo

    train_kangaroo(KangarooOptions(**options))


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
