"""Command-line interface: ``mmspec COMMAND``, with commands from the plug-ins ``commands``."""

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line, see ``mmspec.cli.app.main``; also reports Ctrl-C during imports in one line."""
    gc.set_threshold(10_000)  # Python's 700 takes 0.4 s more as torch and transformers are imported
    try:
        from mmspec.cli.app import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + 2
    return run(args)
