"""Command-line interface: ``mmspec COMMAND``, with commands from the plug-ins ``commands``."""

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line, see ``mmspec.cli.app.main``; also reports Ctrl-C during imports in one line."""
    if "torch" not in sys.modules:  # importing it and transformers makes 600,000 objects, all of which stay
        gc.callbacks.append(_collect)
        gc.set_threshold(400_000)
    try:
        from mmspec.cli.app import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + 2
    return run(args)


def _collect(*_: object) -> None:
    """Freeze what was imported, at the first collection; later collections are 10,000 objects apart."""
    gc.callbacks.remove(_collect)
    gc.freeze()
    gc.set_threshold(10_000)
