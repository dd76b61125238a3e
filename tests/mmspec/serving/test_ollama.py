"""Ollama's API with the official client, and the endpoints of llama.cpp's server that describe it."""

import json
import time
from datetime import datetime

import httpx
import pytest

from mmspec.serving.settings import Limits
from tests.mmspec.serving.test_app import figures
from tests.mmspec.serving.test_tools import FIRST, SECOND, TOOL, USER, pipeline, scripted, written
from tests.testkit.served import LONG, SCENE, data_uri, question, served
from tests.thinking import ids_of, script
from tests.thinking import pipeline as thinking

ollama = pytest.importorskip("ollama")
pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def tiny_llava(server):
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):  # started before the threads of this module are counted
    with served(pipeline("hermes")) as running, ollama.Client(host=running.url) as found:
        yield found


def both(call, **fields):
    """The answer, whose stream has the same parts; durations are in nanoseconds."""
    whole = call(model="tiny", **fields)
    parts = list(call(model="tiny", stream=True, **fields))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for one in (whole, parts[-1]):
        assert (one.done, one.model) == (True, "tiny")
        assert abs(datetime.fromisoformat(one.created_at).timestamp() - time.time()) < 60
        assert 0 < one.eval_duration < one.total_duration < 60e9
        assert one.total_duration == one.eval_duration + one.prompt_eval_duration
    counts = ("done_reason", "prompt_eval_count", "eval_count")
    assert [getattr(parts[-1], name) for name in counts] == [getattr(whole, name) for name in counts]
    texts = ("content", "thinking") if hasattr(whole, "message") else ("response", "thinking")
    for name in texts:
        pieces = [getattr(getattr(part, "message", part), name) for part in parts]
        assert "".join(piece or "" for piece in pieces) == (getattr(getattr(whole, "message", whole), name) or "")
    if hasattr(whole, "message"):
        calls = [call.function for part in parts for call in part.message.tool_calls or ()]
        assert calls == [call.function for call in whole.message.tool_calls or ()]
    return whole


def test_chats(client):
    scripted("It rains. Or not.", tools=())
    whole = both(client.chat, messages=USER)
    assert (whole.message.content, whole.message.role, whole.done_reason) == ("It rains. Or not.", "assistant", "stop")
    cut = both(client.chat, messages=USER, options={"num_predict": 4, "num_ctx": 4096, "mirostat": 0})
    assert (cut.message.content, cut.done_reason, cut.eval_count) == ("It r", "length", 4)
    stopped = both(client.chat, messages=USER, options={"stop": ["snow", ". Or"], "num_predict": -1})
    assert (stopped.message.content, stopped.done_reason) == ("It rains", "stop")
    assert both(client.generate, prompt=USER[0]["content"]).response == "It rains. Or not."
    pipeline("hermes").model.generation_config.sequence_bias = None
    sampled = {"temperature": 5.0, "seed": 7, "top_k": 50, "num_predict": 9}
    first, again, other = (
        client.chat("tiny", USER, options={**sampled, "seed": seed}).message.content for seed in (7, 7, 8)
    )
    assert first == again != other


def test_formats(client):
    scripted('{"a": "x"}', tools=())
    for form in (SCHEMA, "json", ""):
        assert json.loads(both(client.chat, messages=USER, format=form).message.content) == {"a": "x"}
        assert json.loads(both(client.generate, prompt=USER[0]["content"], format=form).response) == {"a": "x"}
    scripted('{"b": 1}', tools=())
    assert json.loads(both(client.chat, messages=USER, format=SCHEMA).message.content) == {"a": "x"}


def test_calls(client):
    calls = [("weather", FIRST), ("weather", SECOND)]
    scripted("Let me see.\n" + written(*calls), tools=(TOOL,))
    whole, body = both(client.chat, messages=USER, tools=[TOOL]), {"model": "tiny", "tools": [TOOL], "stream": False}
    message = whole.message
    assert (message.content, whole.prompt_eval_duration < whole.eval_duration) == ("Let me see.", True)  # many steps
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == calls
    message = client._client.post("/api/chat", json={**body, "messages": USER}).json()["message"]
    assert [call["function"]["index"] for call in message["tool_calls"]] == [0, 1]
    rendered = [
        *USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"function": {"name": name, "arguments": given}} for name, given in calls
        ]},
        {"role": "tool", "content": "rain", "name": "weather"},
    ]  # fmt: skip
    scripted("Rain.", rendered, tools=(TOOL,))
    result = {"role": "tool", "content": "rain", "tool_name": "weather"}
    answer = client._client.post("/api/chat", json={**body, "messages": [*USER, message, result]}).json()
    assert answer["message"]["content"] == "Rain."


