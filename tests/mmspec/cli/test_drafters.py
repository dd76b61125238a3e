"""``mmspec datastore build`` and ``mmspec train recycle``: files that the drafters read."""

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.cli import drafters as commands
from mmspec.drafters.datastore import Datastore
from mmspec.drafters.registry import make_drafter
from mmspec.targets.processor import Processor
from mmspec.training.data import Conversation
from mmspec.training.features import ConversationFeatures, write_features
from tests.mmspec.targets.test_detokenizer import _sentencepiece
from tests.model_folders import save_llava, save_text_model


def run(command, *args):
    result = CliRunner().invoke(command, [*map(str, args)])
    assert (result.exit_code == 0) == (result.exception is None)
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_text_model(tmp_path_factory.mktemp("text")))


def build(model, out, *files):
    return run(commands.datastore, "build", *files, "--model", model, "--output", out)


def test_builds_a_store_of_texts_and_conversations(model, tmp_path):
    (tmp_path / "a.txt").write_text("one two three\n" * 3)
    rows = [
        {"text": "four five"},
        {"conversations": [{"from": "human", "value": "six"}, {"from": "gpt", "value": "x", "token_ids": [7, 8, 9]}]},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = build(model, tmp_path / "store", tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert f"use it as --drafter datastore:{tmp_path}/store" in result.output.replace("\n", "")
    index = Datastore(tmp_path / "store").index
    pipe = mmspec.load(model, drafter=f"ngram+datastore:{tmp_path}/store")
    ids = pipe.processor.text_ids("one two three\n", add_special_tokens=False)
    assert len(index.find(ids[:4])) == 3
    assert len(index.find([7, 8, 9])) == 1
    (after,) = index.following(index.find([8, 9]), 2, 9)
    assert index.token(after) == index.config.vocab_size
    plain = mmspec.load(model, drafter=None)
    answers = [one.generate("one two", max_new_tokens=9, chat_template=False).token_ids for one in (pipe, plain)]
    assert answers[0] == answers[1]
    again = build(model, tmp_path / "store", tmp_path / "a.txt")
    assert "expected a new folder, received one that exists" in str(again.exception)


TURN = {"from": "human", "value": "a"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, "expected a JSON object") for line in ("nothing", "3", "[" * 100_000)),
        ('{"text": 3}', "text must be text: got 3"),
        ('{"conversations": [3]}', "conversations[0] must be an object: got 3"),
        (
            json.dumps({"conversations": [TURN, TURN | {"token_ids": [320, 1]}]}),
            "token_ids must be < 320: got 320",
        ),
        ("two é", "expected UTF-8, received b'two \\xe9'"),
    ],
)
def test_mistakes_name_the_line(model, tmp_path, line, message):
    (tmp_path / "b.jsonl").write_bytes(f'{{"text": "a"}}\n\n{line}'.encode("latin-1"))
    result = build(model, tmp_path / "store", tmp_path / "b.jsonl")
    assert f"b.jsonl, line 3: {message}" in str(result.exception)
    assert not (tmp_path / "store").exists()


def test_texts_in_parts_are_those_of_the_whole(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes("\ufeffone two\r\nthree\n\nfour".encode())
    processor = Processor(_sentencepiece("legacy"))  # which puts a token before prompts
    turns = [{"from": "human", "value": "six"}, {"from": "gpt", "value": "x", "token_ids": [7, 8, 9]}]
    rows = {"text": "a"}, {"conversations": turns}
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    a, six = (processor.text_ids(text, add_special_tokens=False) for text in ("a", "six"))
    assert list(commands._texts(tmp_path / "b.jsonl", processor, 320)) == [a, [*six, 7, 8, 9]]
    whole = [token for part in commands._texts(tmp_path / "a.txt", processor, 9) for token in part]
    assert whole == processor.text_ids("one two\nthree\n\nfour", add_special_tokens=False)
    for characters, texts in {
        1: ("one two\n", "three\n", "\n", "four", ""),
        8: ("one two\n", "three\n\nfour", ""),
        9: ("one two\nthree\n", "\nfour"),
    }.items():
        monkeypatch.setattr(commands, "_CHARACTERS", characters)
        parts = [processor.text_ids(text, add_special_tokens=False) for text in texts]
        assert list(commands._texts(tmp_path / "a.txt", processor, 9)) == parts


def train(model, out, *options):
    return run(commands.recycle, "--model", model, "--out", out, "--max-new-tokens", "12", *options).exception


def test_fills_a_table_from_prompts(tmp_path):
    model = save_llava(tmp_path / "tiny")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    rows = [{"prompt": "Name the colour.", "images": [str(tmp_path / "a.png")]}, {"prompt": "Hello"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert train(model, tmp_path / "r", "--prompts", tmp_path / "p.jsonl") is None
    assert make_drafter(str(tmp_path / "r")).entries > 5
    assert not list(tmp_path.glob("**/*.part"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnonsense', "line 2: expected a JSON object, received 'nonsense'"),
        ('{"question": "a"}', "line 1: expected an object with a prompt, received {"),
    ],
)
def test_bad_prompts_are_named(model, tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    error = train(model, tmp_path / "r", "--prompts", tmp_path / "p.jsonl")
    assert f"p.jsonl, {message}" in str(error)
    assert not (tmp_path / "r").exists()


def save_features(folder, target, text):
    """The file of `make-data --record` with one text; returns the hidden states."""
    with torch.no_grad():
        hidden = target.model.model(torch.tensor([text])).last_hidden_state[0]
    mark = torch.ones(len(text), dtype=torch.bool)
    row = ConversationFeatures(torch.tensor(text), hidden, hidden[:0], ~mark, mark)
    write_features(folder, torch.float32, [(Conversation("a", (), ()), row)])
    return hidden


def test_entries_are_mean_probabilities_and_the_most_frequent_contexts_are_kept(model, tmp_path):
    target = mmspec.load(model, None, "cpu").target
    text = [5, 6, 7, 8, 7, 9, 8, 7, 8, 10, 11]  # 7 and 8 three times, the pair (7, 8) twice, others once
    probs = target.head(save_features(tmp_path / "features", target, text)).detach().softmax(-1)
    tables = {}
    for name, options in {"whole": (), "three": ("--contexts", "3")}.items():
        train(model, tmp_path / name, "--recorded", tmp_path / "features", *options)
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
    both = ("--prompts", __file__, "--recorded", tmp_path)
    for message, *options in (
        ("expected both, received no --recorded", "--contexts", "2", "--prompts", __file__),
        ("expected one of --prompts and --recorded, received neither",),
        ("expected one of --prompts and --recorded, received both", *both),
    ):
        assert str(train(tmp_path / "no model", tmp_path / "r", *options)).endswith(message)
