"""Torch's threads next to other programs: their number follows the delays of steps; clients give up theirs."""

import copy
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec.engine import threads
from mmspec.engine.threads import ThreadTrial, TorchThreads, fix_threads, restored_threads
from mmspec.ops.cpu import kernel_threads, limit_torch, use_kernel_threads
from tests.ranks import alone
from tests.tiny import byte_model, byte_tokenizer

pytestmark = pytest.mark.usefixtures("two_threads")

BUSY, NOISY, QUIET = (1.0, 0.9), (1.0, 0.1), (1.0, 0.01)  # seconds of steps, and of their threads' delays


def starting(most, count=None):
    chosen = TorchThreads()
    chosen.most, chosen.count = most, count or most
    return chosen


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        ([QUIET, BUSY, BUSY, BUSY, BUSY, BUSY], [8, 4, 2, 1, 1, 1]),
        ([BUSY, BUSY, QUIET, QUIET, QUIET], [4, 2, 4, 8, 8]),
        ([NOISY] * 5, [8] * 5),
        ([BUSY, NOISY, NOISY, NOISY], [4] * 4),
    ],
)
def test_the_number_follows_delays(records, counts):
    chosen = starting(8)
    assert [(chosen.record(*record), chosen.count)[1] for record in records] == counts


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
        use_kernel_threads(2)
        if limit_torch(1):
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
    monkeypatch.setattr(threads, "limit_torch", lambda count: given.append(count) or limits)
    chosen, found = TorchThreads(adapts), []
    chosen.start_step()
    now["wall"] += 0.2
    chosen.end_step()
    chosen.begin()  # of another thread
    for wall, computed in [(0.2, 0.05), (0.2, 0.2), (1.0, 0.9), (2.0, 1.98)]:
        chosen.start_step()
        now["wall"] += wall
        now["computed"] += computed
        delayed[f"of {now['wall']}"] = round(1e9 * max(0.0, wall - computed))
        chosen.end_step()
        found.append(chosen.count)
    assert found == counts
    assert given == asked


def test_an_engine_beside_other_programs_lowers_its_own_number(monkeypatch):
    """With recorded delays: first long delays, then none."""
    delays = iter(range(0, 10**15, 10**12))
    monkeypatch.setattr(threads, "_WINDOW", 0.0)
    monkeypatch.setattr(threads, "_delays", lambda: {"1": next(delays)})
    pipe = mmspec.load(byte_model(), None, processor=byte_tokenizer())
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


