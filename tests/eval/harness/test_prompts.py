"""Conversations in chat format."""

from PIL import Image

from mmspec.eval.harness.prompts import Conversation


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
