"""Tool calls in outputs, read at once and in pieces that are cut at every character."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmspec.serving.tools import HERMES, LLAMA, MISTRAL, CallReader, ToolFormat

TRICKY = json.dumps({"a": 'x </tool_call> <tool_call> {"name": "b"} ] } \\" [TOOL_CALLS] \n', "b": [{"c": {}}]})
SMALL = '{"n": 3}'
BACKSLASH = json.dumps({"path": "C:\\", "quoted": '\\"', "last": "}\\"})
"""Arguments that end in a backslash before their quote."""


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)


BOTH = [("first", TRICKY), ("second", SMALL)]
LATER = call("first", SMALL, "parameters")
CASES: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "hermes": (HERMES, hermes(call("first", TRICKY), call("second", SMALL)), "", BOTH),
    "backslashes": (
        HERMES,
        hermes(call("first", BACKSLASH), call("second", SMALL)),
        "",
        [("first", BACKSLASH), BOTH[1]],
    ),
    "mistral with backslashes": (MISTRAL, f"[TOOL_CALLS][{call('first', BACKSLASH)}]", "", [("first", BACKSLASH)]),
    "llama with backslashes": (LLAMA, call("first", BACKSLASH, "parameters"), "", [("first", BACKSLASH)]),
    "hermes after text": (HERMES, "Well.\n\n" + hermes(call("first", TRICKY)), "Well.", BOTH[:1]),
    "hermes without lines": (HERMES, f"<tool_call>{call('second', SMALL)}</tool_call>\n", "", BOTH[1:]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{call('first', TRICKY)}, {call('second', SMALL)}]", "", BOTH),
    "mistral after text": (MISTRAL, f"Well. [TOOL_CALLS][{call('second', SMALL)}]", "Well.", BOTH[1:]),
    "llama": (LLAMA, call("first", TRICKY, "parameters"), "", BOTH[:1]),
    "llama later": (LLAMA, "See " + LATER, "See " + LATER, []),
    "text": (HERMES, "a < b, <tool is no marker \n", "a < b, <tool is no marker \n", []),
    "no call": (HERMES, "a <tool_call>\n{broken", "a <tool_call>\n{broken", []),
    "cut in its arguments": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "cut in its end": (HERMES, hermes(call("second", SMALL))[:-4], "", BOTH[1:]),
}


def read(form: ToolFormat, pieces: list[str], begun: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, put together from deltas as openai-python does."""
    reader, content = CallReader(form, begun=begun), ""
    calls: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        delta = reader.feed(piece, final=number == len(pieces) - 1).to_dict()
        content += delta.get("content", "")
        for one in delta.get("tool_calls", ()):
            if one["index"] == len(calls):
                calls.append({"id": one["id"], "name": one["function"]["name"], "arguments": ""})
            calls[one["index"]]["arguments"] += one["function"]["arguments"]
    assert reader.calls == len(calls)
    assert len({one["id"] for one in calls}) == len(calls)
    assert all(len(one["id"]) == (form.id_length or 29) for one in calls)
    return content, [(one["name"], one["arguments"]) for one in calls]


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_depend_on_where_pieces_end(case: str) -> None:
    form, text, content, calls = CASES[case]
    assert read(form, [text]) == (content, calls)
    assert read(form, [*text]) == (content, calls)
    for cut in range(1, len(text)):
        assert read(form, [text[:cut], text[cut:]]) == (content, calls), text[:cut]


def test_content_and_arguments_are_passed_on_at_once() -> None:
    reader = CallReader(HERMES)
    assert reader.feed("One two").to_dict() == {"content": "One two"}
    reader.feed('\n<tool_call>\n{"name": "f", "arguments": ')
    (begun,) = reader.feed('{"a').to_dict()["tool_calls"]
    assert (begun["type"], begun["function"]) == ("function", {"name": "f", "arguments": '{"a'})
    assert reader.feed('": 1').to_dict() == {"tool_calls": [{"index": 0, "function": {"arguments": '": 1'}}]}


def test_a_marker_before_the_output() -> None:
    assert read(MISTRAL, [f"[{call('second', SMALL)}]"], begun=True) == ("", BOTH[1:])


def test_what_begins_like_a_call_is_not_held_for_ever() -> None:
    reader = CallReader(HERMES)
    assert not reader.feed("<tool_call>" + "x" * 150).content
    assert reader.feed("y" * 100).content == "<tool_call>" + "x" * 150 + "y" * 100
