"""Torch's threads next to other programs: their number follows the delays of steps."""

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
from mmspec.engine.threads import TorchThreads
from mmspec.ops.cpu import kernel_threads, limit_torch
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

BUSY, NOISY, QUIET = (1.0, 0.9), (1.0, 0.1), (1.0, 0.01)  # seconds of steps, and of their threads' delays


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def starting(most, count=None):
    chosen = TorchThreads()
    chosen.most, chosen.count = most, count or most
    return chosen


def counts(most, records):
    chosen = starting(most)
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
    chosen, tried = starting(2), []
    for second in range(300):
        chosen.record(*(BUSY if chosen.count == 2 else QUIET))
        if chosen.count == 2:
            tried.append(second)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 4
    assert gaps[-1] >= 60


def test_after_a_success_attempts_are_frequent_again():
    chosen = starting(2)
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


@pytest.mark.parametrize(
    ("adapts", "limits", "counts", "asked"),
    [(True, True, [2, 1, 1, 2], [1, 2]), (True, False, [2, 2, 2, 2], [1]), (False, True, [2, 2, 2, 2], [])],
    ids=["adapts", "torch has no limits by thread", "does not adapt"],
)
@pytest.mark.parametrize("counted", [True, False], ids=["counted delays", "no counts"])
def test_the_number_follows_whole_windows(counted, adapts, limits, counts, asked, monkeypatch):
    """Without the system's counts, the time in which the worker does not compute is a delay."""
    now, given = {"wall": 0.0, "computed": 0.0}, []
    monkeypatch.setattr(threads, "clock", lambda: now["wall"])
    monkeypatch.setattr(threads, "thread_time", lambda: now["computed"])
    # One more thread in each window, with the delay of the worker.
    delayed = {}
    monkeypatch.setattr(threads, "_delays", lambda: dict(delayed) if counted else None)
    monkeypatch.setattr(threads, "limit_torch", lambda count, kernels: given.append((count, kernels)) or limits)
    chosen, found = TorchThreads(adapts), []
    chosen.begin()
    for wall, computed in [(0.2, 0.1), (0.2, 0.1), (1.0, 0.9), (2.0, 1.98)]:
        chosen.start_step()
        now["wall"] += wall
        now["computed"] += computed
        delayed[f"of {now['wall']}"] = round(1e9 * max(0.0, wall - computed))
        chosen.end_step()
        found.append(chosen.count)
    assert found == counts
    assert given == [(count, 2) for count in asked]


def test_an_engine_beside_other_programs_lowers_its_own_number(monkeypatch):
    """With recorded delays: first long delays, then none."""
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
    pipe.engine.threads = starting(2, 1)
    assert pipe.generate("a", max_new_tokens=6).token_ids == expected
    assert pipe.engine.threads.count == 2


def test_the_user_s_later_number_holds():
    chosen = TorchThreads()
    chosen.begin()
    torch.set_num_threads(1)
    chosen.begin()
    assert chosen.count == 1


def test_time_that_threads_compute_in_is_no_delay(tmp_path, monkeypatch):
    """Linux counts nanoseconds on a processor, nanoseconds of waiting, and turns."""
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
