"""OpenMP threads: while the engine computes, clients have none; idle threads do not spin for long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SPINNING = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"

PROGRAM = """
import os, torch, mmspec
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
loaded = count() - before
pipe.encode([{"prompt": "Red"}])  # starts threads of the tokenizer, which stay
release_threads()
before = count()
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
    """Output of a process with three OpenMP threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_clients_give_up_their_threads():
    """Three threads each: the engine's are its worker and two more, and the client computed before."""
    alone, served = (tuple(map(int, line.split())) for line in output_of(PROGRAM).splitlines())
    assert alone == (2, 0)
    assert served == (0, 3, 3)


def test_a_forked_process_does_not_wait_for_threads_of_its_parent():
    output_of(FORKED)


def policies(program, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING} | variables
    program = f"import os, sys\n{program}\nprint(*(os.environ.get(name, '') for name in {SPINNING}), sep=',')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_programs_bound_spinning_before_torch_is_loaded():
    assert (
        policies("from mmspec.cli.app import main\nassert 'torch' not in sys.modules\nmain(['--version'])") == ",1000,1"
    )
    study = "import contextlib, runpy\nsys.argv = ['eval', '--help']\nwith contextlib.suppress(SystemExit):\n"
    assert policies(study + "    runpy.run_module('mmspec.eval', run_name='__main__')") == ",1000,1"


def test_the_user_s_settings_take_precedence():
    program = "from mmspec.cli.app import main\nmain(['--version'])"
    assert policies(program, OMP_WAIT_POLICY="active") == "active,,"
    assert policies(program, GOMP_SPINCOUNT="7") == ",7,"


def test_a_library_changes_no_settings():
    assert policies("import mmspec\nmmspec.load('tiny-hybrid', device='cpu')") == ",,"
    assert policies("import torch\nfrom mmspec.cli.app import main\nmain(['--version'])") == ",,"
