"""Anthropic's Messages API with the official client: blocks, tools, thinking, streams, errors, token counts."""

import base64
import json

import httpx
import pytest

from mmspec.engine.stats import Stats
from mmspec.pipeline import Piece
from mmspec.serving.messages import MessagesFormat, MessagesRequest
from mmspec.serving.schemas import ChatCompletionRequest, conversation, parse
from mmspec.serving.settings import Limits
from mmspec.targets.detokenizer import AnswerReader
from tests.mmspec.serving.test_app import figures
from tests.mmspec.serving.test_errors import at_call
from tests.mmspec.serving.test_tools import FIRST, NOTHING, SECOND, TOOL, USER, pipeline, scripted, written
from tests.testkit.served import SCENE, data_uri, question, served
from tests.thinking import ids_of, script
from tests.thinking import pipeline as thinking

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.usefixtures("one_thread")

TOOLS = [
    {"name": "weather", "description": "d", "input_schema": TOOL["function"]["parameters"]},
    {"name": "clock", "input_schema": NOTHING, "type": "custom", "cache_control": {"type": "ephemeral"}},
]
PICTURE = base64.b64encode(SCENE.read_bytes()).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


def client_of(server, **options):
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, **options})


def asked(**fields):
    return {"model": "tiny", "messages": USER, "max_tokens": 300, **fields}