def test_thinking():
    reasoning, answer = "It {is} warm.", "Ulm."
    script("added", "open", ids_of("added", f"<think>\n{reasoning}\n</think>\n\n{answer}"))
    with (
        served(thinking("added"), names=["tiny"], chat_template_kwargs={"mode": "open"}) as server,
        ollama.Client(server.url) as client,
    ):
        found = both(client.chat, messages=[{"role": "user", "content": "Which?"}]).message
        assert (found.thinking, found.content) == (reasoning, answer)
        text = both(client.generate, prompt="Which?")
        assert (text.thinking, text.response) == (reasoning, answer)
        counts = [
            client.chat("tiny", USER, think=think, options={"num_predict": 1}).prompt_eval_count
            for think in (None, True, False, "high")
        ]
        assert counts[0] == counts[1] < counts[2]  # an empty block of reasoning
        assert counts[3] == counts[0] + len("effort high")
        turns = [[*USER, {"role": "assistant", "content": "Ulm", **more}] for more in ({}, {"thinking": "It is"})]
        with_it, without = (client.chat("tiny", one, options={"num_predict": 1}).prompt_eval_count for one in turns)
        assert without - with_it == len("(It is)")
        assert client.show("tiny").capabilities == ["completion", "tools", "thinking"]


def test_images(server, tiny_llava):
    """The client reads the file; the answer equals the chat request's."""
    client, limit = tiny_llava, {"num_predict": 16}
    body = server.post(question("Describe the image.", data_uri(SCENE))).json()
    content = body["choices"][0]["message"]["content"]
    message = {"role": "user", "content": "Describe the image.", "images": [SCENE]}
    assert client.chat("tiny-llava", [message], options=limit).message.content == content
    found = client.generate("tiny-llava", "Describe the image.", images=[SCENE.read_bytes()], options=limit)
    assert (found.response, found.prompt_eval_count) == (content, body["usage"]["prompt_tokens"])
    plain = {"temperature": 2.0, "seed": 5, "top_p": 0.9, "top_k": 9, "presence_penalty": 1.5, "frequency_penalty": 1.0}
    body = question("Describe the image.", data_uri(SCENE), repetition_penalty=1.7, **plain)
    answer = client.chat("tiny-llava", [message], options={**limit, "repeat_penalty": 1.7, **plain})
    assert answer.message.content == server.post(body).json()["choices"][0]["message"]["content"] != content
    parts = client.chat("tiny-llava", [message], options=limit, logprobs=True, top_logprobs=2, stream=True)
    tokens = [one for part in parts for one in part.logprobs or ()]
    assert "".join(one.token for one in tokens).removesuffix("</s>").strip() == content
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in tokens)
    bare = client.chat("tiny-llava", [{"role": "user", "images": [SCENE]}], options=limit)
    assert bare.prompt_eval_count < found.prompt_eval_count
    system = client.generate("tiny-llava", "Describe the image.", system="Be brief.", images=[SCENE], options=limit)
    assert system.prompt_eval_count > found.prompt_eval_count


def test_descriptions(server, tiny_llava):
    client = tiny_llava
    (listed,), (running,) = client.list().models, client.ps().models
    assert (listed.model, running.model) == ("tiny-llava", "tiny-llava")
    tensors = [*server.pipe.model.parameters(), *server.pipe.model.buffers()]
    assert listed.size == running.size == sum(one.numel() * one.element_size() for one in tensors)
    assert (running.size_vram, running.context_length) == (0, server.pipe.context_limit)
    shown = client.show("tiny-llava")
    assert (shown.capabilities, shown.details.family) == (["completion", "vision"], "llava")
    assert shown.template == server.pipe.processor.chat_template_text()
    assert shown.modelinfo["llava.context_length"] == server.pipe.context_limit
    assert httpx.get(f"{server.url}/api/version").json().keys() == {"version"}
    props = httpx.get(f"{server.url}/props").json()
    assert (props["total_slots"], props["modalities"]) == (8, {"vision": True, "audio": False})
    assert props["default_generation_settings"]["n_ctx"] == server.pipe.context_limit
    names = {"model_path": "tiny-llava", "model_alias": "tiny-llava", "chat_template": shown.template}
    assert props.items() >= names.items()
    slots = httpx.get(f"{server.url}/slots").json()
    limit = server.pipe.context_limit
    assert slots == [{"id": number, "n_ctx": limit, "is_processing": False} for number in range(8)]


