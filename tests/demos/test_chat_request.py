"""Requests and conversations of visitors."""

from __future__ import annotations

import json
from dataclasses import asdict

import av
import numpy as np
import pytest
from PIL import Image

from mmspec.demos import chat_request
from mmspec.demos.chat_request import ChatRequest, Upload
from mmspec.demos.conversation import Conversation, Turn, parse
from mmspec.demos.racing import Token
from mmspec.demos.views import tokens_html, turns_html
from mmspec.errors import UserError


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "stored_path.png")
    return Upload(str(tmp_path / "stored_path.png"), "holiday.png")


@pytest.fixture
def video(tmp_path):
    path = tmp_path / "stored_path.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(10):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Upload(str(path), "holiday.mp4")


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


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt_raises(prompt, image):
    with pytest.raises(UserError, match=r"^the prompt must not be empty: type a question$"):
        ChatRequest("image", prompt, [image]).pipeline_request()


def test_limits_raise(image, video, monkeypatch):
    with pytest.raises(UserError, match="at most 4000 characters: got 4001"):
        ChatRequest("text", "x" * 4001).pipeline_request()
    with pytest.raises(UserError, match="at most 12 questions: start a new one"):
        ChatRequest("text", "x", (), [("a", "b")] * 12).pipeline_request()
    with pytest.raises(UserError, match=r"frames must lie in 1\.\.32: got 33"):
        ChatRequest("video", "x", [video], frames=33).pipeline_request()
    with pytest.raises(UserError, match="at most 8 images: got 9"):
        ChatRequest("image", "x", [image] * 9).pipeline_request()
    with pytest.raises(UserError, match="at most 1 videos: got 2"):
        ChatRequest("video", "x", [video] * 2).pipeline_request()
    with pytest.raises(UserError, match=r"max_new_tokens must lie in 1\.\.512: got 513"):
        ChatRequest("text", "x", max_new_tokens=513).generate_kwargs()
    for temperature in (float("nan"), float("inf"), 5.1, -1.0):
        with pytest.raises(UserError, match="temperature must"):
            ChatRequest("text", "x", temperature=temperature).generate_kwargs()
    monkeypatch.setattr(chat_request, "MAX_VIDEO_SECONDS", 1.5)
    with pytest.raises(UserError, match=r"^holiday\.mp4: expected a video of at most 1.5 s, received one of 2.0 s$"):
        ChatRequest("video", "x", [video]).pipeline_request()


def test_seed_is_passed_on():
    assert [ChatRequest("text", "x", seed=seed).generate_kwargs()["seed"] for seed in (0, 7, 2**31)] == [0, 7, 2**31]


def test_errors_name_the_visitors_file(tmp_path, video):
    (tmp_path / "stored_path.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(UserError, match=r"^holiday\.png: expected") as error:
        ChatRequest("image", "x", [Upload(str(tmp_path / "stored_path.png"), "holiday.png")]).pipeline_request()
    assert str(tmp_path) not in str(error.value)
    with pytest.raises(UserError, match=r"^holiday\.png: expected a video") as error:
        ChatRequest("video", "x", [Upload(str(tmp_path / "stored_path.png"), "holiday.png")]).pipeline_request()
    assert str(tmp_path) not in str(error.value)


def test_missing_upload_raises(tmp_path):
    with pytest.raises(UserError, match="no image was uploaded: upload one"):
        ChatRequest("image", "x").pipeline_request()
    with pytest.raises(UserError, match=r"a\.png was removed"):
        ChatRequest("image", "x", [Upload(str(tmp_path / "gone.png"), "a.png")]).pipeline_request()


TOKENS = [Token("A", "first", 0), Token(" <b", "accepted", 1), Token("ox>", "accepted", 1), Token(".", "bonus", 1)]


def kept():
    return Conversation([Turn.of("What?", TOKENS, stopped=True)], seed=7, running="id", opened=True)


def test_page_keeps_a_conversation():
    conversation = kept()
    assert parse(json.loads(json.dumps(asdict(conversation)))) == conversation
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
    assert parse(sent) == Conversation()
    assert parse(None) == parse([1]) == Conversation()


def test_long_conversation_is_cut_to_its_last_turns():
    sent = asdict(kept())
    sent["turns"] *= 40
    assert len(parse(sent).turns) == 12