def both(client, **fields):
    """The message of an answer, which a stream's events make up; each event is valid in the client's types."""
    whole = client.messages.create(**asked(**fields))
    kinds, made = [], {}
    with client.messages.stream(**asked(**fields)) as stream:
        for event in stream:
            kinds.append(event.type)
        streamed = stream.get_final_message()
    for event in raw_events(client, **fields):
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(made)
            made[event["index"]] = ""
        elif kind == "content_block_delta":
            delta = event["delta"]
            made[event["index"]] += delta[{"input_json_delta": "partial_json"}.get(delta["type"], delta["type"][:-6])]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert "message_delta" in kinds
    for one in (whole, streamed):
        type(one).model_validate(one.model_dump())
    ignored = {"id", "metrics", "parsed_output"}
    blocks = [block.model_dump(exclude=ignored, exclude_none=True) for block in whole.content]
    assert [block.model_dump(exclude=ignored, exclude_none=True) for block in streamed.content] == blocks
    for text, block in zip(made.values(), blocks, strict=True):
        said = block["input"] if block["type"] == "tool_use" else block[block["type"]]
        assert (json.loads(text) if block["type"] == "tool_use" else text) == said
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def raw_events(client, **fields):
    """The events as they are sent, whose names are their types."""
    response = httpx.post(
        f"{str(client.base_url).rstrip('/')}/v1/messages", json={**asked(**fields), "stream": True}, timeout=60
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for line in lines:
        name, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            kind = {"message_start": "RawMessageStartEvent", "message_stop": "RawMessageStopEvent"}.get(event["type"])
            kind = kind or "Raw" + "".join(map(str.title, event["type"].split("_"))) + "Event"
            getattr(anthropic.types, kind).model_validate(event)
        events.append(event)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    return events


@pytest.fixture(scope="module")
def client(server):  # started before the threads of this module are counted
    with served(pipeline("hermes")) as server, client_of(server) as found:
        yield found


def test_texts_and_limits(client):
    scripted("It rains. Or not.", tools=())
    whole = both(client)
    assert [(block.type, block.text) for block in whole.content] == [("text", "It rains. Or not.")]
    assert (whole.stop_reason, whole.stop_sequence, whole.role, whole.model) == ("end_turn", None, "assistant", "tiny")
    cut = both(client, max_tokens=4)
    assert (cut.content[0].text, cut.stop_reason, cut.usage.output_tokens) == ("It r", "max_tokens", 4)
    stopped = both(client, stop_sequences=["snow", ". Or"])
    assert (stopped.content[0].text, stopped.stop_sequence) == ("It rains", ". Or")
    assert stopped.stop_reason == "stop_sequence"
    usage, counted = whole.usage, client.messages.count_tokens(model="tiny", messages=USER).input_tokens
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert next(iter(raw_events(client)))["message"]["usage"] == {"input_tokens": counted, "output_tokens": 0}
    scripted("", tools=())
    assert both(client).content == []


def test_calls(client):
    calls = [("weather", FIRST), ("clock", {})]
    scripted("Let me see.\n" + written(*calls))
    whole = both(client, tools=TOOLS)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in whole.content[1:]] == calls
    assert len({block.id for block in whole.content[1:]}) == 2
    assert (whole.content[0].text, whole.stop_reason) == ("Let me see.", "tool_use")
    single = both(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [(block.name, block.input) for block in single.content[1:]] == calls[:1]
    scripted(written(("weather", FIRST), ("weather", SECOND)))
    named = both(client, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert [(block.name, block.input) for block in named.content] == [("weather", FIRST)]
    required = both(client, tools=TOOLS, tool_choice={"type": "any"})
    assert [block.input for block in required.content] == [FIRST, SECOND]
    scripted("No.", tools=())
    assert both(client, tools=TOOLS, tool_choice={"type": "none"}).content[0].text == "No."
    cut = client.messages.create(**asked(tools=TOOLS, tool_choice={"type": "any"}, max_tokens=50))
    assert (cut.content[0].type, cut.content[0].input, cut.stop_reason) == ("tool_use", {}, "max_tokens")


def test_a_conversation_is_that_of_chat_completions(client):
    """The template gets the same messages."""
    scripted(written(("weather", FIRST)))
    (used,) = both(client, tools=TOOLS).content
    call = {"id": used.id, "type": "function", "function": {"name": "weather", "arguments": json.dumps(FIRST)}}
    cache = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two?", **cache}]},
        {
            "role": "assistant",
            "content": [
                *({"type": "thinking", "thinking": text, "signature": "x"} for text in ("H ", " m.")),
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "See."},
                {"type": "tool_use", "id": used.id, "name": "weather", "input": FIRST, **cache},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": used.id, "content": "rain", "is_error": False},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "sun"}], **cache},
                {"type": "tool_result", "tool_use_id": "c"},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    wanted = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two?"}]},
        {"role": "assistant", "content": "See.", "reasoning_content": "H  m.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": used.id, "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "tool", "tool_call_id": "c", "content": []},
        {"role": "user", "content": "And?"},
    ]
    system = [{"type": "text", "text": "Be", **cache}, {"type": "text", "text": "brief."}]
    body = {"messages": messages, "system": system, "max_tokens": 5, "output_config": {"effort": "low"}}
    asked_of = parse(MessagesRequest, json.dumps(body).encode())
    chat = parse(ChatCompletionRequest, json.dumps({"messages": wanted}).encode())
    found = conversation(asked_of.messages, False)
    assert (found, asked_of.reasoning_effort) == (conversation(chat.messages, False), "low")
    text = parse(MessagesRequest, json.dumps({**body, "system": "Be\nbrief."}).encode())
    assert conversation(text.messages, False) == conversation(chat.messages, False)
    alone = parse(MessagesRequest, json.dumps({**body, "system": ""}).encode())
    assert alone.messages == chat.messages[1:]


def test_thinking():
    reasoning, answer = "It {is} warm.", "Ulm."
    wanted = ids_of("added", f"<think>\n{reasoning}\n</think>\n\n{answer}")
    script("added", "open", wanted)
    pipe = thinking("added")
    with served(pipe, names=["tiny"], chat_template_kwargs={"mode": "open"}) as server, client_of(server) as client:
        found = both(client, messages=[{"role": "user", "content": "Which?"}])
        assert [block.type for block in found.content] == ["thinking", "text"]
        assert (found.content[0].thinking, found.content[1].text) == (reasoning, answer)
        sent = {"type": "enabled", "budget_tokens": 1024}
        tokens = [
            client.messages.count_tokens(model="tiny", messages=USER, thinking=one).input_tokens
            for one in (sent, {"type": "disabled"})
        ]
        assert tokens[1] > tokens[0]  # the template begins an empty block of reasoning


def test_images(server):
    """Base64 and results of calls with images: the tokens of the same chat request."""
    with client_of(server) as client:
        fields = {"model": "tiny-llava", "max_tokens": 16}
        text = {"type": "text", "text": "Describe the image."}
        found = client.messages.create(**fields, messages=[{"role": "user", "content": [IMAGE, text]}])
        chat = server.post(question("Describe the image.", data_uri(SCENE))).json()
        assert found.content[0].text == chat["choices"][0]["message"]["content"]
        counted = client.messages.count_tokens(
            model="tiny-llava", messages=[{"role": "user", "content": [IMAGE, text]}]
        ).input_tokens
        assert counted == chat["usage"]["prompt_tokens"] > 30
        used = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [text, IMAGE]}
        turns = [
            {"role": "user", "content": "Look!"},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]
        tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
        count = lambda **more: client.messages.count_tokens(model="tiny-llava", messages=turns, **more).input_tokens  # noqa: E731
        with_image = count(tools=tools)
        result["content"] = [text]
        assert with_image - count(tools=tools) > 10
        result["content"] = [text, IMAGE]
        assert client.messages.create(**fields, messages=turns, tools=tools).usage.input_tokens == with_image
        url = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="must be a data URI"):
            client.messages.create(**fields, messages=[{"role": "user", "content": [url]}])


def test_fields_of_agents_are_ignored_and_counted(server):
    body = {**asked(model="tiny-llava", max_tokens=4)}
    extra = {
        "metadata": {"user_id": "a"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"const": 5}}},
    }
    before = figures(server)
    answer = httpx.post(f"{server.url}/v1/messages?beta=true", json={**body, **extra}, headers={"anthropic-beta": "x"})
    assert json.loads(answer.json()["content"][0]["text"]) == 5, answer.text
    grown = {
        name.rpartition("/")[2]
        for name, value in figures(server).items()
        if name.startswith("vllm:ignored_fields_total/") and value > before.get(name, 0)
    }
    assert grown == {"metadata", "service_tier", "context_management", "cache_control", "anthropic-beta"}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers is not supported, the client makes the calls"),
        ({"messages": []}, "messages must be a list of at least 1"),
        ({"messages": [{"role": "model", "content": "a"}]}, "messages[0].role must be"),
        ({"messages": [5]}, "messages[0] must be an object"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "xyz": 1}]}]}, "xyz is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": 5}]}]}, "messages[0].content[0]"),
        ({"system": 5}, "messages[0].content"),
        ({"tools": [5]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice must be"),
        ({"tools": [{"name": "a", "type": "web_search_20250305"}]}, "type is not supported"),
        ({"n": 2}, "n must be"),
        ({"logprobs": True}, "logprobs must be"),
        ({"stop_sequences": [5]}, "stop must be"),
    ],
)
def test_errors_have_anthropics_form(server, fields, error):
    response = httpx.post(f"{server.url}/v1/messages", json={**asked(model="tiny-llava"), **fields})
    content = response.json()
    assert (response.status_code, content["type"], content["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error in content["error"]["message"]


def test_keys_and_other_errors(pipe):
    with served(pipe, api_key="secret", limits=Limits(max_running=1, max_waiting=0)) as server:
        fields = asked(model="tiny-llava", max_tokens=2)
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with client_of(server, **options) as client:
                assert client.messages.create(**fields).usage.output_tokens == 2
                with pytest.raises(anthropic.NotFoundError, match="unknown model"):
                    client.messages.create(**{**fields, "model": "claude"})
        for key, status in (("secret", 200), ("other", 401), ("", 401)):
            response = httpx.post(f"{server.url}/v1/messages", json=fields, headers={"x-api-key": key})
            assert response.status_code == status
        with client_of(server, api_key="other") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**fields)
            assert caught.value.body["error"]["type"] == "authentication_error"


def test_an_error_in_a_stream(server, monkeypatch):
    """After the first event, the error is an event, which the client raises; a line in Ollama's API."""
    append = AnswerReader.append
    monkeypatch.setattr(AnswerReader, "append", at_call(2, append))
    sent = httpx.post(f"{server.url}/api/chat", json=asked(model="tiny-llava")).text.splitlines()
    *_, said, failed = map(json.loads, sent)
    assert (said["done"], "internal error" in failed["error"]) == (False, True)
    monkeypatch.setattr(AnswerReader, "append", at_call(0, append))
    response = httpx.post(f"{server.url}/v1/messages", json=asked(model="tiny-llava"))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    monkeypatch.setattr(AnswerReader, "append", at_call(2, append))
    events = []
    with client_of(server) as client:
        stream = client.messages.create(**asked(model="tiny-llava"), stream=True)
        with pytest.raises(anthropic.APIError, match="internal error"):
            events.extend(event.type for event in stream)
    assert "message_stop" not in events


def test_figures_of_an_answer():
    """Cached tokens are counted apart; the start has those of the prompt."""
    form = MessagesFormat("m", None, MessagesRequest(messages=USER, max_tokens=5, stream=True), [""], "flash")
    stats = Stats(num_prompt_tokens=11, num_cached_tokens=5, num_generated_tokens=3)
    pieces = [Piece("", [1], reasoning="Hm", num_prompt_tokens=11), Piece("A", [2, 3], "stop", stats, stop_string="B")]
    events = [event for piece in pieces for event in form.chunks(0, piece)]
    assert events[0]["message"]["usage"] == {"input_tokens": 11, "output_tokens": 0}
    ended = events[-2]
    assert ended["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "B"}
    cached = {"cache_read_input_tokens": 5, "cache_creation_input_tokens": 0}
    assert ended["usage"] == {"input_tokens": 6, "output_tokens": 3, **cached}
    assert ended["metrics"]["speculative_decoding"]["drafter"] == "flash"
    assert (events[0]["message"]["id"][:4], events[0]["message"]["model"]) == ("msg_", "m")
    assert [(event["type"], event.get("index")) for event in events[2:-2]] == [
        ("content_block_start", 0), ("content_block_delta", 0), ("content_block_stop", 0),
        ("content_block_start", 1), ("content_block_delta", 1), ("content_block_stop", 1),
    ]  # fmt: skip
