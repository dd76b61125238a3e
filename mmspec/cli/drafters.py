"""``mmspec train`` eagle3, dflash, medusa, kangaroo and small: drafters of any target, best on its own answers."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from mmspec.cli.help import TrainingCommand
from mmspec.cli.options import derived
from mmspec.training.options import (
    DFlashOptions,
    Eagle3Options,
    KangarooOptions,
    MedusaOptions,
    RunOptions,
    SmallOptions,
)

_RUNS = """Run the same command again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to
OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m {module} {name} OPTIONS`."""


def training_command(name: str, kind: type[RunOptions], setup: str, text: str) -> click.Command:
    """The command of ``mmspec train`` for a drafter.

    Args:
        setup: location, ``"module:function"``, of what makes network and drafter, see ``train_drafter``.
        text: what it trains, for its help.
    """
    module, _, function = setup.partition(":")

    def train(**options: Any) -> None:
        from mmspec.training.run import train_drafter

        train_drafter(kind(**options), getattr(import_module(module), function))

    launched = f"{module.partition('.training')[0]}.cli.drafters"
    text += "\n\n" + _RUNS.format(module=launched, name=name)
    return click.command(name, cls=TrainingCommand, help=text)(derived(kind)(train))


eagle3 = training_command(
    "eagle3",
    Eagle3Options,
    "mmspec.training.eagle3:setup",
    """Train an EAGLE-3 head, which reads several layers of the target, over several self-fed steps.

    With --parallel, a P-EAGLE head, which drafts all levels in one pass. Image positions are placeholder tokens to
    it.""",
)
dflash = training_command(
    "dflash",
    DFlashOptions,
    "mmspec.training.dflash:setup",
    """Train a DFlash drafter, which drafts a block of tokens in one pass.

    It reads several layers of the target, at image positions too.""",
)
medusa = training_command(
    "medusa",
    MedusaOptions,
    "mmspec.training.medusa:setup",
    "Train Medusa or Hydra heads, one per token ahead, on the target's last state.",
)
kangaroo = training_command(
    "kangaroo",
    KangarooOptions,
    "mmspec.training.kangaroo:setup",
    "Train a Kangaroo adapter, an attention layer between the target's first layers and its output layer.",
)
small = training_command(
    "small",
    SmallOptions,
    "mmspec.training.small:setup",
    """Train a small language model of the target's vocabulary, which drafts as small:OUT/drafter (FastDraft).

    It is a checkpoint of transformers. Images and videos are left out.""",
)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
