"""The speed measurement: fair to every way, and true about equality."""

import json

import pytest
from click.testing import CliRunner
from PIL import Image

import mmspec
from eval import speed
from eval.speed import PLAIN, TRANSFORMERS, Way, held_out_requests, measure
from mmspec.drafters.recycle import Recycle
from tests.standin import save_llava


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("standin")))


def requests(count):
    return [{"prompt": f"Picture {k}", "images": [Image.new("RGB", (9, 9), (40 * k, 9, 9))]} for k in range(count)]


def test_every_way_is_timed_and_compared(folder):
    pipe = mmspec.load(folder, drafter=None)
    ways = [Way(TRANSFORMERS), Way(PLAIN), Way("recycle", Recycle(), 6)]
    measure(pipe, requests(2), ways, rounds=3, max_new_tokens=10)
    for way in ways:
        assert len(way.total) == len(way.decoding) == len(way.lengths) == way.equal == 2
        assert all(0 < decoding < total for decoding, total in zip(way.decoding, way.total, strict=True))


def test_a_wrong_answer_is_counted(folder, monkeypatch):
    pipe = mmspec.load(folder, drafter=None)
    ways = [Way(TRANSFORMERS), Way(PLAIN)]
    monkeypatch.setattr(pipe.target, "head", lambda hidden: -type(pipe.target).head(pipe.target, hidden))
    pipe.target._head_checked = True
    measure(pipe, requests(1), ways, rounds=1, max_new_tokens=5)
    assert [way.equal for way in ways] == [1, 0]


def test_no_prompt_is_drafted_from_its_own_answer(folder):
    pipe = mmspec.load(folder, drafter=None)
    once, often = Way("once", Recycle(), 6), Way("often", Recycle(), 6)
    measure(pipe, requests(2), [once], rounds=1, max_new_tokens=20)
    measure(pipe, requests(2), [often], rounds=4, max_new_tokens=20)
    assert often.drafter._table == once.drafter._table


def test_prompts_are_held_out():
    images = [request["images"][0].tobytes() for request in held_out_requests(3, 0)]
    others = [request["images"][0].tobytes() for request in held_out_requests(3, 0, first=4000)]
    assert len(set(images + others)) == 6
    (clip,) = held_out_requests(0, 1, frames=4)[0]["videos"]
    assert len(clip.frames) == 4


def test_the_command_ends_with_one_json_line(folder, monkeypatch):
    monkeypatch.setattr(speed, "held_out_requests", lambda images, videos, first=0: requests(images + videos))
    options = ["--model", folder, "--images", "1", "--videos", "1", "--rounds", "1", "--warm-up", "1"]
    result = CliRunner().invoke(speed.main, [*options, "--max-new-tokens", "8", "--drafters", "ngram"])
    assert result.exception is None, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert [way["equal"] for way in content["ways"]] == [2] * 4
    assert content["dtype"] == "float32"