def test_slots_that_run(server, slow):
    slow(0.2)
    body = {"model": "tiny-llava", "prompt": "a", **LONG}
    with httpx.stream("POST", f"{server.url}/api/generate", json=body) as stream:
        lines = stream.iter_lines()
        assert (json.loads(next(lines))["done"], stream.headers["content-type"]) == (False, "application/x-ndjson")
        slots = httpx.get(f"{server.url}/slots").json()
        assert [slot["is_processing"] for slot in slots] == [True] + [False] * 7
        found = figures(server)
        assert [found[f"vllm:num_requests_{state}"] for state in ("running", "waiting")] == [1, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_timings_of_llama_cpp(server, stream):
    body = {"prompt": "Some words, " * 9, "max_tokens": 12, "stream": stream, "temperature": 0}
    for _ in range(2):
        response = httpx.post(f"{server.url}/v1/completions", json=body)
    found = json.loads(response.text.split("\n\n")[-3][6:]) if stream else response.json()
    timings, usage = found["timings"], server.post({**body, "stream": False}, "completions").json()["usage"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 12
    for name in ("prompt", "predicted"):
        assert timings[f"{name}_per_token_ms"] == timings[f"{name}_ms"] / timings[f"{name}_n"] > 0
        per_second = timings[f"{name}_n"] / timings[f"{name}_ms"] * 1e3
        assert timings[f"{name}_per_second"] == pytest.approx(per_second)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"options": {"mirostat": 2}}, "mirostat is not supported"),
        ({"options": {"repeat_last_n": 64}}, "repeat_last_n is not supported"),
        ({"options": 5}, "options is not supported"),
        ({"template": "{{ . }}"}, "template is not supported, the model's is used"),
        ({"n": 2}, "n must be"),
        ({"raw": True}, "raw is not supported, /v1/completions has no template"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"suffix": "a"}, "suffix is not supported"),
        ({"format": "xml"}, "response_format"),
        ({"model": "llama"}, "unknown model"),
        ({"think": 5}, "reasoning_effort must be text"),
        ({"images": ["!"]}, "a data URI must contain base64"),
        ({"images": [5]}, "messages[0].content[0]"),
        ({"messages": [5]}, "messages[0] must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0] must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_errors(server, fields, error):
    path, more = ("chat", {}) if "messages" in fields else ("generate", {"prompt": "a"})
    response = httpx.post(f"{server.url}/api/{path}", json={"model": "tiny-llava", **more, **fields})
    assert (response.status_code, response.json().keys()) == (404 if "model" in fields else 400, {"error"})
    assert error in response.json()["error"]


def test_ignored_options_are_counted(server, tiny_llava):
    before = figures(server)
    options = {"num_ctx": 4096, "num_thread": 4, "num_predict": 2}
    tiny_llava.chat("tiny-llava", USER, options=options, keep_alive="5m")
    grown = {name.rpartition("/")[2] for name, value in figures(server).items() if value > before.get(name, 0)}
    assert {"num_ctx", "num_thread", "keep_alive"} <= grown
    assert "num_predict" not in grown


def test_other_errors(pipe):
    with served(pipe, api_key="secret", limits=Limits(max_running=1)) as server:
        assert httpx.get(f"{server.url}/api/tags").json().keys() == {"error"}
        headers = {"Authorization": "Bearer secret"}
        with ollama.Client(server.url, headers=headers) as client, pytest.raises(ollama.ResponseError, match="unknown"):
            client.show("llama")
        for name in ("pull", "embed"):
            response = httpx.post(f"{server.url}/api/{name}", headers=headers)
            assert (response.status_code, "there is no" in response.json()["error"]) == (404, True)
