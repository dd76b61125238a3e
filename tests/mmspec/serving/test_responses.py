"""The Responses API, compared with chat completions: openai-python as the client."""

import json
import time
from typing import Literal

import pydantic
import pytest

from mmspec.serving.errors import APIError
from mmspec.serving.responses import ITEMS, ResponsesRequest, StoredResponses, chat_messages
from mmspec.serving.schemas import MOST_ITEMS, conversation, parse
from tests.testkit.served import QUESTION, SCENE, data_uri, question, served

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"model": "tiny-llava", "temperature": 0, "max_output_tokens": 24}
PICTURE = [
    {"type": "input_image", "image_url": data_uri(SCENE), "detail": "auto"},
    {"type": "input_text", "text": QUESTION},
]


class Sign(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    large: bool


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(server, messages, **fields):
    response = server.post({**question(max_tokens=24), "messages": messages, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_text(server, client):
    turns = [{"role": "system", "content": "Be brief."}, *question(QUESTION, data_uri(SCENE))["messages"]]
    expected = chat(server, turns, logprobs=True, top_logprobs=1)
    asked = {**GREEDY, "instructions": "Be brief.", "input": [{"role": "user", "content": PICTURE}]}
    whole = client.responses.create(**asked, top_logprobs=1, metadata={"a": "b"})
    assert whole.output_text == expected["choices"][0]["message"]["content"]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (expected["usage"]["prompt_tokens"], 24)
    assert (whole.metadata, whole.temperature, whole.instructions) == ({"a": "b"}, 0, "Be brief.")
    found = whole.output[0].content[0].logprobs
    logprobs = expected["choices"][0]["logprobs"]["content"]
    assert [one.token for one in found] == [one["token"] for one in logprobs]
    assert [one.logprob for one in found] == pytest.approx([one["logprob"] for one in logprobs], abs=1e-4)
    assert all(len(one.top_logprobs) == 1 for one in found)
    events = list(client.responses.create(**asked, stream=True, include=["message.output_text.logprobs"]))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert [(one.token, one.top_logprobs) for one in events[-1].response.output[0].content[0].logprobs] == [
        (one.token, []) for one in found
    ]
    usage = events[-1].response.usage
    assert (usage.input_tokens, usage.output_tokens) == (whole.usage.input_tokens, 24)


def test_parsed_text(client):
    asked = {**GREEDY, "max_output_tokens": 100, "input": "A sign?", "text_format": Sign}
    whole = client.responses.parse(**asked)
    assert isinstance(whole.output_parsed, Sign)
    assert whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_parsed == whole.output_parsed


def test_calls(server, client):
    tool = openai.pydantic_function_tool(Weather)
    asked = {**GREEDY, "max_output_tokens": 100, "input": "Where is rain?", "tools": [tool]}
    first = client.responses.parse(**asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert isinstance(call.parsed_arguments, Weather)
    with client.responses.stream(**asked, tool_choice={"type": "function", "name": "Weather"}) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        assert stream.get_final_response().output[0].parsed_arguments == call.parsed_arguments
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "No rain."}
    second = client.responses.create(**GREEDY, input=[result], previous_response_id=first.id)
    said = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    turns = [
        {"role": "user", "content": "Where is rain?"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "No rain."},
    ]
    assert second.output_text == chat(server, turns)["choices"][0]["message"]["content"]
    # The same without a stored response: outputs go back as inputs.
    everything = [{"role": "user", "content": "Where is rain?"}, *(one.to_dict() for one in first.output), result]
    assert client.responses.create(**GREEDY, input=everything, store=False).output_text == second.output_text


def test_stored_conversations(server, client):
    first = client.responses.create(**GREEDY, input=[{"role": "user", "content": PICTURE}], instructions="Be brief.")
    second = client.responses.create(**GREEDY, input="Which colour?", previous_response_id=first.id)
    turns = [
        *question(QUESTION, data_uri(SCENE))["messages"],  # instructions apply to one response
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Which colour?"},
    ]
    assert second.output_text == chat(server, turns)["choices"][0]["message"]["content"]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as gone:
            ask(second.id)
        assert (gone.value.param, gone.value.code) == ("response_id", None)
    brief = client.responses.create(**GREEDY, input="A", store=False)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**GREEDY, input="B", previous_response_id=brief.id)
    assert unknown.value.code == "previous_response_not_found"


def test_an_error_after_the_first_event(pipe, monkeypatch):
    step, steps = pipe.engine.core.step, []

    def broken():
        steps.append(None)
        if len(steps) > 5:
            raise ValueError("broken")
        step()

    long = {**GREEDY, "max_output_tokens": 500, "temperature": 5}
    with served(pipe) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        monkeypatch.setattr(pipe.engine.core, "step", broken)
        *_, last = client.responses.create(**long, input="A", stream=True, extra_body={"ignore_eos": True})
    assert last.type == "response.failed"
    assert last.response.error.message == "internal error (ValueError): details are in the server's log"


def test_calls_belong_to_the_message_before_them():
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "ab"]
    outputs = zip("ab", ("1", [{"type": "input_text", "text": "1"}]), strict=True)
    results = [{"type": "function_call_output", "call_id": name, "output": output} for name, output in outputs]
    said = {"type": "message", "role": "assistant", "content": "I call."}
    thoughts = [{"type": "reasoning", "content": [{"text": text}, {"text": "."}]} for text in ("Well", "Hm")]
    items = ITEMS.validate_python([*thoughts, said, *calls, *results, thoughts[0], *calls, said])
    (alone, *turns), _ = conversation(chat_messages(items), reads_media=False)
    assert (alone["content"], alone["reasoning_content"], turns[0]["reasoning_content"]) == ("", "Well.", "Hm.")
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("assistant", "I call."),
        ("tool", "1"),
        ("tool", "1"),
        ("assistant", ""),
        ("assistant", "I call."),
    ]
    assert [[call["id"] for call in turns[at]["tool_calls"]] for at in (0, 3)] == [["a", "b"]] * 2
    assert [turn["tool_call_id"] for turn in turns[1:3]] == ["a", "b"]


