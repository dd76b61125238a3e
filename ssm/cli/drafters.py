"""``mmspec train mamba``: trains a small Mamba-2 drafter of any target, best on the target's own answers."""

from __future__ import annotations

import sys

from mmspec.cli.drafters import training_command
from mmspec.ssm.training.options import MambaOptions

mamba = training_command(
    "mamba",
    MambaOptions,
    "mmspec.ssm.training.mamba:setup",
    """Train a Mamba drafter: a small language model distilled from the target's next-token distribution.

    Its input is tokens only: images and videos in --data are placeholder tokens to the drafter.""",
)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
