"""Command line as ``python -m mmspec``, for ``torchrun -m mmspec``."""

import sys

from mmspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
