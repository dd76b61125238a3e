"""``mmspec train msd`` and ``flash``: train drafters of any target, best on the target's own answers."""

from __future__ import annotations

import sys

from mmspec.cli.drafters import training_command
from mmspec.vision.training.options import FlashOptions, MSDOptions

msd = training_command(
    "msd",
    MSDOptions,
    "mmspec.vision.training.msd:msd",
    "Train an MSD drafter: first on text, then on a growing share of images and videos.",
)
flash = training_command(
    "flash",
    FlashOptions,
    "mmspec.vision.training.msd:flash",
    """Train a FLASH drafter: MSD with images compressed to latents and several tokens per forward pass.

    --latents 0 turns off the compression, --slots 1 the semi-autoregression. All else is as in `train msd`.""",
)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
