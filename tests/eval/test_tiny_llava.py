"""Accuracy of the vision-language model: an oracle scores full marks, nonsense nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

pytest.importorskip("av")

import av

from mmspec.eval import tiny_llava
from mmspec.vision import embedded
from mmspec.vision.scenes.captions import caption, listing
from mmspec.vision.scenes.clips import describe_clip, sample_clip
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.questions import KINDS, ask
from mmspec.vision.scenes.scene import Item, Scene, sample_scene, seeded
from mmspec.vision.training import accuracy


def oracle(prompts: list[str], images: list[list[Any]]) -> list[str]:
    """True answers, reconstructed from the seeds that the measurement uses."""
    if prompts[0] in ("Describe the image.", "List the objects."):
        scenes = [sample_scene(seeded("heldout", accuracy.FIRST_SCENE + k)) for k in range(len(prompts))]
        described = prompts[0] == "Describe the image."
        return [caption(scene, random.Random(1)) if described else listing(scene) for scene in scenes]
    if prompts[0] == "Describe the video.":
        clips = [sample_clip(seeded("heldout", accuracy.FIRST_SCENE + k)) for k in range(len(prompts))]
        return [describe_clip(clip, random.Random(1)) for clip in clips]
    asked: dict[str, list[str]] = {}
    for kind in KINDS:
        for index in range(200):
            rng = seeded("heldout", accuracy.FIRST_SCENE + index)
            question = ask(sample_scene(rng), rng, kind)
            if question is not None:
                asked.setdefault(question.question, []).append(question.answer)
    # Questions that occur several times are answered in the order of their scenes.
    replies = {question: iter(answers) for question, answers in asked.items()}
    return [next(replies[prompt]) for prompt in prompts]


class Words:
    """A stand-in processor that counts words as tokens."""

    class _Ids:
        def __init__(self, text: str) -> None:
            self.input_ids = text.split()

    def tokenizer(self, text: str) -> Words._Ids:
        return Words._Ids(text)


def test_an_oracle_scores_full_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "answer", lambda model, processor, prompts, images: oracle(prompts, images))
    report = accuracy.scene_accuracy(None, Words(), scenes=40)
    assert report["objects invented"] == 0
    assert report["caption tokens"] > 20
    shares = {name: value for name, value in report.items() if name not in ("objects invented", "caption tokens")}
    assert {name for name, value in shares.items() if value != 1.0} == set()
    assert {f"question {kind}" for kind in KINDS} < set(shares)


def test_nonsense_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(model: Any, processor: Any, prompts: list[str], images: list[list[Any]]) -> list[str]:
        return ['A mauve star is nowhere and the sign reads "".'] * len(prompts)

    monkeypatch.setattr(accuracy, "answer", nonsense)
    report = accuracy.scene_accuracy(None, Words(), scenes=40)
    assert report["question text"] == report["question shape"] == 0.0
    zero = {name: value for name, value in report.items() if name.startswith(("video", "objects", "words", "whole"))}
    assert set(zero.values()) == {0.0}
    assert report["question position"] == report["question colour"] == 0.0


def test_half_right_captions_count_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_other(model: Any, processor: Any, prompts: list[str], images: list[list[Any]]) -> list[str]:
        return [text if index % 2 else "Nothing." for index, text in enumerate(oracle(prompts, images))]

    monkeypatch.setattr(accuracy, "answer", every_other)
    report = accuracy._caption_accuracy(None, Words(), 40)
    assert report["whole captions"] == 0.5
    assert 0.3 < report["objects"] < 0.7


@pytest.mark.parametrize(("fault", "spoilt"), [("colour", 1), ("shape", 1), ("position", 1), (None, 0)])
def test_one_wrong_attribute_spoils_the_object(monkeypatch: pytest.MonkeyPatch, fault: str | None, spoilt: int) -> None:
    scene = Scene("white", (Item("star", "red", "small", 0, 0, 15), Item("ring", "blue", "large", 2, 2, 26)))
    words = {"colour": "red", "shape": "star", "position": "top left"}
    swaps = {"colour": "pink", "shape": "cross", "position": "top right"}
    text = "A small red star is at the top left. A big blue ring is at the bottom right."
    if fault:
        text = text.replace(words[fault], swaps[fault])
    monkeypatch.setattr(accuracy, "answer", lambda model, processor, prompts, images: [text])
    monkeypatch.setattr(accuracy, "sample_scene", lambda rng: scene)
    report = accuracy._caption_accuracy(None, Words(), 1)
    assert report["objects"] == 1 - spoilt / 2
    assert report["whole captions"] == 1 - spoilt
    for name in words:
        assert report[name] == (0.5 if name == fault else 1.0)


def test_the_command_prints_a_table_and_one_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"objects": 0.91, "words": 0.85, "caption tokens": 61.5}
    monkeypatch.setattr(tiny_llava, "scene_accuracy", lambda model, processor, scenes: figures)
    result = CliRunner().invoke(tiny_llava.main, ["--scenes", "3"])
    assert result.exit_code == 0, result.output
    assert "91.0 %" in result.output
    assert "90 %" in result.output
    line = json.loads(result.output.strip().splitlines()[-1])
    assert line["objects"] == 0.91
    assert line["model"] == "tiny-llava"
    assert line["scenes"] == 3


def test_the_embedded_model_reaches_its_goals() -> None:
    folder = embedded.tiny_llava()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
    report = accuracy._caption_accuracy(model, AutoProcessor.from_pretrained(folder), 20)
    for name, goal in tiny_llava.GOALS.items():
        assert report[name] >= goal, report
    assert report["caption tokens"] > 25
    assert report["distinct captions"] == 1.0


def test_the_samples_show_held_out_scenes() -> None:
    shown = np.asarray(Image.open(embedded.samples() / "scene.png"))
    assert np.array_equal(shown, draw(sample_scene(seeded("heldout", 23)), 4))
    with av.open(str(embedded.samples() / "clip.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    scenes = sample_clip(seeded("heldout", 25)).frames(len(frames))
    for frame, scene in zip(frames, scenes, strict=True):
        assert np.abs(frame.astype(int) - draw(scene, 4)).mean() < 12


def test_answers_do_not_depend_on_what_else_is_in_the_batch() -> None:
    folder = embedded.tiny_llava()
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "right"  # the default of many checkpoints
    scenes = [sample_scene(seeded("heldout", accuracy.FIRST_SCENE + index)) for index in range(3)]
    prompts = ["Describe the image.", "List the objects.", "Describe the image from left to right."]
    images = [[accuracy.picture(scene)] for scene in scenes]
    together = accuracy.answer(model, processor, prompts, images)
    for prompt, own, expected in zip(prompts, images, together, strict=True):
        assert accuracy.answer(model, processor, [prompt], [own]) == [expected]
