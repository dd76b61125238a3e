"""Tests of the embedded model and its drafters, loaded as by users."""

from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import UserError
from mmspec.eval.suite.tasks import TASKS
from mmspec.vision.embedded import samples, tiny_llava

CAPTIONS = TASKS["scenes-captions"]
SCENES = CAPTIONS.samples(None, 12)


@pytest.fixture(scope="module")
def pipe():
    return mmspec.load("tiny-llava", device="cpu")


def request(scene):
    return {"prompt": "Describe the image.", "images": [scene.conversation.images[0]]}


def test_captions_equal_generate_and_are_correct(pipe):
    answered = []
    for scene in SCENES[:4]:
        answer = pipe.generate(**request(scene), max_new_tokens=200)
        prompt = pipe.encode([request(scene)])
        plain = pipe.model.generate(input_ids=prompt.input_ids, **prompt.inputs, max_new_tokens=200, do_sample=False)
        assert answer.token_ids == plain[0, prompt.input_ids.shape[1] :].tolist()
        assert answer.finish_reason == "stop"
        answered.append((scene, [answer.text]))
    assert CAPTIONS.score(answered)["mentioned"] > 0.9


@pytest.mark.parametrize("drafter", ["flash", "msd"])
def test_drafters_acceptance_length(pipe, drafter):
    drafting = mmspec.load("tiny-llava", drafter=drafter, device="cpu")
    rows = drafting.generate_batch([request(scene) for scene in SCENES], nodes=16, max_new_tokens=200)
    steps, tokens = (
        sum(getattr(row.stats, name) for row in rows) for name in ("num_spec_steps", "num_generated_tokens")
    )
    assert tokens / steps > 4.2


def test_embedded_drafters(pipe):
    config = pipe.drafter.network.config
    assert (type(pipe.drafter).__name__, config.slots, config.latents) == ("Flash", 12, 4)
    assert mmspec.load("tiny-llava", drafter="recycle", device="cpu").drafter.entries > 1000
    drafter = mmspec.load("tiny-llava", drafter="msd", device="cpu").drafter
    assert type(drafter).__name__ == "MSD"
    assert drafter.network.config.decoupled
    assert drafter.verifier["name_or_path"] == "tiny-llava"


def test_size_of_embedded_files():
    files = [path for path in Path(tiny_llava()).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jinja", ".md", ".safetensors"}
    assert sum(path.stat().st_size for path in files) < 14_000_000


def test_tokenizer_settings_are_not_changed():
    pipe = mmspec.load("tiny-llava", drafter=None, device="cpu")
    tokenizer = pipe.processor.tokenizer
    expected = [pipe.generate(prompt, max_new_tokens=8).token_ids for prompt in ("Hello", "A red star, and a circle?")]
    tokenizer.pad_token, tokenizer.padding_side = None, "right"
    for _ in range(2):
        rows = pipe.generate_batch([{"prompt": "Hello"}, {"prompt": "A red star, and a circle?"}], max_new_tokens=8)
        assert [row.token_ids for row in rows] == expected
        assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.padding_side) == (None, None, "right")


@pytest.mark.parametrize(("keywords", "images"), [({}, 8), ({"frames": 3}, 3)])
def test_options_hold_for_videos_in_chat_messages(pipe, keywords, images):
    clip, question = samples() / "clip.mp4", {"type": "text", "text": "Describe the video."}
    messages = [{"role": "user", "content": [{"type": "video", "path": clip}, question]}]
    prompt = pipe.encode([{"prompt": messages}], **keywords)
    assert len(prompt.inputs["pixel_values"]) == images
    beside = pipe.encode([{"prompt": question["text"], "videos": clip}], **keywords)
    assert torch.equal(prompt.input_ids, beside.input_ids)
    assert torch.equal(prompt.inputs["pixel_values"], beside.inputs["pixel_values"])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"frames": 0}, r"^frames must be >= 1: got 0$"),
        ({"fps": float("nan")}, "^fps must be a finite number: got nan$"),
        ({"tempreature": 1}, "^unknown option for this model: got tempreature; did you mean temperature.$"),
    ],
)
def test_video_options_are_checked_without_a_video(pipe, keywords, message):
    with pytest.raises(UserError, match=message):
        pipe.generate("Describe the image.", images=samples() / "scene.png", **keywords)
