"""The embedded model and its drafter, as a user gets them."""

from pathlib import Path

import pytest

import mmspec
from vision.embedded import samples, tiny_llava
from vision.scenes.reading import read_objects
from vision.scenes.scene import sample_scene, seeded
from vision.training.accuracy import FIRST_SCENE, picture

SCENES = [sample_scene(seeded("heldout", FIRST_SCENE + 9000 + k), sign_share=0.0) for k in range(12)]


@pytest.fixture(scope="module")
def pipe():
    return mmspec.load("tiny-llava", device="cpu")


def request(scene):
    return {"prompt": "Describe the image.", "images": [picture(scene)]}


def test_captions_equal_generate_and_are_right(pipe):
    named = shown = 0
    for scene in SCENES:
        answer = pipe.generate(**request(scene), max_new_tokens=200)
        prompt = pipe.target.encode([request(scene)])
        plain = pipe.model.generate(input_ids=prompt.input_ids, **prompt.inputs, max_new_tokens=200, do_sample=False)
        assert answer.token_ids == plain[0, prompt.input_ids.shape[1] :].tolist()
        assert answer.finish_reason == "stop"
        mentioned = {(m.colour, m.shape, m.cell) for m in read_objects(answer.text)}
        shown += len(scene.items)
        named += sum((item.colour, item.shape, item.cell) in mentioned for item in scene.items)
    assert named / shown > 0.8


@pytest.mark.parametrize("drafter", ["flash", "msd"])
def test_drafting_saves_most_passes(pipe, drafter):
    asked = mmspec.load("tiny-llava", drafter=drafter, device="cpu")
    rows = asked.generate_batch([request(scene) for scene in SCENES], nodes=16, max_new_tokens=200)
    steps, tokens = (
        sum(getattr(row.stats, name) for row in rows) for name in ("num_spec_steps", "num_generated_tokens")
    )
    assert tokens / steps > 4.2


def test_drafters_that_come_with_it(pipe):
    config = pipe.drafter.network.config
    assert (type(pipe.drafter).__name__, config.slots, config.latents) == ("Flash", 12, 4)
    assert mmspec.load("tiny-llava", drafter="recycle", device="cpu").drafter.entries > 1000
    drafter = mmspec.load("tiny-llava", drafter="msd", device="cpu").drafter
    assert type(drafter).__name__ == "MSD"
    assert drafter.network.config.decoupled
    assert drafter.verifier["name_or_path"] == "tiny-llava"


@pytest.mark.parametrize("frames", [4, 8, 16])
def test_batches_of_clips_equal_generate(pipe, frames):
    asked = [{"prompt": "Describe the video.", "videos": [samples() / "clip.mp4"]}, request(SCENES[0])]
    answers = pipe.generate_batch(asked, frames=frames, max_new_tokens=90)
    for one, answer in zip(asked, answers, strict=True):
        prompt = pipe.target.encode([one], frames=frames)
        plain = pipe.model.generate(input_ids=prompt.input_ids, **prompt.inputs, max_new_tokens=90, do_sample=False)
        assert answer.token_ids == plain[0, prompt.input_ids.shape[1] :].tolist()
        assert answer.stats.mean_acceptance_length > 1.5


def test_samples(pipe):
    image = pipe.generate("Describe the image.", images=samples() / "scene.png")
    video = pipe.generate("Describe the video.", videos=samples() / "clip.mp4")
    assert image.finish_reason == video.finish_reason == "stop"
    assert min(len(image.token_ids), len(video.token_ids)) > 15


def test_what_travels_is_small():
    files = [path for path in Path(tiny_llava()).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jinja", ".md", ".safetensors"}
    assert sum(path.stat().st_size for path in files) < 14_000_000
