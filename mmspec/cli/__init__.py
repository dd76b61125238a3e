"""Command-line interface: ``mmspec COMMAND``, with commands from the plug-ins ``commands``."""

from mmspec.cli.app import main

__all__ = ["main"]
