"""Types of list options on the command line."""

from __future__ import annotations

from typing import Any

import click

from mmspec.checks import whole
from mmspec.cli.options import Value
from mmspec.sampling.params import SamplingParams


class CommaList(click.ParamType):
    """Type of a list option: values separated by commas, without duplicates.

    Args:
        item: type of the values.
    """

    name = "list"

    def __init__(self, item: click.ParamType) -> None:
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(dict.fromkeys(self.item.convert(part, param, ctx) for part in parts))


SIZES = CommaList(Value(whole(1)))
"""Type of an option that lists whole numbers above 0."""

TEMPERATURES = CommaList(Value(SamplingParams.rule("temperature")))
"""Type of an option that lists sampling temperatures."""

llama_server_option = click.option(
    "--llama-server",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="The program llama-server of llama.cpp, built for this machine.",
)
