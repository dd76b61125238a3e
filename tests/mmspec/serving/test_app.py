"""Endpoints: answers, streams, choices, limits, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

import mmspec
from mmspec.checks import Rule
from mmspec.pipeline import Pipeline
from mmspec.sampling.defaults import Defaults
from mmspec.sampling.params import SamplingParams
from mmspec.serving.limits import Limits
from tests.served import CLIP, QUESTION, SCENE, TIMEOUT, Served, data_uri, events, eventually, question, served, texts

pytestmark = pytest.mark.usefixtures("one_thread")


def png(folder: Path, width: int, height: int) -> Path:
    Image.new("L", (width, height)).save(folder / "a.png")
    return folder / "a.png"


def test_an_answer_is_that_of_the_pipeline(server: Served, pipe: Pipeline) -> None:
    alone = pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=16)
    body = server.post(question(QUESTION, data_uri(SCENE))).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, alone.finish_reason, None)
    prompt = alone.stats.num_prompt_tokens
    counts = {"prompt_tokens": prompt, "completion_tokens": 16, "total_tokens": prompt + 16}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    figures = body["metrics"]["speculative_decoding"]
    assert set(figures) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
        "lossless",
        "num_rejected_outputs",
        "drafter_error",
    }
    assert figures["drafter_error"] == ""
    assert figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] == 15  # the first is the prefill's


def test_conversations_images_and_videos_keep_their_places(server: Served, pipe: Pipeline, tmp_path: Path) -> None:
    red = tmp_path / "red.png"
    Image.new("RGB", (96, 96), "red").save(red)
    asked = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "One."},
                {"type": "image_url", "image_url": {"url": data_uri(red), "detail": "auto"}},
                {"type": "image_url", "image_url": {"url": data_uri(SCENE)}},
            ],
        },
        {"role": "assistant", "content": "Yes.", "tool_calls": None, "refusal": None},
        {
            "role": "user",
            "content": [
                {"type": "video_url", "video_url": {"url": data_uri(CLIP, "video/mp4")}},
                {"type": "text", "text": "Two?"},
            ],
        },
    ]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "One."},
                {"type": "image", "path": str(red)},
                {"type": "image", "path": str(SCENE)},
            ],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "video", "path": str(CLIP)}, {"type": "text", "text": "Two?"}]},
    ]
    body = {"model": "tiny-llava", "messages": asked, "temperature": 0, "max_completion_tokens": 16}
    assert texts(server.post(body)) == [pipe.generate(messages, max_new_tokens=16).text]


def test_a_stream_is_the_whole_answer_in_pieces(server: Served) -> None:
    body = question(QUESTION, data_uri(SCENE), max_tokens=40)
    whole = server.post(body).json()
    response = server.post({**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response)
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in found}) == 1
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *pieces, last = found
    assert len(pieces) > 3
    assert (
        "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces)
        == whole["choices"][0]["message"]["content"]
    )
    assert [chunk["choices"][0]["finish_reason"] for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(chunk.get("usage") is None for chunk in pieces)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    # Without the option, the figures are in the last chunk.
    assert "usage" not in (final := events(server.post({**body, "stream": True}))[-1])
    assert final["metrics"]["speculative_decoding"].keys() == whole["metrics"]["speculative_decoding"].keys()


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_seeds_of_their_own(server: Served, pipe: Pipeline, stream: bool) -> None:
    sampled = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    alone = [pipe.generate(QUESTION, max_new_tokens=16, seed=seed, **sampled) for seed in (7, 8, 9)]
    assert len({one.text for one in alone}) == 3
    response = server.post(question(QUESTION, n=3, seed=7, stream=stream, **sampled))
    assert texts(response) == [one.text for one in alone]
    if not stream:
        usage, prompt = response.json()["usage"], alone[0].stats.num_prompt_tokens
        generated = sum(len(one.token_ids) for one in alone)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, generated)


def test_values_of_a_text_request_are_checked_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the endpoint with the request's names, and by ``SamplingParams`` with its own; a few more by the pipeline."""
    checked: list[str] = []
    check = Rule.check
    monkeypatch.setattr(Rule, "check", lambda rule, name, value: checked.append(name) or check(rule, name, value))
    assert server.post(question()).status_code == 200
    assert checked.count("max_tokens") == checked.count("max_new_tokens") == 1
    assert len(checked) <= 9


