"""Command-line interface: ``mmspec COMMAND``, with commands from the entry point group ``mmspec.commands``."""

from mmspec.cli.app import main

__all__ = ["main"]
