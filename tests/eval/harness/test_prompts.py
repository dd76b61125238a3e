"""Conversations in chat format, and held-out prompts."""

from PIL import Image

from mmspec.eval.harness.prompts import Questions, held_out_requests, warm_up_requests


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
    clips = held_out_requests("clips", 8)
    others = held_out_requests("images", 24) + warm_up_requests(8, visual=True) + held_out_requests("mixed", 96)
    shown = [request["images"][0].tobytes() for request in others]
    assert len(set(shown)) == len(shown)
    assert len({clip["videos"][0].frames[0].tobytes() for clip in clips}) == 8
    assert [clip["videos"][0].times for clip in clips] == [[float(k) for k in range(8)]] * 8
    texts = [request["prompt"] for request in held_out_requests("prompts", 96) + warm_up_requests(8, visual=False)]
    assert len(set(texts)) == len(texts)
    repeated = warm_up_requests(11, visual=False)
    assert repeated[8:] == repeated[:3]