def test_defaults_are_those_of_openai(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    async def record(prompt: Any, **keywords: Any) -> Any:
        asked.update(keywords)
        yield mmspec.Piece("", [], "stop", mmspec.Stats())

    monkeypatch.setattr(server.pipe, "astream", record)
    server.post({"model": "tiny-llava", "messages": [{"role": "user", "content": "Hello."}]})
    unfiltered = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert asked["params"] == SamplingParams(**unfiltered, max_new_tokens=256)  # the model's
    server.post({"model": "tiny-llava", "messages": [{"role": "user", "content": "Hello."}], "top_k": -1})
    assert asked["params"] == SamplingParams(**unfiltered, max_new_tokens=256)
    monkeypatch.setattr(server.pipe, "defaults", Defaults())
    server.post({"model": "tiny-llava", "messages": [{"role": "user", "content": "Hello."}], "stop": []})
    assert asked["params"] == SamplingParams(**unfiltered, max_new_tokens=Limits().max_tokens, stop=[])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.9}, (0.6, 0.9, 0)),  # vLLM does not read do_sample
        ({"do_sample": True}, (1.0, 1.0, 0)),  # generate() has a top_k of 50
        ({"do_sample": True, "temperature": 0.0, "top_k": 5}, (0.0, 1.0, 5)),
    ],
)
def test_defaults_are_what_the_generation_config_names_as_in_vllm(
    server: Served, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    asked: list[SamplingParams] = []

    async def record(prompt: Any, **keywords: Any) -> Any:
        asked.append(server.pipe.defaults.complete(keywords["params"]))
        yield mmspec.Piece("", [], "stop", mmspec.Stats())

    monkeypatch.setattr(server.pipe, "astream", record)
    monkeypatch.setattr(server.pipe.model, "generation_config", GenerationConfig(**config))
    server.post({"model": "tiny-llava", "messages": USER})
    assert (asked[0].temperature, asked[0].top_p, asked[0].top_k) == expected


def test_more_tokens_than_the_limit_are_cut(pipe: Pipeline) -> None:
    with served(pipe, Limits(max_tokens=5)) as server:
        new = {"max_tokens": None, "max_completion_tokens": 6}
        for asked in ({"max_tokens": 4096}, new, {"max_tokens": 5}, {"max_tokens": None}):
            found = server.post(question(**asked)).json()
            assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (5, "length")
        assert server.post(question(max_tokens=4)).json()["usage"]["completion_tokens"] == 4


def test_fields_that_are_left_out_are_the_models(server: Served, pipe: Pipeline) -> None:
    config = pipe.model.generation_config
    alone = {"do_sample": True, "temperature": 1.5, "top_k": 50, "repetition_penalty": 1.1, "max_new_tokens": 16}
    expected = pipe.generate(QUESTION, seed=7, **{name: alone[name] for name in alone if name != "do_sample"}).text
    body = {"model": "tiny-llava", "messages": [{"role": "user", "content": QUESTION}], "seed": 7}
    before = {name: getattr(config, name) for name in alone}
    try:
        config.update(**alone)
        answers = [
            server.post({**body, **own}).json()["choices"][0] for own in ({}, {"max_tokens": 3}, {"temperature": 0})
        ]
    finally:
        config.update(**before)
    assert answers[0]["message"]["content"] == expected != ""
    assert expected.startswith(answers[1]["message"]["content"])
    penalised = pipe.generate(QUESTION, max_new_tokens=16, repetition_penalty=1.1).text
    assert answers[2]["message"]["content"] == penalised


def test_a_follow_up_computes_its_own_tokens(one_thread: None) -> None:
    """Further choices of a prompt, and the next turn."""
    alone = mmspec.load("tiny-llava", drafter=None, device="cpu")
    cached = mmspec.load("tiny-llava", device="cpu", prefix_cache=1 << 26)
    with served(cached) as server:
        asked = question(QUESTION, data_uri(SCENE), max_tokens=12, n=2, temperature=0)
        first = server.post(asked).json()
        texts = [choice["message"]["content"] for choice in first["choices"]]
        assert texts == 2 * [alone.generate(QUESTION, images=str(SCENE), max_new_tokens=12).text]
        answer = {"role": "assistant", "content": texts[0]}
        turns = [*asked["messages"], answer, {"role": "user", "content": "How many objects are there?"}]
        then = server.post({**asked, "messages": turns, "n": 1}).json()
        known = then["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] - 4 < known < then["usage"]["prompt_tokens"]
        assert figures(server)["vllm:prefix_cache_hits_total"] == first["usage"]["prompt_tokens"] + known


def test_stop_strings(server: Served, pipe: Pipeline) -> None:
    text = pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=40).text
    stop = text.split()[5]
    response = server.post(question(QUESTION, data_uri(SCENE), max_tokens=40, stop=stop))
    assert texts(response) == [text.partition(stop)[0]]
    assert response.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Served, pipe: Pipeline, stream: bool) -> None:
    alone = pipe.generate(QUESTION, max_new_tokens=8, logprobs=3, temperature=2.0, seed=1)
    body = question(logprobs=True, top_logprobs=3, max_tokens=8, temperature=2.0, seed=1, stream=stream)
    response = server.post(body)
    if stream:
        parts = [chunk["choices"][0].get("logprobs") for chunk in events(response)]
        found = [one for part in parts if part for one in part["content"]]
    else:
        found = response.json()["choices"][0]["logprobs"]["content"]
    decode = pipe.io.tokenizer.decode
    assert [one["token"] for one in found] == [decode([token]) for token in alone.token_ids]
    assert [bytes(one["bytes"]).decode() for one in found] == [one["token"] for one in found]
    # The seed gives the same tokens; their logits have the bits of the same trees only.
    assert [one["logprob"] for one in found] == pytest.approx([one.logprob for one in alone.logprobs], abs=1e-4)
    for one, expected in zip(found, alone.logprobs, strict=True):
        assert [top["token"] for top in one["top_logprobs"]] == [decode([token]) for token, _ in expected.top]


