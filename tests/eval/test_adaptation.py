"""The cost of adaptation: whose time is compared with whose, and when the adapting pipeline may learn."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mmspec import UserError
from mmspec.adaptation import heads
from mmspec.eval import adaptation


@pytest.fixture
def clock(monkeypatch):
    """A clock that requests and pauses set forward."""
    now = SimpleNamespace(seconds=0.0, slept_paused=[])
    monkeypatch.setattr(adaptation, "clock", lambda: now.seconds)
    monkeypatch.setattr(adaptation, "process_time", lambda: now.seconds / 2)
    monkeypatch.setattr(heads, "REQUESTS", heads.REQUESTS)

    def sleep(seconds):
        now.seconds += seconds
        now.slept_paused.append(engine.resting)

    monkeypatch.setattr(adaptation.time, "sleep", sleep)
    engine.resting = False
    return now


class Engine:
    """Notes whether it is paused."""

    resting = False

    @contextmanager
    def paused(self):
        self.resting = True
        yield
        self.resting = False


engine = Engine()


def pipeline(clock, seconds, lengths, resting):
    def generate(prompt, **keywords):
        assert engine.resting == resting
        clock.seconds += seconds * prompt
        return SimpleNamespace(token_ids=[prompt], stats=SimpleNamespace(accept_lengths=lengths))

    return SimpleNamespace(engine=engine, generate=generate)


def test_requests_are_timed_without_their_pauses_and_the_other_pipeline_rests(clock):
    pipes = pipeline(clock, 1.02, [2, 1], False), pipeline(clock, 1.0, [2, 1], True)
    found = adaptation.cost(pipes, [{"prompt": size} for size in (900, 3, 1, 2, 5)], {})
    assert found["requests"] == 4
    for kind in ("wall", "processor"):
        assert [found[kind][name] for name in ("median", "low", "high", "mean")] == pytest.approx([1.02] * 4)
    assert sorted(clock.slept_paused) == [False] * 5 + [True] * 5


def test_other_drafts_are_refused(clock):
    pipes = pipeline(clock, 1.0, [2, 1], False), pipeline(clock, 1.0, [1, 1, 1], True)
    with pytest.raises(UserError, match=r"^times compare the same drafts"):
        adaptation.cost(pipes, [{"prompt": 1}], {})


def test_subjects_are_the_first_turns_of_files(tmp_path):
    lines = [json.dumps({"question_id": k, "category": "c", "turns": [f"first {k}", "second"]}) for k in range(3)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    found = adaptation.texts((tmp_path / "sums.jsonl",), 2)
    assert [request["prompt"] for request in found["sums"]] == ["first 0", "first 1"]
