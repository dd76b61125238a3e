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


def test_drafting_saves_most_passes(pipe):
    rows = pipe.generate_batch([request(scene) for scene in SCENES], nodes=16, max_new_tokens=200)
    steps, tokens = (
        sum(getattr(row.stats, name) for row in rows) for name in ("num_spec_steps", "num_generated_tokens")
    )
    assert tokens / steps > 4.2


def test_drafters_that_come_with_it(pipe):
    assert type(pipe.drafter).__name__ == "MSD"
    assert pipe.drafter.network.config.decoupled
    assert mmspec.load("tiny-llava", drafter="recycle", device="cpu").drafter.entries > 1000
    assert mmspec.load("tiny-llava", drafter="msd", device="cpu").drafter.verifier["name_or_path"] == "tiny-llava"


def test_samples(pipe):
    image = pipe.generate("Describe the image.", images=samples() / "scene.png")
    video = pipe.generate("Describe the video.", videos=samples() / "clip.mp4")
    assert image.finish_reason == video.finish_reason == "stop"
    assert min(len(image.token_ids), len(video.token_ids)) > 15


def test_what_travels_is_small():
    files = [path for path in Path(tiny_llava()).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jinja", ".md", ".safetensors"}
    assert sum(path.stat().st_size for path in files) < 12_500_000
