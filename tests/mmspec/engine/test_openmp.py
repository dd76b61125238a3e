"""OpenMP threads: while the engine computes, clients have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")

PROGRAM = """
import os, time, torch, mmspec
from mmspec.engine import threads
from mmspec.engine.threads import release_threads

threads._WINDOW = float("inf")  # seconds: the number of threads does not follow other programs

torch.set_num_threads(3)
busy = lambda: torch.ones(2_000_000).exp()
count = lambda: len(os.listdir("/proc/self/task"))

before = count()
busy()
computed = count()
release_threads()
release_threads()
print(*(n - before for n in (computed, count())))

pipe = mmspec.load("tiny-hybrid", drafter="ngram", device="cpu", dtype="float32")
loaded = count()
pipe.generate("Red", max_new_tokens=4)  # starts threads of the tokenizer
end = time.monotonic() + 60
while count() > loaded and time.monotonic() < end:  # threads of its worker are ending
    time.sleep(0.01)
release_threads()
before, loaded = count(), loaded - before
busy()
seen = []
pipe.generate("Red", max_new_tokens=4, stopping_criteria=[lambda *_: seen.append(count()) or False])
print(loaded, max(seen) - before, torch.get_num_threads())
"""


FORKED = """
import os, torch
from mmspec.engine.threads import release_threads

torch.ones(2_000_000).exp()
if child := os.fork():
    os._exit(os.waitpid(child, 0)[1])
release_threads()
os._exit(0)
"""


def output_of(program):
    """What a process with three OpenMP threads prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clients_give_up_their_threads():
    """Three threads each: the engine's are its worker and two more, and the client computed before."""
    alone, served = (tuple(map(int, line.split())) for line in output_of(PROGRAM).splitlines())
    assert alone == (2, 0)
    assert served == (0, 3, 3)


def test_a_forked_process_does_not_wait_for_threads_of_its_parent():
    output_of(FORKED)
