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
