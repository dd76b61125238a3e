"""Held-out conversations: each its own, drawn where nothing else draws, asked as users ask."""

import pytest
from PIL import Image

from eval.harness import prompts
from eval.harness.prompts import FIRST, ROOM, SUITES, Conversation, held_out_requests, suite
from vision.training.accuracy import FIRST_SCENE


def test_suites_draw_from_scenes_of_their_own(monkeypatch):
    drawn = {}
    seeded = prompts.seeded
    for name in SUITES:
        taken = drawn[name] = []
        monkeypatch.setattr(
            prompts, "seeded", lambda split, index, taken=taken: taken.append((split, index)) or seeded(split, index)
        )
        suite(name, 30, frames=2)
    every = [scene for taken in drawn.values() for scene in taken]
    assert len(set(every)) == len(every) >= 150
    assert {split for split, _ in every} == {"heldout"}
    assert all(FIRST <= index < FIRST + ROOM * len(SUITES) for _, index in every)
    assert FIRST > FIRST_SCENE + 500_000


def test_what_the_suites_ask():
    images, videos, turns, several, text = (suite(name, 12, frames=3) for name in SUITES)
    assert {(len(c.questions), len(c.images), len(c.videos), c.counted) for c in images} == {(1, 1, 0, 0)}
    assert {(len(c.questions), len(c.images), len(c.videos[0].frames)) for c in videos} == {(1, 0, 3)}
    assert {(len(c.questions), len(c.images), c.counted) for c in turns} == {(4, 1, 1)}
    assert all(len(set(c.questions)) >= 3 for c in turns)
    assert {len(c.images) for c in several} == {2, 3}
    assert not any(c.images or c.videos for c in text)
    assert len({c.questions for c in text}) == 12
    assert len({c.images[0].tobytes() for c in images}) == 12


def test_suites_are_the_same_every_time():
    once, again = suite("turns", 3), suite("turns", 5)
    assert [c.questions for c in once] == [c.questions for c in again[:3]]
    assert [c.images[0].tobytes() for c in once] == [c.images[0].tobytes() for c in again[:3]]


def test_a_later_question_stands_behind_the_answers_before_it():
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
def test_requests_for_speed_are_of_other_scenes(first):
    pictures = {request["images"][0].tobytes() for request in held_out_requests(8, 0, first=first)}
    assert pictures.isdisjoint({c.images[0].tobytes() for c in suite("images", 8)})
