"""Command-line interface: ``mmspec COMMAND``, with commands from the plug-ins ``commands``."""

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line, see ``mmspec.cli.app.main``; also reports Ctrl-C during imports in one line."""
    if "torch" not in sys.modules:
        _collect_after_imports()
    try:
        from mmspec.cli.app import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + 2
    return run(args)


def _collect_after_imports() -> None:
    """Delay garbage collections: importing torch and transformers makes 600,000 objects that all stay, and Python's 900
    collections meanwhile take 0.7 s."""

    def resume(*_: object) -> None:
        gc.callbacks.remove(resume)
        gc.freeze()
        gc.set_threshold(10_000)

    gc.callbacks.append(resume)
    gc.set_threshold(400_000)
