"""What visitors may ask, and what they are told where they may not."""

import av
import numpy as np
import pytest
from PIL import Image

from demos import questions
from demos.questions import Question, Upload
from mmspec.errors import UserError


@pytest.fixture
def picture(tmp_path):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "stored.png")
    return Upload(str(tmp_path / "stored.png"), "holiday.png")


@pytest.fixture
def film(tmp_path):
    path = tmp_path / "stored.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(10):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Upload(str(path), "holiday.mp4")


def test_a_first_question_is_plain(picture, film):
    asked = Question("image", " What? ", picture).request()
    assert asked["prompt"] == "What?"
    assert asked["images"][0].size == (20, 10)
    assert len(Question("video", "What?", film, frames=3).request()["videos"][0].frames) == 3
    assert Question("text", "What?").request() == {"prompt": "What?"}


def test_a_later_question_comes_with_the_conversation(picture):
    messages = Question("image", "And?", picture, [("What?", "A box."), ("Red?", "Yes.")]).request()["prompt"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert messages[3]["content"] == [{"type": "text", "text": "Yes."}]
    assert messages[4]["content"] == [{"type": "text", "text": "And?"}]
    messages = Question("text", "And?", None, [("What?", "A box.")]).request()["prompt"]
    assert [message["content"] for message in messages] == ["What?", "A box.", "And?"]


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(prompt, picture):
    with pytest.raises(UserError, match=r"^the prompt must not be empty: type a question$"):
        Question("image", prompt, picture).request()


def test_limits(picture, film, monkeypatch):
    with pytest.raises(UserError, match="at most 4000 characters: got 4001"):
        Question("text", "x" * 4001).request()
    with pytest.raises(UserError, match="at most 12 questions: start a new one"):
        Question("text", "x", None, [("a", "b")] * 12).request()
    with pytest.raises(UserError, match=r"frames must lie in 1\.\.32: got 33"):
        Question("video", "x", film, frames=33).request()
    with pytest.raises(UserError, match=r"max_new_tokens must lie in 1\.\.512: got 513"):
        Question("text", "x", max_new_tokens=513).keywords()
    for temperature in (float("nan"), float("inf"), 5.1, -1.0):
        with pytest.raises(UserError, match="temperature must"):
            Question("text", "x", temperature=temperature).keywords()
    monkeypatch.setattr(questions, "LONGEST_VIDEO", 1.5)
    with pytest.raises(UserError, match=r"^holiday\.mp4: expected a video of at most 1.5 s, received one of 2.0 s$"):
        Question("video", "x", film).request()


def test_the_seed_is_the_one_that_was_asked_for():
    assert [Question("text", "x", seed=seed).keywords()["seed"] for seed in (0, 7, 2**31)] == [0, 7, 2**31]


def test_files_are_called_what_the_visitor_calls_them(tmp_path, film):
    (tmp_path / "stored.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(UserError, match=r"^holiday\.png: expected") as error:
        Question("image", "x", Upload(str(tmp_path / "stored.png"), "holiday.png")).request()
    assert str(tmp_path) not in str(error.value)
    with pytest.raises(UserError, match=r"^holiday\.png: expected a video") as error:
        Question("video", "x", Upload(str(tmp_path / "stored.png"), "holiday.png")).request()
    assert str(tmp_path) not in str(error.value)


def test_nothing_sent_or_no_longer_there(tmp_path):
    with pytest.raises(UserError, match="there is nothing to look at yet: expected an image"):
        Question("image", "x").request()
    with pytest.raises(UserError, match=r"a\.png is no longer here"):
        Question("image", "x", Upload(str(tmp_path / "gone.png"), "a.png")).request()
