"""The study of tool calls: what passes, what does not, and a small run against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from openai.types.chat import ChatCompletionMessage

import mmspec
from mmspec.eval import tools
from mmspec.eval.tools import FUNCTIONS, REQUESTS, Call, ToolRequest
from tests.testkit.served import Served, served

CALLING = [request for request in REQUESTS if request.calls]


def message(calls: list[Call], content: str | None = None) -> ChatCompletionMessage:
    made = [
        {"id": str(number), "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for number, (name, given) in enumerate(calls)
    ]
    return ChatCompletionMessage.model_validate({"role": "assistant", "content": content, "tool_calls": made or None})


def right(request: ToolRequest) -> ChatCompletionMessage:
    return message(list(request.calls), None if request.calls else f"It is {request.says}.")


@pytest.mark.parametrize("request_", CALLING, ids=lambda request: request.name)
def test_outcomes(request_: ToolRequest) -> None:
    assert request_.outcome(right(request_)) == "ok"
    calls = list(request_.calls)
    assert request_.outcome(message([], "No.")) == "calls nothing: 'No.'"
    assert request_.outcome(message([*calls, calls[0]])).startswith(f"calls {calls[0][0]}, ")
    assert request_.outcome("refused") == "refused"
    for number, (name, given) in enumerate(calls):
        for key, value in given.items():
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else [value]
            for wrong in ({**given, key: other}, {**given, key: f"{value}!"}, {**given, "more": value}):
                found = request_.outcome(message([*calls[:number], (name, wrong), *calls[number + 1 :]]))
                assert found.startswith(f"{name}: "), wrong


def test_answers_without_calls() -> None:
    for request in REQUESTS:
        if not request.calls:
            assert request.outcome(right(request)) == "ok"
            assert request.outcome(message([], "Who knows?")) == "says 'Who knows?'"
            assert request.outcome(message([("get_time", {})])) == "calls get_time"


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(drafter: str, **options: Any) -> list[Any]:
        return [right(request) for request in REQUESTS[:-1]] + [message([], "Rome" if drafter == "none" else "Paris")]

    monkeypatch.setattr(tools, "answers", answers)
    for least, status in ((20, 1), (19, 0)):
        done = CliRunner().invoke(tools.main, ["--model", "any", "--least", str(least)])
        result = json.loads(done.stdout.splitlines()[-1])
        assert (done.exit_code, result["passed"]) == (status, 19)
        assert [row["name"] for row in result["requests"] if not row["equal"]] == ["no tool needed"]
        assert {row["outcome"] for row in result["requests"]} == {"ok"}


def test_answers_are_compared_without_ids() -> None:
    calls: list[Call] = [("get_time", {}), ("set_volume", {"percent": 3})]
    first, again = (tools.comparable(message(calls, "Well.")) for _ in range(2))
    assert first == again
    others = [message(calls, "Well"), message(calls[::-1], "Well."), message(calls[:1], "Well.")]
    others += [message([calls[0], ("set_volume", {"percent": 4})], "Well."), message([("a", {}), calls[1]], "Well.")]
    for number, other in enumerate([tools.comparable(one) for one in others] + [tools.comparable("refused")]):
        assert other != first, number
    renamed = message(calls, "Well.")
    assert renamed.tool_calls
    renamed.tool_calls[0].id = "another"
    assert tools.comparable(renamed) == first


@pytest.mark.slow
def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not trained to call is made to: names are right, arguments valid. Drafts change nothing."""

    @contextmanager
    def serving(drafter: str, **options: Any) -> Iterator[Any]:
        with served(mmspec.load("tiny-llava", None if drafter == "none" else drafter, dtype="float32")) as running:
            assert isinstance(running, Served)
            yield type("Running", (), {"url": f"{running.url}/v1"})

    few = [ToolRequest("named", "The time?", [("get_time", {})], choice="get_time", sent="parse"), CALLING[-1]]
    few += [request for request in CALLING if request.sent == "stream"]
    monkeypatch.setattr(tools, "serving", serving)
    monkeypatch.setattr(tools, "FUNCTIONS", {name: FUNCTIONS[name] for name in ("convert_currency", "get_time")})
    monkeypatch.setattr(tools, "REQUESTS", few)
    done = CliRunner().invoke(tools.main, ["--model", "tiny-llava", "--drafter", "ngram", "--least", "0"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["requests"]
    assert [row["equal"] for row in rows] == [True] * len(few)
    assert rows[0]["outcome"] == "ok"
    assert {row["outcome"] for row in rows[1:]}.isdisjoint({"ok"})
