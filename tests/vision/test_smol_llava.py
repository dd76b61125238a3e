"""smol-llava, loaded as by users: its connector, completed by EfficientNet-lite0 and SmolLM2 from their packages."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mmspec
from mmspec import plugins
from mmspec.eval.suite.tasks import TASKS
from mmspec.targets.completed import LABELS
from mmspec.targets.packing import weights_kind
from mmspec.vision.efficientnet import lite0
from mmspec.vision.embedded import photograph, samples, smol_llava
from tests.compiled import needs_kernels

missing = [name for name in (*smol_llava.packages, "gguf", "accelerate") if find_spec(name) is None]
needs_packages = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

CAPTIONS = TASKS["scenes-captions"]
SCENES = CAPTIONS.samples(None, 8)
IMAGES = [scene.conversation.images[0] for scene in SCENES]


@pytest.fixture(scope="module")
def pipe(one_thread):
    return mmspec.load("smol-llava", device="cpu")


def test_it_is_offered_where_its_parts_are_installed(monkeypatch):
    assert smol_llava.packages == (plugins.smollm2.package, lite0.package)
    for installed in (smol_llava.packages, smol_llava.packages[:1], ()):
        monkeypatch.setattr(
            plugins, "find_spec", lambda name, installed=installed: object() if name in installed else None
        )
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
def test_answers_equal_generate(pipe):
    assert weights_kind(pipe.model) == "Int4Blocks"
    described = {"prompt": "Describe the image.", "images": [photograph()]}
    requests = [{"prompt": "List the objects.", "images": [image]} for image in IMAGES[:3]]
    for request in (described, *requests):
        answer = pipe.generate(**request, max_new_tokens=160)
        prompt = pipe.encode([request])
        assert int((prompt.input_ids == pipe.model.config.image_token_index).sum()) == 36
        plain = pipe.model.generate(input_ids=prompt.input_ids, **prompt.inputs, max_new_tokens=160, do_sample=False)
        assert answer.token_ids == plain[0, prompt.input_ids.shape[1] :].tolist()


@pytest.mark.long
@needs_packages
@needs_kernels
def test_a_photograph_and_drawn_scenes_are_described(pipe):
    assert "fish" in pipe.generate("Describe the image.", images=photograph()).text
    listed = [pipe.generate("List the objects.", images=image, max_new_tokens=160).text for image in IMAGES]
    assert CAPTIONS.score is not None
    assert CAPTIONS.score([(scene, [text]) for scene, text in zip(SCENES, listed, strict=True)])["mentioned"] > 0.5


@pytest.mark.long
@needs_packages
def test_videos_several_images_and_text_are_answered(pipe):
    requests = [
        {"prompt": "Describe the video.", "videos": [samples() / "clip.mp4"]},
        {"prompt": "Describe the images.", "images": IMAGES[:2]},
        {"prompt": "What is the capital of France?"},
    ]
    together = pipe.generate_batch(requests, max_new_tokens=16)
    alone = [pipe.generate(**request, max_new_tokens=16) for request in requests]
    assert all(answer.text for answer in together)
    if weights_kind(pipe.model) == "Int4Blocks":
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


@needs_packages
@pytest.mark.long
def test_its_configuration_is_read_in_a_new_process():
    """Which has not imported the tower's classes."""
    script = "from mmspec.eval.suite.run import is_visual; print(is_visual('smol-llava'))"
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
