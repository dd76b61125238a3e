"""Held-out conversations: distinct, from their own index ranges, in chat format."""

import pytest
from PIL import Image

from mmspec.eval.harness import prompts
from mmspec.eval.harness.prompts import (
    FIRST_INDEX,
    INDICES_PER_SUITE,
    SUITES,
    Conversation,
    held_out_requests,
    suite_conversations,
)
from mmspec.vision.training.accuracy import FIRST_SCENE


def test_suites_have_disjoint_index_ranges(monkeypatch):
    drawn = {}
    seeded = prompts.seeded
    for name in SUITES:
        taken = drawn[name] = []
        monkeypatch.setattr(
            prompts, "seeded", lambda split, index, taken=taken: taken.append((split, index)) or seeded(split, index)
        )
        suite_conversations(name, 30, frames=2)
    every = [scene for taken in drawn.values() for scene in taken]
    assert len(set(every)) == len(every) >= 150
    assert {split for split, _ in every} == {"heldout"}
    assert all(FIRST_INDEX <= index < FIRST_INDEX + INDICES_PER_SUITE * len(SUITES) for _, index in every)
    assert FIRST_INDEX > FIRST_SCENE + 500_000


def test_content_of_the_suites():
    images, videos, turns, several, text = (suite_conversations(name, 12, frames=3) for name in SUITES)
    assert {(len(c.questions), len(c.images), len(c.videos), c.counted) for c in images} == {(1, 1, 0, 0)}
    assert {(len(c.questions), len(c.images), len(c.videos[0].frames)) for c in videos} == {(1, 0, 3)}
    assert {(len(c.questions), len(c.images), c.counted) for c in turns} == {(4, 1, 1)}
    assert all(len(set(c.questions)) >= 3 for c in turns)
    assert {len(c.images) for c in several} == {2, 3}
    assert not any(c.images or c.videos for c in text)
    assert len({c.questions for c in text}) == 12
    assert len({c.images[0].tobytes() for c in images}) == 12


def test_suites_are_deterministic():
    once, again = suite_conversations("turns", 3), suite_conversations("turns", 5)
    assert [c.questions for c in once] == [c.questions for c in again[:3]]
    assert [c.images[0].tobytes() for c in once] == [c.images[0].tobytes() for c in again[:3]]


def test_a_later_question_follows_the_answers_so_far():
    picture = Image.new("RGB", (8, 8))
    conversation = Conversation(("What is it?", "And its colour?", "Why?"), (picture,))
    request = conversation.request(["A star. ", "Red."])
    assert request["images"] == [picture]
    first, *later = request["prompt"]
    assert first == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    assert [message["content"] for message in later] == ["A star.", "And its colour?", "Red.", "Why?"]
    assert [message["role"] for message in later] == ["assistant", "user"] * 2
    assert Conversation(("Hello!",)).request([])["prompt"] == "Hello!"


@pytest.mark.parametrize("first", [4000, 5000])
def test_speed_requests_use_other_scenes(first):
    pictures = {request["images"][0].tobytes() for request in held_out_requests(8, 0, first=first)}
    assert pictures.isdisjoint({c.images[0].tobytes() for c in suite_conversations("images", 8)})
