"""Torch's threads beside other programs: their number follows the delays of steps, idle ones do not spin for long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
import torch

from mmspec import Pipeline
from mmspec.engine import threads
from mmspec.engine.threads import ThreadCount, TorchThreads
from mmspec.ops.threads import kernel_threads, limit_torch
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

BUSY, NOISY, QUIET = (1.0, 0.9), (1.0, 0.1), (1.0, 0.01)  # seconds of steps, and of their threads' delays

SPINNING = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def counts(most, records):
    chosen = ThreadCount(most)
    found = []
    for record in records:
        chosen.record(*record)
        found.append(chosen.count)
    return found


def test_delays_halve_the_number_down_to_one():
    assert counts(12, [QUIET, BUSY, BUSY, BUSY, BUSY]) == [12, 6, 3, 1, 1]


def test_the_number_grows_again_on_a_quiet_machine():
    assert counts(8, [BUSY, BUSY, QUIET, QUIET, QUIET]) == [4, 2, 4, 8, 8]


def test_some_delays_change_nothing():
    assert counts(4, [NOISY] * 5) == [4] * 5
    assert counts(4, [BUSY, NOISY, NOISY, NOISY]) == [2] * 4


def test_attempts_that_fail_become_rare():
    """Another program on one of two processors: one thread has no delays, two have."""
    chosen, tried = ThreadCount(2), []
    for second in range(300):
        chosen.record(*(BUSY if chosen.count == 2 else QUIET))
        if chosen.count == 2:
            tried.append(second)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 4
    assert gaps[-1] >= 60


def test_after_a_success_attempts_are_frequent_again():
    chosen = ThreadCount(2)
    for _ in range(100):
        chosen.record(*(BUSY if chosen.count == 2 else QUIET))
    while chosen.count == 1:
        chosen.record(*QUIET)
    for record in [QUIET] * 61 + [BUSY, QUIET]:
        chosen.record(*record)
    assert chosen.count == 2


def test_a_limit_is_that_of_its_thread():
    seen = []

    def run():
        if limit_torch(1, 2):
            seen.append((torch.get_num_threads(), kernel_threads()))

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    if not seen:
        pytest.skip("torch's OpenMP has no limits by thread")
    assert seen == [(1, 2)]
    assert (torch.get_num_threads(), kernel_threads()) == (2, 2)


def test_an_engine_beside_other_programs_lowers_its_own_number(monkeypatch):
    """With recorded delays: first long ones, then none."""
    delays = iter(range(0, 10**15, 10**12))
    monkeypatch.setattr(threads, "_WINDOW", 0.0)
    monkeypatch.setattr(threads, "_delays", lambda: {"1": next(delays)})
    pipe = Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), None)
    seen = []
    criteria = [lambda *_: seen.append((torch.get_num_threads(), kernel_threads())) or False]
    expected = pipe.generate("a", max_new_tokens=6).token_ids
    assert pipe.engine.threads.count == 1
    assert pipe.generate("a", max_new_tokens=6, stopping_criteria=criteria).token_ids == expected
    assert set(seen) == {(1, 2)}
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "_delays", lambda: {"1": 0})
    monkeypatch.setattr(threads, "_FIRST", 0.0)
    pipe.engine.threads._chosen = ThreadCount(2)
    pipe.engine.threads._chosen.count = 1
    assert pipe.generate("a", max_new_tokens=6).token_ids == expected
    assert pipe.engine.threads.count == 2


def test_the_user_s_later_number_holds():
    chosen = TorchThreads()
    chosen.begin()
    torch.set_num_threads(1)
    chosen.begin()
    assert chosen.count == 1


def test_time_that_threads_compute_in_is_no_delay(tmp_path, monkeypatch):
    """Linux counts nanoseconds on a processor, then those of waiting for one, then turns."""
    for thread, counted in (("7", "9000 50 3"), ("8", "4000 0 1")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"{counted}\n")
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    assert threads._delays() == {"7": 50, "8": 0}


@pytest.mark.skipif(threads._delays() is None, reason="this system does not count delays")
def test_delays_are_those_of_threads_that_wait_for_a_processor():
    """Two threads of this process on one processor, one of them for a second."""
    before, allowed = threads._delays(), os.sched_getaffinity(0)
    spin = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    try:
        os.sched_setaffinity(0, {min(allowed)})
        other = subprocess.Popen([sys.executable, "-S", "-c", spin])
        while other.poll() is None:
            time.perf_counter()
    finally:
        os.sched_setaffinity(0, allowed)
    mine = str(threading.get_native_id())
    assert threads._delays()[mine] - before.get(mine, 0) > 1e8


def policies(program, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING} | variables
    program = f"import os, sys\n{program}\nprint(*(os.environ.get(name, '') for name in {SPINNING}), sep=',')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
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
