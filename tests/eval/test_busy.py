"""The study of decoding beside other programs: it ends what it starts."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from mmspec.eval.busy import _LOOP, busy_programs


def loops() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "getppid" in " ".join(child.cmdline())]


def test_busy_programs_end_with_the_block():
    with pytest.raises(ValueError, match="stopped"), busy_programs(2):  # noqa: PT012
        assert len(loops()) == 2
        raise ValueError("stopped")
    assert loops() == []


def test_busy_programs_end_with_a_process_that_is_killed():
    """Even before they have begun."""
    program = f"import os, subprocess, sys\ncommand = [sys.executable, '-S', '-c', {_LOOP!r}, str(os.getpid())]\n"
    program += "print(subprocess.Popen(command).pid, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120)
    left = int(done.stdout)
    psutil.wait_procs([psutil.Process(left)] if psutil.pid_exists(left) else [], timeout=60)
    assert not psutil.pid_exists(left)
