"""SIGTERM ends the child processes of a benchmark."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

from tests.process import ROOT
from tests.serve_process import gone
from tests.served import TIMEOUT, eventually

SCRIPT = """
import subprocess, weakref, time, click
from mmspec.eval.harness.output import BenchmarkCommand
class Server: pass
@click.command(cls=BenchmarkCommand)
def main():
    server, child = Server(), subprocess.Popen(["sleep", "100"])
    weakref.finalize(server, child.kill)
    print(child.pid, flush=True)
    time.sleep(100)
main()
"""


def test_sigterm_runs_finalizers() -> None:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        child = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert eventually(lambda: gone([child]))
