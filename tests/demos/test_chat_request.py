"""Requests and conversations of visitors."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from PIL import Image

from mmspec.demos import chat_request
from mmspec.demos.chat_request import ChatRequest, ChatState, Token, Turn, Upload, parse_conversation
from mmspec.demos.views import tokens_html, turns_html
from mmspec.errors import UserError
from tests.demos.serving import write_video


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "stored_path.png")
    return Upload(str(tmp_path / "stored_path.png"), "holiday.png")


@pytest.fixture
def video(tmp_path):
    return Upload(write_video(tmp_path / "stored_path.mp4", "mpeg4", (32, 32)), "holiday.mp4")


def test_first_request(image, video):
    request = ChatRequest("image", " What? ", [image]).pipeline_request()
    assert request["prompt"] == "What?"
    assert [image.size for image in request["images"]] == [(20, 10)]
    several = ChatRequest("image", "What?", [image] * 8).pipeline_request()
    assert [image.size for image in several["images"]] == [(20, 10)] * 8
    assert len(ChatRequest("video", "What?", [video], frames=3).pipeline_request()["videos"][0].frames) == 3
    assert ChatRequest("text", "What?").pipeline_request() == {"prompt": "What?"}


def test_follow_up_request_contains_the_history(image):
    messages = ChatRequest("image", "And?", [image, image], [("What?", "A box."), ("Red?", "Yes.")]).pipeline_request()[
        "prompt"
    ]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    assert messages[3]["content"] == [{"type": "text", "text": "Yes."}]
    assert messages[4]["content"] == [{"type": "text", "text": "And?"}]
    messages = ChatRequest("text", "And?", (), [("What?", "A box.")]).pipeline_request()["prompt"]
    assert [message["content"] for message in messages] == ["What?", "A box.", "And?"]


def test_requests_that_are_refused(image, video, tmp_path, monkeypatch):
    """Errors name the visitor's file, and nothing of the server."""
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    broken, gone = Upload(str(tmp_path / "broken.png"), "holiday.png"), Upload(str(tmp_path / "gone.png"), "a.png")
    monkeypatch.setattr(chat_request, "MAX_VIDEO_SECONDS", 1.5)
    for request, message in (
        (ChatRequest("image", "", [image]), "^the prompt must not be empty: type a question$"),
        (ChatRequest("image", "  \n", [image]), "^the prompt must not be empty: type a question$"),
        (ChatRequest("text", "x" * 4001), "at most 4000 characters: got 4001"),
        (ChatRequest("text", "x", (), [("a", "b")] * 12), "at most 12 questions: start a new one"),
        (ChatRequest("image", "x", [image] * 9), "at most 8 images: got 9"),
        (ChatRequest("image", "x"), "no image was uploaded: upload one"),
        (ChatRequest("image", "x", [gone]), r"^a\.png was removed"),
        (ChatRequest("image", "x", [broken]), r"^holiday\.png: expected"),
        (ChatRequest("video", "x", [broken]), r"^holiday\.png: expected a video"),
        (ChatRequest("video", "x", [video] * 2), "at most 1 videos: got 2"),
        (ChatRequest("video", "x", [video], frames=33), r"frames must lie in 1\.\.32: got 33"),
        (
            ChatRequest("video", "x", [video]),
            r"^holiday\.mp4: expected .* at most 1.5 s, received one of 2.0 s$",
        ),
    ):
        with pytest.raises(UserError, match=message) as error:
            request.pipeline_request()
        assert str(tmp_path) not in str(error.value)
    for options, message in (
        ({"max_new_tokens": 513}, r"max_new_tokens must lie in 1\.\.512: got 513"),
        *(({"temperature": value}, "temperature must") for value in (float("nan"), float("inf"), 5.1, -1.0)),
    ):
        with pytest.raises(UserError, match=message):
            ChatRequest("text", "x", **options).generate_kwargs()


TOKENS = [Token("A", "first", 0), Token(" <b", "accepted", 1), Token("ox>", "accepted", 1), Token(".", "bonus", 1)]


def kept():
    return ChatState([Turn.of("What?", TOKENS, stopped=True)], seed=7, running="id", opened=True)


def test_page_keeps_a_conversation():
    conversation = kept()
    assert parse_conversation(json.loads(json.dumps(asdict(conversation)))) == conversation
    assert conversation.history == [("What?", "A <box>.")]
    assert turns_html(conversation.turns)[0][1].startswith(tokens_html(TOKENS))
    assert "<b" not in turns_html(conversation.turns)[0][1].replace("&lt;b", "")


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent.pop("turns"),
        lambda sent: sent["turns"][0]["tokens"][0].update(origin='"><script>'),
        lambda sent: sent["turns"][0]["tokens"][0].update(step="many"),
        lambda sent: sent["turns"][0].update(tokens=sent["turns"][0]["tokens"] * 300),
        lambda sent: sent.update(seed=None),
    ],
)
def test_malformed_conversation_is_an_empty_one(change):
    sent = asdict(kept())
    change(sent)
    for malformed in (sent, None, [1]):
        assert parse_conversation(malformed) == ChatState()


def test_long_conversation_is_cut_to_its_last_turns():
    sent = asdict(kept())
    sent["turns"] *= 40
    assert len(parse_conversation(sent).turns) == 12
