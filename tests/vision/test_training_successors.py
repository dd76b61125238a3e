"""``mmspec train recycle`` on a stand-in model."""

import json

import pytest
from click.testing import CliRunner
from PIL import Image

from mmspec import UserError
from mmspec.targets.loading import make_drafter
from tests.standin import save_llava
from vision.training.successors import recycle


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("standin")))


def train(model, out, *options):
    result = CliRunner().invoke(recycle, ["--model", model, "--out", str(out), "--max-new-tokens", "12", *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_fills_a_table_from_drawn_scenes(model, tmp_path):
    assert train(model, tmp_path / "r", "--scenes", "3").exit_code == 0
    assert make_drafter(str(tmp_path / "r")).entries > 5
    assert not list(tmp_path.glob("**/*.part"))


def test_fills_a_table_from_prompts(model, tmp_path):
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    rows = [{"prompt": "Name the colour.", "images": [str(tmp_path / "a.png")]}, {"prompt": "Hello"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train(model, tmp_path / "r", "--prompts", str(tmp_path / "p.jsonl"))
    assert make_drafter(str(tmp_path / "r")).entries > 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnonsense', "expected JSON lines"),
        ('{"question": "a"}', r":1: expected an object with a prompt, received \{"),
    ],
)
def test_bad_prompts_are_named(model, tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        train(model, tmp_path / "r", "--prompts", str(tmp_path / "p.jsonl"))
    assert not (tmp_path / "r").exists()
