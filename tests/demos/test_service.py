"""Tests of the races that tabs open on."""

import pytest

from mmspec.demos.catalog import make_catalog
from mmspec.demos.chat_request import ChatRequest
from mmspec.demos.racing import Race
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
from mmspec.demos.streaming import StreamedAnswer


class _Timed(Service):
    """Races of two lanes whose speedups are given."""

    def race(self, chat, methods=None):
        self.raced.append(chat.kind)
        lanes = [StreamedAnswer("tiny", name, seconds=1.0) for name in ("none", "msd")]
        yield Race(lanes)
        lanes[0].seconds = next(self.speedups)
        yield Race(lanes, equal=True, runs=3)


@pytest.mark.parametrize(("speedups", "shown"), [([1.5], 1.5), ([1.02, 1.5], 1.5), ([0.5, 0.9], 0.9)])
def test_opening_race_that_does_not_pay_is_repeated_once(tmp_path, speedups, shown):
    service = _Timed(None, make_catalog(), UploadFolder(tmp_path, 2**20))
    service.raced, service.speedups = [], iter([*speedups, 2.0])
    for _ in range(2):  # the second visitor gets the first one's
        *_, race = service.opening(ChatRequest("text", "Hello"))
        assert race.speedup(race.fastest) == shown
    assert service.raced == ["text"] * len(speedups)
    *_, other = service.opening(ChatRequest("image", "Describe the image."))
    assert other.speedup(other.fastest) == 2.0  # each kind has its own
