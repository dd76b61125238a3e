"""The embedded models and their drafters, loaded as by users; smol-llava is completed by parts from packages."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import UserError, plugins
from mmspec.eval.suite.tasks import TASKS
from mmspec.targets.packing import weights_kind
from mmspec.targets.sources import LABELS
from mmspec.vision.efficientnet import lite0
from mmspec.vision.embedded import photograph, samples, smol_llava, tiny_llava
from tests.compiled import needs_kernels

CAPTIONS = TASKS["scenes-captions"]
SCENES = CAPTIONS.samples(None, 12)
missing = [name for name in (*smol_llava.packages, "gguf", "accelerate") if find_spec(name) is None]
needs_packages = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

IMAGES = [scene.conversation.images[0] for scene in SCENES[:8]]


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
    assert sum(row.stats.num_generated_tokens for row in rows) > 4.2 * sum(row.stats.num_spec_steps for row in rows)


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


@pytest.fixture(scope="module")
def smol(one_thread):
    return mmspec.load("smol-llava", device="cpu")


def test_it_is_offered_where_its_parts_are_installed(monkeypatch):
    assert smol_llava.packages == (plugins.smollm2.package, lite0.package)
    for installed in (smol_llava.packages, smol_llava.packages[:1], ()):
        monkeypatch.setattr(plugins, "find_spec", lambda name, installed=installed: name in installed or None)
        assert ("smol-llava" in plugins.embedded()) == (installed == smol_llava.packages)
        assert plugins.default_model() == ("smol-llava" if installed == smol_llava.packages else "tiny-llava")


def test_what_travels_has_no_matrix_of_the_language_model():
    from safetensors import safe_open

    folder = Path(smol_llava())
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    language = {name: shape for name, shape in shapes.items() if "language_model" in name}
    assert len(language) == 61
    assert {name: shapes[name] for name in shapes if "vision_tower" in name} == {LABELS: [1000, 4]}
    assert all(shape == [576] and name.endswith("norm.weight") for name, shape in language.items())
    assert not list(folder.glob("tokenizer*"))


@pytest.mark.long
@needs_packages
@needs_kernels
def test_answers_equal_generate(smol):
    assert weights_kind(smol.model) == "Int4Blocks"
    described = {"prompt": "Describe the image.", "images": [photograph()]}
    requests = [{"prompt": "List the objects.", "images": [image]} for image in IMAGES[:3]]
    for request in (described, *requests):
        answer = smol.generate(**request, max_new_tokens=160)
        prompt = smol.encode([request])
        assert int((prompt.input_ids == smol.model.config.image_token_index).sum()) == 36
        plain = smol.model.generate(input_ids=prompt.input_ids, **prompt.inputs, max_new_tokens=160, do_sample=False)
        assert answer.token_ids == plain[0, prompt.input_ids.shape[1] :].tolist()


@pytest.mark.long
@needs_packages
@needs_kernels
def test_a_photograph_and_drawn_scenes_are_described(smol):
    assert "fish" in smol.generate("Describe the image.", images=photograph()).text
    listed = [smol.generate("List the objects.", images=image, max_new_tokens=160).text for image in IMAGES]
    assert CAPTIONS.score is not None
    assert CAPTIONS.score([(scene, [text]) for scene, text in zip(SCENES, listed, strict=False)])["mentioned"] > 0.5


@pytest.mark.long
@needs_packages
def test_videos_several_images_and_text_are_answered(smol):
    requests = [
        {"prompt": "Describe the video.", "videos": [samples() / "clip.mp4"]},
        {"prompt": "Describe the images.", "images": IMAGES[:2]},
        {"prompt": "What is the capital of France?"},
    ]
    together = smol.generate_batch(requests, max_new_tokens=16)
    alone = [smol.generate(**request, max_new_tokens=16) for request in requests]
    assert all(answer.text for answer in together)
    if weights_kind(smol.model) == "Int4Blocks":
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


@needs_packages
@pytest.mark.long
def test_its_configuration_is_read_in_a_new_process():
    """Which has not imported the tower's classes."""
    script = "from mmspec.loading import load_config; from mmspec.plugins import target_class; "
    script += "print(target_class(load_config('smol-llava')).processor_class.reads_media)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "True\n"


@needs_packages
@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("image", [photograph(), IMAGES[0]], ids=["photograph", "drawn"])
def test_its_drafter_drafts_from_the_first_request_on(image):
    request = {"prompt": "Describe the image.", "images": [image], "nodes": 14}
    pipes = [mmspec.load("smol-llava", drafter, device="cpu") for drafter in ("auto", "recycle")]
    flash, empty = (pipe.generate(**request).stats.mean_acceptance_length for pipe in pipes)
    assert flash > empty + 1
