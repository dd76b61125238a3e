"""Options that several studies have."""

from __future__ import annotations

import click

from mmspec.checks import listed, whole
from mmspec.cli.options import Value

SIZES = Value(listed(whole(1)))
"""Type of an option that lists whole numbers above 0."""

llama_server_option = click.option(
    "--llama-server",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="The program llama-server of llama.cpp, built for this machine.",
)
