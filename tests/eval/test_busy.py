"""The study of decoding beside other programs: it ends what it starts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from click.testing import CliRunner

from mmspec.eval import busy
from mmspec.eval.busy import _LOOP, busy_programs
from mmspec.eval.harness.timing import wait_for_huge_pages
from mmspec.ops import cpu


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


def test_table_compares_threads_alone_and_beside_programs(monkeypatch):
    monkeypatch.setattr(
        busy, "decode_rate", lambda pipe, seconds: 12.0 * torch.get_num_threads() ** (1 - len(loops()) / 3)
    )
    options = ["--model", "tiny-hybrid", "--dtype", "float32", "--threads", "4", "--busy", "2", "--rounds", "1"]
    done = CliRunner().invoke(busy.main, options, catch_exceptions=False)
    rows = json.loads(done.stdout.splitlines()[-1])["rates"]
    figures = ["threads", "alone", "alone_over_one", "beside", "beside_over_one"]
    expected = [[1, 12, 1, 12, 1], [4, 48, 4, 12 * 4 ** (1 / 3), 4 ** (1 / 3)]]
    assert [[row[name] for name in figures] for row in rows] == [pytest.approx(row) for row in expected]
    assert torch.get_num_threads() == 1


def test_passes_are_timed_once_weights_are_in_huge_pages():
    ended = threading.Event()
    threading.Thread(target=lambda: (time.sleep(0.3), ended.set()), name=cpu.MOVER).start()
    wait_for_huge_pages()
    assert ended.is_set()
