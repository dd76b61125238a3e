"""Conversations in chat format, and held-out prompts."""

import pytest
from PIL import Image

from mmspec.errors import UserError
from mmspec.eval.harness.prompts import (
    Questions,
    held_out_requests,
    held_out_texts,
    mixed_requests,
    warm_up_requests,
)


def test_a_later_question_follows_the_answers_so_far():
    picture = Image.new("RGB", (8, 8))
    conversation = Questions(("What is it?", "And its colour?", "Why?"), (picture,))
    request = conversation.request(["A star. ", "Red."])
    assert request["images"] == [picture]
    first, *later = request["prompt"]
    assert first == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    assert [message["content"] for message in later] == ["A star.", "And its colour?", "Red.", "Why?"]
    assert [message["role"] for message in later] == ["assistant", "user"] * 2
    assert Questions(("Hello!",)).request([])["prompt"] == "Hello!"


def test_held_out_sets_have_no_prompt_twice():
    images, clips = held_out_requests(24, 0), held_out_requests(0, 8)
    others = warm_up_requests(8, visual=True) + mixed_requests(96)
    shown = [request["images"][0].tobytes() for request in images + others]
    assert len(set(shown)) == len(shown)
    assert len({clip["videos"][0].frames[0].tobytes() for clip in clips}) == 8
    assert [clip["videos"][0].times for clip in clips] == [[float(k) for k in range(8)]] * 8
    texts = [request["prompt"] for request in held_out_texts(96) + warm_up_requests(8, visual=False)]
    assert len(set(texts)) == len(texts)
    repeated = warm_up_requests(11, visual=False)
    assert repeated[8:] == repeated[:3]


@pytest.mark.parametrize("frames", [1, 2, 5, 8, 11, 16])
def test_frames_are_spread_over_the_clip(frames):
    (clip,), (whole,) = (held_out_requests(0, 1, n) for n in (frames, 8 if frames <= 8 else 16))
    chosen, all_frames = ([image.tobytes() for image in one["videos"][0].frames] for one in (clip, whole))
    assert len(chosen) == frames
    assert (chosen[0], chosen[-1]) == (all_frames[0], all_frames[-1 if frames > 1 else 0])
    assert set(chosen) <= set(all_frames)


def test_more_than_there_are_raise():
    for ask, message in (
        (lambda: held_out_texts(97), "expected at most 96 held-out texts, got 97"),
        (lambda: held_out_requests(0, 1, 17), "expected at most 16 frames of a held-out clip, got 17"),
    ):
        with pytest.raises(UserError, match=message):
            ask()