def test_completions_take_prompts_as_they_are(server: Served, pipe: Pipeline) -> None:
    prompts = ["A large red", "There is a"]
    ids = [pipe.io.tokenizer(text, return_tensors="pt") for text in prompts]
    out = [pipe.model.generate(**one, max_new_tokens=10, do_sample=False)[0, one.input_ids.shape[1] :] for one in ids]
    expected = [pipe.io.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out]
    body = {"model": "tiny-llava", "prompt": prompts, "max_tokens": 10, "temperature": 0, "logprobs": 2}
    found = server.post(body, "completions").json()
    assert found["object"] == "text_completion"
    assert [choice["text"] for choice in found["choices"]] == expected
    assert expected[0].startswith(" ")
    logprobs = found["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == expected[0]
    offsets = logprobs["text_offset"]
    assert all(expected[0][at:].startswith(text) for at, text in zip(offsets, logprobs["tokens"], strict=True))
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert found["usage"]["prompt_tokens"] == sum(one.input_ids.shape[1] for one in ids)
    chunks = events(server.post({**body, "prompt": prompts[0], "stream": True}, "completions"))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected[0]
    streamed = [at for chunk in chunks for choice in chunk["choices"] for at in choice["logprobs"]["text_offset"]]
    assert streamed == offsets


def test_models_health_and_metrics(server: Served) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny-llava", "model", 2048)
    assert httpx.get(f"{server.url}/v1/models/tiny-llava").json() == model
    assert httpx.get(f"{server.url}/health").status_code == 200
    before = figures(server)
    assert before["vllm:num_requests_running"] == before["vllm:num_requests_waiting"] == 0
    assert before["vllm:num_torch_threads"] == torch.get_num_threads()
    answers = [server.post(question(max_tokens=20, n=2)).json() for _ in range(2)]
    after = figures(server)
    for name, field in (
        ("spec_decode_num_drafts", "num_spec_steps"),
        ("spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        added = after[f"vllm:{name}_total"] - before.get(f"vllm:{name}_total", 0)
        assert added == sum(answer["metrics"]["speculative_decoding"][field] for answer in answers) > 0
    by_position = {key: value for key, value in after.items() if "per_pos_total" in key}
    accepted = sum(value - before.get(key, 0) for key, value in by_position.items())
    assert accepted == sum(one["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for one in answers)
    for name, count in (("time_to_first_token_seconds_count", 4), ("request_success_total/length", 4)):
        assert after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0) == count
    assert after["vllm:inter_token_latency_seconds_count"] > before["vllm:inter_token_latency_seconds_count"]


def figures(server: Served) -> dict[str, float]:
    """Values of the metrics by name, with the last label if there are several."""
    found = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            head, value = line.rsplit(" ", 1)
            name, _, labels = head.partition("{")
            more = [part for part in labels.strip("}").split(",") if not part.startswith("model_name")]
            found["/".join([name, *(part.split('"')[1] for part in more)])] = float(value)
    return found


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "store": False,
    "service_tier": "auto",
    "user": "ann",
    "response_format": {"type": "text"},
    "stream": None,
    "stop": None,
    "n": None,
    "seed": None,
    "top_k": -1,
}


def test_fields_that_ask_for_nothing_are_accepted(server: Served) -> None:
    assert texts(server.post(question(**NEUTRAL))) == texts(server.post(question()))


USER = [{"role": "user", "content": "Hello."}]
IMAGE_UR = "messages[0].content[0].image_ur"
URL = "messages[0].content[0].image_url.url"
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"messages": [{"role": "critic", "content": "x"}]}, 400, "messages[0].role", "'system', 'developer', 'user'"),
        ({"messages": [{**USER[0], "tool_call_id": "a"}]}, 400, "messages[0]", "tool_call_id goes with the role tool"),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages[1].content[0].image_url.url",
            "is required",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            400,
            "messages[0].content[0].image_url.url",
            "--allow-urls",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, 200, None, None),
        ({"model": "gpt-4o"}, 404, "model", "unknown model: expected 'tiny-llava', got 'gpt-4o'"),
        ({"model": None}, 400, "model", "model is required"),
        ({"frequency_penalty": 2.5}, 400, "frequency_penalty", "must be a number in [-2, 2]: got 2.5"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "is required"),
        ({"tool_choice": "required"}, 400, "tool_choice", "tool_choice required goes with tools: got none"),
        ({"max_new_tokens": 1}, 400, "max_new_tokens", "got 1; did you mean max_tokens?"),
        ({"repetition_penality": 1}, 400, "repetition_penality", "got 1; did you mean repetition_penalty?"),
        ({"messages": [{**USER[0], "rol": "ann"}]}, 400, "messages[0].rol", "; did you mean role?"),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "image_ur": 1}]}]}, 400, IMAGE_UR, "mean image_url?"),
        ({"logit_bias": {"90000": 1}}, 400, None, "below the vocabulary's size"),
        ({"temperature": -1}, 400, "temperature", "temperature must be 0 or"),
        ({"top_p": 0}, 400, "top_p", "top_p must be in (0, 1]: got 0"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens must be a whole number in [1, 2147483648]: got 0"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, None, "are one limit: got 5 and 6"),
        ({"n": 9}, 400, "n", "n must be at most 8: got 9"),
        ({"stop": ["a"] * 17}, 400, "stop", "at most 16 texts"),
        ({"stop": ""}, 400, "stop", "none of them empty"),
        ({"stream": False, "stream_options": {"include_usage": True}}, 400, "stream_options", "goes with stream"),
        ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "is not supported"),
        ({"seed": 1 << 64}, 400, "seed", "seed must be"),
        ({"messages": [{"role": "user", "content": "x" * 500_001}]}, 400, "messages", "at most 500000 characters"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, 400, None, "shorter than the model's context"),
    ],
)
def test_mistakes_are_named(
    server: Served, fields: dict[str, Any], status: int, param: str | None, message: str | None
) -> None:
    for stream in (False, True):
        response = server.post({**question(max_tokens=2), "stream": stream, **fields})
        assert response.status_code == status, response.text
        if message is not None:
            error = response.json()["error"]
            assert message in error["message"]
            assert "\n" not in error["message"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}', b"[" * 100_000]
)
def test_malformed_bodies(server: Served, body: bytes) -> None:
    for path in ("chat/completions", "completions"):
        response = httpx.post(f"{server.url}/v1/{path}", content=body, timeout=TIMEOUT)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_other_paths_and_methods_have_the_same_shape(server: Served) -> None:
    for status, response in (
        (404, httpx.get(f"{server.url}/v1/embeddings")),
        (405, httpx.get(f"{server.url}/v1/chat/completions")),
        (404, httpx.get(f"{server.url}/v1/models/other")),
        (404, httpx.get(f"{server.url}/docs")),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_media_are_limited(pipe: Pipeline, tmp_path: Path) -> None:
    with served(pipe, Limits(max_images=1, max_videos=0, max_pixels=10_000, max_body=1)) as server:

        def error(body: dict[str, Any], status: int = 400) -> dict[str, Any]:
            response = server.post(body)
            assert response.status_code == status
            return response.json()["error"]

        scene, large = data_uri(SCENE), data_uri(png(tmp_path, 101, 100))
        found = error(question(QUESTION, scene, scene))
        assert found["message"] == "a request may have at most 1 images: got 2"
        assert found["param"] == "messages[0].content[1].image_url.url"
        assert "at most 10000 pixels, received 101x100" in error(question(QUESTION, large))["message"]
        for url, message in (
            ("data:image/png;base64,QUJD", "expected an image, received text"),
            (
                "data:image/png;base64,JVBERi0xLjcK",
                "expected an image, received a PDF document; render its pages first",
            ),
            ("data:image/png;base64,???", "must contain base64"),
            ("data:image/png,abc", "data:TYPE;base64,CONTENT"),
            ("data:", "data:TYPE;base64,CONTENT"),
            ("", "must be a data URI"),
            ("file:///etc/passwd", "must be a data URI"),
            (str(SCENE), "must be a data URI"),
            (data_uri(CLIP), "expected an image, received an MP4 or MOV video"),
            (scene[:-400], "received a broken one"),
        ):
            assert message in error(question(QUESTION, url))["message"], url
        # Bodies are limited with and without a Content-Length.
        big = json.dumps(question("x" * (1 << 20))).encode()
        for body in (big, iter([big[:1000], big[1000:]])):
            response = httpx.post(f"{server.url}/v1/chat/completions", content=body, timeout=TIMEOUT)
            assert response.status_code == 413
            assert response.json()["error"]["message"] == "a request's body must have at most 1048576 bytes: got more"
        assert server.idle


def test_a_text_model_refuses_images_and_reads_parts_as_text(one_thread: None) -> None:
    pipe = mmspec.load("tiny-hybrid", drafter=None, device="cpu")
    with served(pipe) as server:
        parts = [{"type": "text", "text": "Work out:"}, {"type": "text", "text": "3 + 4"}]
        body = {"model": "tiny-hybrid", "temperature": 0, "max_tokens": 4}
        (found,) = texts(server.post({**body, "messages": [{"role": "user", "content": parts}]}))
        assert found == pipe.generate("Work out:\n3 + 4", max_new_tokens=4).text
        response = server.post({**question(QUESTION, data_uri(SCENE)), "model": "tiny-hybrid"})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the model reads text only: got image_url"


def test_messages_that_a_chat_template_refuses(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    monkeypatch.setattr(server.pipe.hf_processor, "chat_template", refusing)
    response = server.post(question(messages=[{"role": "system", "content": "Be brief."}]))
    assert response.status_code == 400
    message = "the model's chat template does not accept the messages: no system role"
    assert response.json()["error"]["message"] == message


def test_the_context_is_limited(one_thread: None) -> None:
    pipe = mmspec.load("tiny-llava", drafter=None, device="cpu")
    with served(pipe, Limits(max_model_len=60)) as server:
        response = server.post(question("word " * 60))
        assert response.status_code == 400
        assert "shorter than the model's context of 60 tokens" in response.json()["error"]["message"]
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 60
        usage = server.post(question(QUESTION, data_uri(SCENE), max_tokens=100)).json()["usage"]
        assert usage["total_tokens"] == 60
    assert pipe.context_limit == 2048  # of the caller's own requests


@pytest.mark.parametrize("after", [0, 1])
def test_a_failure_of_ours_is_500_or_an_event(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    async def fail(prompt: Any, **keywords: Any) -> Any:
        for _ in range(after):
            yield mmspec.Piece("x", [1])
        raise RuntimeError("secret")

    monkeypatch.setattr(server.pipe, "astream", fail)
    message = "internal error (RuntimeError): details are in the server's log"
    response = server.post(question())
    assert response.status_code == 500
    assert response.json()["error"] == {"message": message, "type": "server_error", "param": None, "code": None}
    response = server.post(question(stream=True))
    assert response.status_code == (200 if after else 500)
    if after:
        assert events(response)[-1]["error"]["message"] == message
    assert "secret" not in response.text
    assert "secret" in caplog.text
    assert eventually(lambda: server.idle)


def test_response_formats_become_constraints(server: Served, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    asked: list[Any] = []

    async def record(prompt: Any, **keywords: Any) -> Any:
        asked.append(keywords["params"])
        yield mmspec.Piece("{}", [1], "stop", mmspec.Stats())

    formats = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "count", "strict": True, "schema": schema}},
    ]
    monkeypatch.setattr(pipe, "astream", record)
    for given in formats:
        assert texts(server.post(question(response_format=given))) == ["{}"]
    assert [json.loads(params.json_schema) for params in asked] == [{"type": "object"}, schema]


@pytest.mark.parametrize("stream", [False, True])
def test_the_largest_seed(server: Served, pipe: Pipeline, stream: bool) -> None:
    """The seed of the second choice is 0."""
    sampled = {"temperature": 1.5, "max_tokens": 8}
    response = server.post(question(QUESTION, n=2, seed=(1 << 64) - 1, stream=stream, **sampled))
    assert response.status_code == 200
    if not stream:
        second = pipe.generate(QUESTION, max_new_tokens=8, temperature=1.5, seed=0)
        assert response.json()["choices"][1]["message"]["content"] == second.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_of_a_choice(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no parameters")

    monkeypatch.setattr("mmspec.serving.runner.replace", fails)
    response = server.post(question(n=2, seed=1, stream=stream, temperature=1.0, max_tokens=4))
    assert "internal error (RuntimeError)" in response.text
    assert eventually(lambda: server.idle)


def test_keys_hosts_and_origins(pipe: Pipeline) -> None:
    """The guard's own rules are in ``test_middleware``."""
    options = {"api_key": "secret", "hosts": {"127.0.0.1"}, "origins": ["http://app.example"]}
    with served(pipe, **options) as server:

        def status(path: str = "/v1/models", **headers: str) -> int:
            found = httpx.get(f"{server.url}{path}", headers={"Authorization": "Bearer secret", **headers})
            return found.status_code

        assert status() == status(Origin=server.url) == status(Origin="http://app.example") == 200
        assert status(Authorization="Bearer secre") == status("/metrics", Authorization="") == 401
        assert status("/health", Authorization="") == 200
        assert status(Host="evil.example") == status(Origin="http://evil.example") == 403
        assert httpx.get(f"{server.url}/v1/models").headers["WWW-Authenticate"] == "Bearer"
        for origin, allowed in (("http://app.example", "http://app.example"), ("http://evil.example", None)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            preflight = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
            assert preflight.headers.get("access-control-allow-origin") == allowed


def test_figures_of_a_server_without_a_drafter(one_thread: None) -> None:
    with served(mmspec.load("tiny-llava", drafter=None, device="cpu")) as server:
        found = server.post(question(max_tokens=5)).json()["metrics"]["speculative_decoding"]
        assert (found["num_draft_tokens"], found["mean_acceptance_length"]) == (0, 1.0)
