"""The command line: ``mmspec COMMAND``. Commands come from the entry point group ``mmspec.commands``."""

from mmspec.cli.app import main

__all__ = ["main"]
