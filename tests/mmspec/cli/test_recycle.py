"""``mmspec train recycle`` on a stand-in model."""

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec import UserError
from mmspec.cli.recycle import recycle
from mmspec.drafters.registry import make_drafter
from mmspec.training.data import Conversation
from mmspec.training.features import ConversationFeatures, write_features
from tests.model_folders import save_llava, save_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("tiny")))


def train(model, out, *options):
    result = CliRunner().invoke(recycle, ["--model", model, "--out", str(out), "--max-new-tokens", "12", *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_fills_a_table_from_prompts(model, tmp_path):
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    rows = [{"prompt": "Name the colour.", "images": [str(tmp_path / "a.png")]}, {"prompt": "Hello"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train(model, tmp_path / "r", "--prompts", str(tmp_path / "p.jsonl"))
    assert make_drafter(str(tmp_path / "r")).entries > 5
    assert not list(tmp_path.glob("**/*.part"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnonsense', r"p\.jsonl, line 2: expected a JSON object, received 'nonsense'"),
        ('{"question": "a"}', r"line 1: expected an object with a prompt, received \{"),
    ],
)
def test_bad_prompts_are_named(model, tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        train(model, tmp_path / "r", "--prompts", str(tmp_path / "p.jsonl"))
    assert not (tmp_path / "r").exists()


def save_features(folder, target, text):
    """The file of `make-data --record` with one text; returns the hidden states."""
    with torch.no_grad():
        hidden = target.model.model(torch.tensor([text])).last_hidden_state[0]
    mark = torch.ones(len(text), dtype=torch.bool)
    row = ConversationFeatures(torch.tensor(text), hidden, hidden[:0], ~mark, mark)
    write_features(folder, torch.float32, [(Conversation("a", (), ()), row)])
    return hidden


def test_entries_are_mean_probabilities_and_the_most_frequent_contexts_are_kept(tmp_path):
    folder = str(save_text_model(tmp_path / "text"))
    target = mmspec.load(folder, None, "cpu").target
    text = [5, 6, 7, 8, 7, 9, 8, 7, 8, 10, 11]  # 7 and 8 three times, the pair (7, 8) twice, others once
    probs = target.head(save_features(tmp_path / "features", target, text)).detach().softmax(-1)
    tables = {}
    for name, options in {"whole": (), "three": ("--contexts", "3")}.items():
        train(folder, tmp_path / name, "--recorded", str(tmp_path / "features"), *options)
        tables[name] = make_drafter(str(tmp_path / name))._table
    assert tables["whole"].keys() == {(-1, token) for token in text[:-1]} | set(itertools.pairwise(text[:-1]))
    assert tables["three"] == {context: tables["whole"][context] for context in [(-1, 7), (-1, 8), (7, 8)]}
    for context, places in {(7, 8): [3, 8], (-1, 7): [2, 4, 7], (9, 8): [6]}.items():
        mean = torch.zeros_like(probs[0])
        for place in places:
            mean.index_add_(0, *reversed(probs[place].topk(8)))
        expected = (mean / len(places)).topk(8)
        found = sorted(tables["whole"][context].items(), key=lambda one: -one[1])
        assert [p for _, p in found] == pytest.approx([p for p in expected.values.tolist() if p >= 0.01], abs=1e-3)
        assert found[0][0] == int(expected.indices[0])


def test_options_that_exclude_each_other_are_refused_before_loading(tmp_path):
    both = ("--prompts", __file__, "--recorded", str(tmp_path))
    for message, *options in (
        ("expected both, received no --recorded", "--contexts", "2", "--prompts", __file__),
        ("^expected one of --prompts and --recorded, received neither$",),
        ("^expected one of --prompts and --recorded, received both$", *both),
    ):
        with pytest.raises(UserError, match=message):
            train(str(tmp_path / "no model"), tmp_path / "r", *options)
