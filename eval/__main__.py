"""Runs a benchmark or study: ``python -m mmspec.eval NAME OPTIONS``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

STUDIES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def main() -> None:
    """Run the module that the first argument names, with the other arguments as its own."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in STUDIES:
        print(f"usage: python -m mmspec.eval NAME OPTIONS\n\nNAME: {', '.join(STUDIES)}", file=sys.stderr)
        if name != "--help":
            print(f"\nerror: unknown study: expected one of these, received {name!r}", file=sys.stderr)
        sys.exit(0 if name == "--help" else 2)
    sys.argv[:2] = [f"python -m mmspec.eval {name}"]
    runpy.run_module(f"mmspec.eval.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
