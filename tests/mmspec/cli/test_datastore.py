"""``mmspec datastore build``: texts and conversations become a store that the drafter reads."""

import json

import pytest
from click.testing import CliRunner

import mmspec
from mmspec.cli import datastore as commands
from mmspec.cli.datastore import datastore
from mmspec.drafters.datastore import Datastore
from tests.model_folders import save_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_text_model(tmp_path_factory.mktemp("text")))


def build(model, out, *files):
    return CliRunner().invoke(datastore, ["build", *map(str, files), "--model", model, "--output", str(out)])


def test_builds_a_store_of_texts_and_conversations(model, tmp_path):
    (tmp_path / "a.txt").write_text("one two three\n" * 3)
    rows = [
        {"text": "four five"},
        {"conversations": [{"from": "human", "value": "six"}, {"from": "gpt", "value": "x", "token_ids": [7, 8, 9]}]},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = build(model, tmp_path / "store", tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert result.exit_code == 0, result.output
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


IDS = "expected token_ids in [0, 319], received "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, "expected ") for line in ("nothing", "3", "[" * 100_000, '{"text": 3}', '{"conversations": [3]}')),
        *(
            (json.dumps({"conversations": [{"value": "a"}, {"value": "b", "token_ids": ids}]}), IDS)
            for ids in ([1, -1], [10**6], ["a"], [True], 3, {"a": 1})
        ),
        ("two é", "expected UTF-8, received b'two \\xe9'"),
    ],
)
def test_mistakes_name_the_line(model, tmp_path, line, message):
    (tmp_path / "b.jsonl").write_bytes(f'{{"text": "a"}}\n\n{line}'.encode("latin-1"))
    result = build(model, tmp_path / "store", tmp_path / "b.jsonl")
    assert f"b.jsonl, line 3: {message}" in str(result.exception)
    assert not (tmp_path / "store").exists()


def test_texts_in_parts_are_those_of_the_whole(model, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes("\ufeffone two\r\nthree\n\nfour".encode())
    processor = mmspec.load(model, drafter=None).processor
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
