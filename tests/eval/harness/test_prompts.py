"""Held-out conversations: distinct, from their own index ranges, in chat format."""

from PIL import Image

from mmspec.eval import prefix_cache
from mmspec.eval.harness.prompts import Conversation


def test_conversations_about_cached_prefixes():
    first, second = (prefix_cache.draw_conversation(index) for index in (1, 2))
    assert len(set(first.questions)) >= 3
    assert (len(first.questions), len(first.images)) == (4, 1)
    assert first.questions == prefix_cache.draw_conversation(1).questions
    assert first.images[0].tobytes() != second.images[0].tobytes()


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
