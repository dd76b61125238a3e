"""Conversations in LLaVA's JSON format: reading and writing."""

import json
from pathlib import Path

import pytest

from mmspec.errors import UserError
from mmspec.training.data import Conversation, as_text, read, split, to_record


def turns(*values, **keys):
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[k % 2], "value": value} for k, value in enumerate(values)], **keys}


def write(folder, records, lines=False):
    path = folder / "data.json"
    text = "".join(json.dumps(record) + "\n\n" for record in records) if lines else json.dumps(records, indent=1)
    path.write_text(text)
    return path


def image(path):
    return {"type": "image", "path": str(path)}


def text(content):
    return {"type": "text", "text": content}


@pytest.mark.parametrize("lines", [False, True])
def test_reads_arrays_and_lines(tmp_path, lines):
    records = [turns("<image>\nWhat is it?", "A star.", "Sure?", "Yes.", id=7, image="coco/a.jpg"), turns("Hi", "Ho")]
    path = write(tmp_path, records, lines)
    first, second = read(path).conversations
    assert first.id == "7"
    assert first.messages == (
        {"role": "user", "content": [image(tmp_path / "coco/a.jpg"), text("What is it?")]},
        {"role": "assistant", "content": "A star."},
        {"role": "user", "content": [text("Sure?")]},
        {"role": "assistant", "content": "Yes."},
    )
    assert first.answers == (None, None)
    assert second == Conversation(
        "2", ({"role": "user", "content": [text("Hi")]}, {"role": "assistant", "content": "Ho"}), (None,)
    )
    assert read(path, Path("/media")).conversations[0].media == [image("/media/coco/a.jpg")]
    later = turns("<image>\nA?", "a", "<image>\nB?", "b", image=["x", "y", "z"])
    messages = read(write(tmp_path, [later])).conversations[0].messages
    assert [[item["path"][-1] for item in m["content"][:-1]] for m in messages[::2]] == [["z", "x"], ["y"]]


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        ("What?\n<image>", ["text", "image"]),
        ("<image>\n<image>\nWhat?", ["image", "image", "text"]),
        ("<image><video>\nWhat?", ["image", "video", "text"]),
        ("First <image> then <image>, what?", ["text", "image", "text", "image", "text"]),
        ("What?", ["image", "video", "text"]),
    ],
)
def test_placeholders_take_media_in_order(tmp_path, value, kinds):
    record = turns(value, "That.", image=["a", "b"][: max(kinds.count("image"), 1)])
    if "video" in kinds:
        record["video"] = "v"
    (message, _) = read(write(tmp_path, [record])).conversations[0].messages
    assert [item["type"] for item in message["content"]] == kinds
    assert [item["path"][-1] for item in message["content"] if item["type"] == "image"] == record["image"]
    assert "".join(item.get("text", "") for item in message["content"]).count("\n") == 0
    with pytest.raises(UserError, match=r"^a text model reads text only"):
        as_text([message])


def test_sharegpt_variants(tmp_path):
    said = [("gpt", "Welcome"), ("user", "a"), ("user", "b"), ("chatgpt", "c"), ("human", "d"), ("bing", "e")]
    record = {"id": "s", "conversations": [{"from": who, "value": what} for who, what in [*said, ("human", "open")]]}
    (found,) = read(write(tmp_path, [record])).conversations
    assert as_text(found.messages) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]


def test_skipped_records(tmp_path):
    records = [
        turns("Only a question"),
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "Only an answer"}]},
        turns("How is <image> written in HTML?", "So."),
        turns("<image>\nWhat?", "An <image>.", image="a.png"),
        turns("fine", "fine"),
    ]
    data = read(write(tmp_path, records))
    assert [found.id for found in data.conversations] == ["6"]
    assert data.skipped == {
        "no answer": 3,
        "a media placeholder without media": 1,
        "a media placeholder outside of a question": 1,
    }


def test_unanswered_questions_and_token_ids(tmp_path):
    data = read(write(tmp_path, [turns("One?"), turns("Two?", "2", "Three?"), {"conversations": []}]), answered=False)
    assert [len(found.messages) for found in data.conversations] == [1, 3]
    assert data.skipped == {"no question": 1}
    record = turns("Q", "A", "R", "B", id="x")
    record["conversations"][1]["token_ids"] = [0, 8, 2]
    first, second = read(write(tmp_path, [record, turns("Q", "A", id="x")])).conversations
    assert first.answers == ((0, 8, 2), None)
    assert (first.id, second.id) == ("x", "x#2")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], r"data.json, record 2: record must be an object: got \[1\]$"),
        ({"conversations": {}}, "conversations must be a list: got {}"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\].value is required"),
        ({"conversations": ["hi"]}, r"conversations\[0\] must be an object: got 'hi'"),
        *(
            ({"conversations": [{"from": who, "value": "wau"}]}, r"\.from must be 'human', .* or 'system': got .*dog")
            for who in ("dog", ["dog"])
        ),
        (turns("<image><image>", "a", image="x"), "as many files in `image` as there are <image> placeholders"),
        (turns("<video>", "a", image="x"), "as many files in `video`"),
        (turns("q", "a", image=3), r"image\[0\] must be text: got 3"),
        (turns("q", "a", image=["x", ""]), r"image\[1\]: String should have at least 1 character"),
        *(
            ({"conversations": [{"from": "gpt", "value": "a", "token_ids": ids}]}, rf"\.token_ids{message}")
            for ids, message in (
                (["a"], r"\[0\] must be a whole number: got 'a'"),
                ([True], r"\[0\] must be a whole number: got True"),
                ([3, -1], r"\[1\] must be >= 0: got -1"),
                ([], " must be a list of at least 1: got 0"),
                (7, " must be a list: got 7"),
            )
        ),
    ],
)
def test_malformed_records_are_named(tmp_path, record, message):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, [turns("fine", "fine"), record]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[{]", "expected a JSON array or JSON Lines"),
        (b"[" * 100_000, "expected a JSON array or JSON Lines"),
        (b'[{"conversations":\n"\xff"}]', r"data\.json, line 2: expected UTF-8"),
        (b'{"conversations": []}\n\nnonsense', r"data\.json, line 3: expected a JSON object, received 'nonsense'"),
        (b'{"conversations": []}\n\n{"conversations": 3}', r"data\.json, line 3: conversations must be a list: got 3"),
    ],
)
def test_malformed_files_are_named(tmp_path, content, message):
    path = tmp_path / "data.json"
    with pytest.raises(UserError, match=r"data\.json: expected a text file: .*No such file"):
        read(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(path)


def test_records_round_trip(tmp_path):
    records = [
        turns("<image>\n<image>\nWhat?", "A.", "And\n<video>\nthis?", "B.", id="1", image=["a", "d/b"], video="v.mp4"),
        turns("Hi", "Ho", id="2"),
    ]
    records[0]["conversations"][1]["token_ids"] = [4, 2]
    records[1]["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    written = [to_record(found, tmp_path) for found in read(write(tmp_path, records)).conversations]
    assert written == records


def test_split_is_the_same_every_time(tmp_path):
    everyone = [Conversation(str(number), (), ()) for number in range(200)]
    train, held = split(everyone, 0.1)
    assert len(held) == 20
    assert sorted([*train, *held], key=lambda c: int(c.id)) == everyone
    again = split(everyone[::-1], 0.1)[1]
    assert {found.id for found in again} == {found.id for found in held}
    assert {int(found.id) // 50 for found in held} == {0, 1, 2, 3}
    assert len(split(everyone[:5], 0.01)[1]) == 1
    assert split(everyone, 0.0)[1] == []
