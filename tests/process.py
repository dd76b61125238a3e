"""Modules of tests in processes of their own: Triton decides at its import whether kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(module: str, *arguments: str, **environment: str) -> str:
    """Output of a module; this process's kernel settings are not inherited."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "MMSPEC_KERNELS"))
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    command = [sys.executable, "-m", module, *arguments]
    environment = inherited | {"PYTHONPATH": path} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
