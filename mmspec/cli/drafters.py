"""`mmspec train eagle3`: trains an EAGLE-3 head of any target, best on the target's own answers."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmspec.cli.training import DATA, LENGTH, PASSES, REPORTS, SHAPE, START, TREES, option_groups, read_layers

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


@click.command("eagle3", context_settings={"default_map": {"passes": 5, "depth": 8}})
@option_groups(DATA, LENGTH, REPORTS, PASSES, START, EAGLE3, SHAPE, TREES)
def eagle3(**options: Any) -> None:
    """Train an EAGLE-3 head, which reads several layers of the target, over several self-fed steps.

    Image positions are placeholder tokens to it. Run the same command again to resume an interrupted run. The drafter
    is written to OUT/drafter, metrics to OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m
    mmspec.cli.drafters eagle3 OPTIONS`.
    """
    from mmspec.distil.eagle3 import train_eagle3

    train_eagle3(options)


if __name__ == "__main__":
    from mmspec.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
