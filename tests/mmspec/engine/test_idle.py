"""Idle work of an engine: only while no sequence runs or waits, in turns, and never in the way of one."""

import threading
import time
from contextlib import nullcontext

import pytest

from mmspec import Pipeline
from mmspec.engine import engine as engines
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.ranks import alone
from tests.testkit.served import TIMEOUT, eventually
from tests.tiny import byte_model, byte_tokenizer


class Task:
    """Turns until ``left`` is 0; records whether a sequence was there in any."""

    def __init__(self, engine, left, seconds=0.0, error=None):
        self.engine, self.left, self.seconds, self.error = engine, left, seconds, error
        self.turns, self.disturbed, self.closed = 0, False, False

    @property
    def pending(self):
        return self.left > 0

    def turn(self):
        self.turns += 1
        self.left -= 1
        self.disturbed |= bool(self.engine.core.running)
        if self.error is not None:
            raise self.error
        time.sleep(self.seconds)

    def close(self):
        self.closed = True


@pytest.fixture(params=["one process", "rank 0"])
def pipe(request, monkeypatch):
    monkeypatch.setattr(engines, "IDLE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(engines, "IDLE_TIME_SHARE", 1.0)
    model = byte_model()
    with alone(model) if request.param == "rank 0" else nullcontext():
        pipe = Pipeline(TransformersTarget(model), Processor(byte_tokenizer()), None)
        pipe.follow()
        yield pipe
        pipe.engine.close()


def ask(pipe):
    return pipe.generate("The second one", max_new_tokens=6, ignore_eos=True).token_ids


def test_turns_follow_the_last_sequence_and_the_worker_ends_after_them(pipe):
    task = Task(pipe.engine, 5)
    pipe.engine.idle.add(task)
    ask(pipe)
    assert eventually(lambda: not task.left and pipe.engine._worker is None)
    assert (task.turns, task.disturbed) == (5, False)


def test_a_sequence_waits_for_one_turn_at_most(pipe, monkeypatch):
    expected = ask(pipe)
    task = Task(pipe.engine, 10_000, seconds=0.005)
    pipe.engine.idle.add(task)
    ask(pipe)
    assert eventually(lambda: task.turns > 2)
    core, turns = pipe.engine.core, []
    add, step = core.add, core.step
    monkeypatch.setattr(core, "add", lambda *given: (turns.append(task.turns), add(*given)))
    monkeypatch.setattr(core, "step", lambda: (turns.append(task.turns), step()))
    for _ in range(3):
        turns.clear()
        assert ask(pipe) == expected
        queued, started, *_ = turns
        assert started - queued <= 1  # one that has begun, but not counted itself yet
    assert not task.disturbed
    pipe.engine.drain()
    assert task.left > 0
    turns = task.turns
    time.sleep(0.05)
    assert task.turns == turns  # draining leaves it for later
    task.left = 0


def test_no_turn_before_the_quiet_time_or_while_paused(pipe, monkeypatch):
    monkeypatch.setattr(engines, "IDLE_DELAY_SECONDS", 10.0 * TIMEOUT)
    task = Task(pipe.engine, 3)
    pipe.engine.idle.add(task)
    ask(pipe)
    second = threading.Thread(target=ask, args=[pipe], daemon=True)
    second.start()
    second.join(TIMEOUT)
    assert not second.is_alive()  # it does not wait for the quiet time
    assert task.turns == 0
    pipe.engine._idle_from = 0.0
    with pipe.engine.paused():
        pass  # wakes the worker up, which finds that the time has passed
    pipe.engine.drain()
    assert not task.disturbed


def test_turns_take_a_share_of_the_time(pipe, monkeypatch):
    """Here a quarter: a turn of three seconds is followed by nine without one."""
    now, engine = [100.0], pipe.engine
    monkeypatch.setattr(engines, "IDLE_TIME_SHARE", 0.25)
    monkeypatch.setattr(engines, "clock", lambda: now[0])
    engine._task = Task(engine, 2)
    monkeypatch.setattr(engine._task, "turn", lambda: now.insert(0, 103.0))
    engine._turn()
    assert engine._idle_from == 112.0


def test_a_pause_that_comes_in_a_turn_begins_after_it(pipe):
    """Idle work changes drafters, too; and the next turn begins after the pause."""
    engine, events, threads = pipe.engine, [], []

    class Paused(Task):
        def turn(self):
            super().turn()
            threads.append(threading.Thread(target=pause, daemon=True))
            threads[-1].start()
            eventually(lambda: engine._pauses or len(events) % 2)  # it waits, or is not kept waiting
            events.append("turn")

    def pause():
        with engine.paused():
            events.append("pause")

    task = Paused(engine, 3)
    engine.idle.add(task)
    ask(pipe)
    assert eventually(lambda: len(events) == 6)
    assert events == ["turn", "pause"] * 3
    for thread in threads:
        thread.join(20)


def test_an_error_ends_the_task_alone(pipe, caplog):
    task, other = Task(pipe.engine, 3, error=RuntimeError("broken")), Task(pipe.engine, 2)
    pipe.engine.idle.add(task)
    pipe.engine.idle.add(other)
    ask(pipe)
    assert eventually(lambda: not other.left and task not in pipe.engine.idle)  # in any order
    assert task.turns == 1
    assert "Task was stopped by an error; answers do not depend on it" in caplog.text
    assert ask(pipe)


def test_closing_an_engine_closes_its_tasks(pipe):
    task = Task(pipe.engine, 10**6)
    pipe.engine.idle.add(task)
    ask(pipe)
    assert eventually(lambda: task.turns)
    pipe.engine.close()
    assert task.closed
    assert pipe.engine._worker is None


def test_drain_waits_for_the_end_of_the_thread(pipe, monkeypatch):
    """A thread that is still ending would be inside of torch while the interpreter ends."""
    engine, run, threads = pipe.engine, pipe.engine._run, []

    def slow():
        threads.append(threading.current_thread())
        run()
        time.sleep(0.3)

    monkeypatch.setattr(engine, "_run", slow)
    pipe.generate("The second one", max_new_tokens=2, ignore_eos=True)
    engine.drain()
    assert threads
    assert not any(thread.is_alive() for thread in threads)
