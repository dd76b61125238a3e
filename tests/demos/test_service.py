"""Tests of the races that tabs open on."""

from types import SimpleNamespace

import pytest

from mmspec.demos.catalog import make_catalog
from mmspec.demos.chat_request import ChatRequest
from mmspec.demos.models import ModelCache, Turns
from mmspec.demos.racing import Race, StreamedAnswer
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder


class _Timed(Service):
    """Races of two lanes whose speedups are given."""

    def _race(self, chat, methods):
        self.raced.append(chat.kind)
        lanes = [StreamedAnswer("tiny", name, seconds=1.0) for name in ("none", "msd")]
        yield Race(lanes)
        lanes[0].seconds = next(self.speedups)
        yield Race(lanes, equal=True, runs=3)


@pytest.mark.parametrize(("speedups", "shown"), [([1.5], 1.5), ([1.02, 1.5], 1.5), ([0.5, 0.9], 0.9)])
def test_opening_race_that_does_not_pay_is_repeated_once(tmp_path, speedups, shown):
    service = _Timed(SimpleNamespace(turns=Turns()), make_catalog(["tiny-llava"]), UploadFolder(tmp_path, 2**20))
    service.raced, service.speedups = [], iter([*speedups, 2.0])
    for _ in range(2):  # the second visitor gets the first one's
        *_, race = service.opening(ChatRequest("text", "Hello"))
        assert race.speedup(race.fastest) == shown
    assert service.raced == ["text"] * len(speedups)
    *_, other = service.opening(ChatRequest("image", "Describe the image."))
    assert other.speedup(other.fastest) == 2.0  # each kind has its own


def test_visitor_during_the_opening_race_gets_its_result(tmp_path):
    service = _Timed(SimpleNamespace(turns=Turns()), make_catalog(["tiny-llava"]), UploadFolder(tmp_path, 2**20))
    service.raced, service.speedups = [], iter([1.5, 2.0])
    first, second = (service.opening(ChatRequest("text", "Hello")) for _ in range(2))
    next(first)
    assert next(second).ahead == 1
    list(first)
    *_, race = second
    assert race.speedup(race.fastest) == 1.5
    assert service.raced == ["text"]


def test_a_race_begins_at_once_after_a_warm_up(tmp_path, monkeypatch):
    """Its pipelines are made, and have read the prompt."""
    models = ModelCache(device="cpu")
    service = Service(models, make_catalog(["tiny-hybrid"]), UploadFolder(tmp_path, 2**20))
    chat = ChatRequest("text", "Describe the room.", max_new_tokens=4)
    service.warm_up(chat)
    made: list[str] = []
    loaded = models.get("tiny-hybrid")
    monkeypatch.setattr(loaded, "open", made.append)
    *_, race = service.opening(chat)
    assert made == []
    assert [len(lane.token_ids) for lane in race.lanes] == [4, 4]