def tried(monkeypatch, most, seconds, sizes):
    """The numbers of threads of successive steps over ``sizes`` tokens, and that after them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    trial, used = ThreadTrial(most), []
    for step, tokens in enumerate(sizes):
        if trial.ended:
            break
        used.append(trial.count)
        trial.add(tokens, seconds(trial.count, tokens, step))
    return used, trial.count, trial.ended


@pytest.mark.parametrize(("half", "kept"), [(0.9, 4), (0.97, 8), (1.5, 8)])
def test_steps_choose_between_all_threads_and_half(half, kept, monkeypatch):
    """A step that the system interrupts does not decide."""
    late = {2: 50.0, 3: 80.0, 5: 90.0}
    seconds = lambda count, tokens, step: late.get(step, half if count == 4 else 1.0)  # noqa: E731
    used, count, ended = tried(monkeypatch, 8, seconds, [1] * 20)
    assert used == [8, 4] * 5
    assert (count, ended) == (kept, True)


def test_steps_are_compared_with_steps_of_their_size(monkeypatch):
    """Here half the threads run all of the longer passes."""
    sizes = [16, 1, 16, 1, 1, 16, 1, 1, 16, 1, 1, 16, 1, 1, 16, 1, 1, 1]
    used, count, ended = tried(monkeypatch, 2, lambda count, tokens, _: tokens / count**0.5, sizes)
    assert {1, 2} == set(used)
    assert (count, ended) == (2, True)
    assert tried(monkeypatch, 2, lambda count, tokens, _: tokens * count, sizes)[1:] == (1, True)


def test_a_number_that_the_user_chose_is_not_tried(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert (ThreadTrial(4).count, ThreadTrial(4).ended) == (4, True)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (ThreadTrial(1).ended, ThreadTrial(4).ended) == (True, False)


@pytest.mark.parametrize("chosen", [None, "7"])
def test_a_number_is_fixed_until_the_end_of_a_block(chosen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", chosen or "")
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    with restored_threads():
        fix_threads(1)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
    assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == (2, chosen)


@pytest.mark.parametrize("block", [lambda _: nullcontext(), alone], ids=["one process", "rank 0"])
def test_an_engine_tries_numbers_of_kernel_threads_without_changing_tokens(block, monkeypatch):
    """By steps of two rows."""
    model, seen = copy.deepcopy(byte_model()), []
    expected = mmspec.load(model, None, processor=byte_tokenizer()).generate("a", max_new_tokens=24).token_ids
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with block(model):
        pipe = mmspec.load(model, None, processor=byte_tokenizer())
        pipe.follow()
        step = pipe.engine.core.step
        pipe.engine.core.step = lambda: (seen.append(kernel_threads()), step())[1]
        answers = pipe.generate_batch([{"prompt": "a"}] * 2, max_new_tokens=24)
        assert [answer.token_ids for answer in answers] == [expected] * 2
        assert set(seen[:11]) == {1, 2}
        assert (pipe.engine.threads.trial.ended, [*pipe.engine.threads.trial._seconds]) == (True, [2])
        assert len(set(seen[11:])) == 1
        again = pipe.engine.threads.trial.count
        assert pipe.generate("b", max_new_tokens=4).token_ids
        assert seen[-1] == again == seen[12]
        pipe.engine.close()


@pytest.mark.parametrize("half", [0.5, 2.0])
def test_half_of_the_threads_is_compared_again_after_a_minute(half, monkeypatch):
    now = [100.0]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "clock", lambda: now[0])
    monkeypatch.setattr(threads, "thread_time", lambda: 0.0)  # other threads compute
    chosen = TorchThreads(adapts=False)
    for step in range(20):
        chosen.start_step()
        now[0] += (half if chosen.trial.count < chosen.most else 1.0) if step % 2 else 10.0
        assert not chosen.trial.expired
        chosen.end_step(step % 2)  # every other one is no decode step
        assert kernel_threads() == chosen.trial.count
    use_kernel_threads(0)
    for now[0], again in ((159.0, False), (160.0, half < 1), (161.0, half < 1)):
        chosen.begin()
        assert chosen.trial.ended is not again
        assert kernel_threads() == chosen.trial.count


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


def output_of(program, **variables):
    """Output of a process with these variables, and no others of OpenMP."""
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING} | variables
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_clients_give_up_their_threads():
    """Three threads each: the engine's are its worker and two more, and the client computed before."""
    alone, served = (tuple(map(int, line.split())) for line in output_of(PROGRAM, OMP_NUM_THREADS="3"))
    assert alone == (2, 0)
    assert served == (0, 3, 3)


def test_a_forked_process_does_not_wait_for_threads_of_its_parent():
    output_of(FORKED, OMP_NUM_THREADS="3")


def policies(program, **variables):
    printed = f"\nprint(*(os.environ.get(name, '') for name in {SPINNING}), sep=',')"
    return output_of(f"import os, sys\n{program}{printed}", **variables)[-1]


CLI = "from mmspec.cli.app import main\n"
VERSION = f"{CLI}main(['--version'])"
STUDY = """
import contextlib, runpy
sys.argv = ['eval', '--help']
with contextlib.suppress(SystemExit):
    runpy.run_module('mmspec.eval', run_name='__main__')
"""


@pytest.mark.parametrize(
    ("program", "variables", "expected"),
    [
        (f"{CLI}assert 'torch' not in sys.modules\n{VERSION}", {}, ",1000,1"),
        (STUDY, {}, ",1000,1"),
        (VERSION, {"OMP_WAIT_POLICY": "active"}, "active,,"),
        (VERSION, {"GOMP_SPINCOUNT": "7"}, ",7,"),
        ("import mmspec\nmmspec.load('tiny-hybrid', device='cpu')", {}, ",,"),
        (f"import torch\n{VERSION}", {}, ",,"),
    ],
)
def test_programs_bound_spinning_before_torch_is_loaded_unless_the_user_set_it(program, variables, expected):
    assert policies(program, **variables) == expected
