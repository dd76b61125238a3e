import pytest
import torch

from mmspec import Pipeline
from mmspec.drafters.ngram import Ngram
from mmspec.engine import stats
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer


class Event:
    """A CUDA event of a device on which every call takes 40 ms, however early the host returns."""

    milliseconds = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        Event.milliseconds += 40.0
        self.at = Event.milliseconds

    def elapsed_time(self, end):
        return end.at - self.at


def test_cuda_times_are_those_between_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    first, second = (stats.mark(torch.device("cuda")) for _ in range(2))
    assert stats.seconds(first, second) == pytest.approx(0.04)


def test_the_host_has_its_own_clock(monkeypatch):
    monkeypatch.setattr(stats, "perf_counter", iter([7.0, 7.5]).__next__)
    first, second = (stats.mark(torch.device("cpu")) for _ in range(2))
    assert stats.seconds(first, second) == 0.5


def test_drafting_and_verification_are_timed_on_the_device(monkeypatch):
    """By the host's clock, launches would be nothing and the first copy to the host the whole step."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    mark = stats.mark
    monkeypatch.setattr(stats, "mark", lambda device: mark(torch.device("cuda")))
    pipe = Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), Ngram())
    found = pipe.generate("Say: ", max_new_tokens=6, nodes=3).stats
    assert found.num_spec_steps > 0
    assert found.draft_seconds == pytest.approx(0.08 * found.num_spec_steps)  # sequences that join, drafting
    assert found.verify_seconds == pytest.approx(0.04 * found.num_spec_steps)