def test_a_response_repeats_its_request():
    tool = {"type": "function", "name": "f", "parameters": {}}
    given = {"instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}, "parallel_tool_calls": False}
    given |= {"previous_response_id": "r", "store": False, "tool_choice": "required", "top_logprobs": 3, "user": "u"}
    asked = parse(ResponsesRequest, json.dumps({"input": "A", "tools": [tool], **given, "temperature": 0.5}).encode())
    given |= {"tools": [tool | {"description": None}], "reasoning": {"effort": None}, "truncation": "disabled"}
    text = {"text": {"format": {"type": "text"}}}
    assert asked.about({"temperature": 0.3, "top_p": 0.7}) == {**given, **text, "temperature": 0.3, "top_p": 0.7}
    assert asked.about({}) == {**given, **text, "temperature": 0.0, "top_p": 1.0}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    formed = parse(ResponsesRequest, json.dumps({"input": "A", "text": {"format": {"name": "x", **form}}}).encode())
    assert formed.about({})["text"] == {"format": form}


def test_conversations_have_at_most_as_many_messages_as_chat_requests():
    items = ITEMS.validate_python([{"type": "message", "role": "user", "content": "a"}] * MOST_ITEMS)
    assert len(chat_messages(items)) == MOST_ITEMS
    with pytest.raises(APIError, match="messages must be a list of at most 1024: got 1025"):
        chat_messages(items, "Be brief.")


def test_limits_of_the_store(monkeypatch):
    def add(name):
        part = {"type": "output_text", "text": "a" * 100}
        output = [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}]
        cut = {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{", "status": "incomplete"}
        store.add(
            {"id": name, "output": [*output, cut]},
            ITEMS.validate_python([{"type": "message", "role": "user", "content": "b"}]),
        )

    def kept():
        found = []
        for name in "abcd":
            try:
                assert len(store.items(name)) == 2
                found.append(name)
            except APIError:
                continue
        return found

    store = StoredResponses(2, 60)
    for name in "abc":
        add(name)
    assert kept() == ["b", "c"]
    monkeypatch.setattr("mmspec.serving.responses._STORED_BYTES", 1000)
    add("d")
    assert kept() == ["d"]
    now = time.monotonic()
    for seconds, left in ((55, ["d"]), (61, [])):
        monkeypatch.setattr("time.monotonic", lambda later=now + seconds: later)
        assert kept() == left
