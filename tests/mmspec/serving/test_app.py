"""Endpoints: answers, streams, choices, forms of messages and prompts, limits, errors, other paths, spelt tokens."""

import json
import time
from math import inf

import httpx
import pytest
import torch
from PIL import Image
from prometheus_client import CollectorRegistry, Gauge
from tokenizers import AddedToken
from transformers import GenerationConfig

import mmspec
from mmspec import Piece, UserError
from mmspec.engine.stats import Stats, TokenLogprob
from mmspec.sampling.defaults import Defaults
from mmspec.serving import formats
from mmspec.serving.formats import ChatFormat, TextFormat
from mmspec.serving.metrics import _PER_REQUEST
from mmspec.serving.schemas import ChatCompletionRequest, CompletionRequest
from mmspec.serving.settings import Limits, ServerSettings
from mmspec.targets.processor import Processor
from tests.mmspec.targets.test_detokenizer import _TOKENIZERS, TOKENIZERS, _sentencepiece, pipeline_of
from tests.testkit.served import CLIP, QUESTION, SCENE, TIMEOUT, data_uri, events, question, served, texts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["A large red", "There is a", "Three"]
SAMPLED = {"temperature": 1.5, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
TEXT, TOKENS = "A large red", 6
GREEDY = {"model": "tiny-llava", "temperature": 0, "max_tokens": 8}
USER = [{"role": "user", "content": "Hello."}]


def png(folder, width, height):
    Image.new("L", (width, height)).save(folder / "a.png")
    return folder / "a.png"


def test_an_answer_is_that_of_the_pipeline(server, pipe):
    alone = pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=16)
    body = server.post(question(QUESTION, data_uri(SCENE))).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert abs(body["created"] - time.time()) < 60
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, alone.finish_reason, None)
    prompt = alone.stats.num_prompt_tokens
    counts = {"prompt_tokens": prompt, "completion_tokens": 16, "total_tokens": prompt + 16}
    details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert body["usage"] == counts | details
    figures = body["metrics"]["speculative_decoding"]
    assert set(figures) == {"drafter", *_PER_REQUEST}
    assert figures["drafter"] == "flash"
    assert figures["drafter_error"] == ""
    assert figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] == 15  # the first is the prefill's


def test_conversations_images_and_videos_keep_their_places(server, pipe, tmp_path):
    red = tmp_path / "red.png"
    Image.new("RGB", (96, 96), "red").save(red)
    text, then = ({"type": "text", "text": text} for text in ("One.", "Two?"))
    images = [{"type": "image_url", "image_url": {"url": data_uri(file), "detail": "auto"}} for file in (red, SCENE)]
    video = {"type": "video_url", "video_url": {"url": data_uri(CLIP, "video/mp4")}}
    asked = [
        {"role": "user", "content": [text, *images]},
        {"role": "assistant", "content": "Yes.", "tool_calls": None, "refusal": None},
        {"role": "user", "content": [video, then]},
    ]
    messages = [
        {"role": "user", "content": [text, *({"type": "image", "path": str(file)} for file in (red, SCENE))]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "video", "path": str(CLIP)}, then]},
    ]
    body = {"model": "tiny-llava", "messages": asked, "temperature": 0, "max_completion_tokens": 16}
    assert texts(server.post(body)) == [pipe.generate(messages, max_new_tokens=16).text]


def test_a_stream_is_the_whole_answer_in_pieces(server):
    body = question(QUESTION, data_uri(SCENE), max_tokens=40)
    whole = server.post(body).json()
    response = server.post({**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
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
    each = events(
        server.post({**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    )
    counts = [chunk["usage"] for chunk in each[1:-1]]
    prompt = whole["usage"]["prompt_tokens"]
    assert {count["prompt_tokens"] for count in counts} == {prompt}
    generated = [count["completion_tokens"] for count in counts]
    assert generated == sorted(set(generated))
    assert counts[-1] == {"prompt_tokens": prompt, "completion_tokens": 40, "total_tokens": prompt + 40}
    # Without the option, the last chunk has the metrics.
    assert "usage" not in (final := events(server.post({**body, "stream": True}))[-1])
    assert final["metrics"]["speculative_decoding"].keys() == whole["metrics"]["speculative_decoding"].keys()


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        ({}, {}, (0.0, 1.0, 0)),
        ({}, {"temperature": 0.3, "top_k": -1, "max_tokens": 9}, (0.3, 1.0, 0, 9)),
        ({"temperature": 0.6, "top_p": 0.9}, {}, (0.0, 0.9, 0)),
        ({"do_sample": True}, {}, (1.0, 1.0, 50)),
        ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {}, (0.0, 1.0, 5)),
        ({"max_new_tokens": 256, "top_k": 5}, {"top_k": 3}, (0.0, 1.0, 3, 256)),
        ({"gguf_sampling": {"temperature": 0.8, "top_k": 40}}, {"top_k": 3}, (0.8, 1.0, 3)),
        (None, {}, (0.0, 1.0, 0)),  # the library's
    ],
)
def test_defaults_are_those_of_mmspec_generate(server, monkeypatch, config, fields, expected):
    asked = []

    async def record(prompt, **keywords):
        asked.append(server.pipe.defaults.complete(keywords["params"]))
        yield mmspec.Piece("", [], "stop", mmspec.Stats())

    monkeypatch.setattr(server.pipe, "astream", record)
    if config is None:
        monkeypatch.setattr(server.pipe, "defaults", Defaults())
    else:
        monkeypatch.setattr(server.pipe.model, "generation_config", GenerationConfig(**config))
    server.post({"model": "tiny-llava", "messages": USER, **fields})
    found = (asked[0].temperature, asked[0].top_p, asked[0].top_k, asked[0].max_new_tokens)
    assert found == (*expected, Limits().max_tokens)[:4]


def test_more_tokens_than_the_limit_are_cut(pipe):
    async def scrape():
        Gauge("of_all", "Replicas.", registry=(found := CollectorRegistry())).set(5)
        return found

    with served(pipe, Limits(max_tokens=5, max_stored=1), scrape=scrape) as server:
        assert "\nof_all 5.0\n" in httpx.get(f"{server.url}/metrics").text
        new = {"max_tokens": None, "max_completion_tokens": 6}
        for asked in ({"max_tokens": 4096}, new, {"max_tokens": 5}, {"max_tokens": None}):
            found = server.post(question(**asked)).json()
            assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (5, "length")
        assert server.post(question(max_tokens=4)).json()["usage"]["completion_tokens"] == 4
        kept = [server.post({"model": "tiny-llava", "input": "A"}, "responses").json()["id"] for _ in range(2)]
        assert [httpx.get(f"{server.url}/v1/responses/{name}").status_code for name in kept] == [404, 200]


def test_a_follow_up_computes_its_own_tokens(pipe):
    cached = mmspec.load("tiny-llava", drafter=None, device="cpu", dtype="float32", prefix_cache=1 << 26)
    with served(cached) as server:
        asked = question(QUESTION, data_uri(SCENE), max_tokens=12, n=2, temperature=0)
        first = server.post(asked).json()
        texts = [choice["message"]["content"] for choice in first["choices"]]
        assert texts == 2 * [pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=12).text]
        answer = {"role": "assistant", "content": texts[0]}
        turns = [*asked["messages"], answer, {"role": "user", "content": "How many objects are there?"}]
        then = server.post({**asked, "messages": turns, "n": 1}).json()
        known = then["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] - 4 < known < then["usage"]["prompt_tokens"]
        shared = figures(server)["vllm:prefix_cache_hits_total"] - known
        assert shared in (first["usage"]["prompt_tokens"], first["usage"]["prompt_tokens"] - 1)  # together or later


def test_a_restarted_server_computes_no_prompt_again(pipe, tmp_path):
    asked = question(QUESTION, data_uri(SCENE), max_tokens=12, temperature=0)
    loading = {"model": "tiny-llava", "drafter": "recycle+ngram", "device": "cpu", "dtype": "float32"}
    loading |= {"prefix_cache": 64 << 20, "prefix_cache_dir": tmp_path, "prefix_cache_size": 16 << 20}
    answers = []
    for _ in range(2):
        (started,) = ServerSettings(loading, Limits(), {}).pipelines().values()
        with served(started) as server:
            answers.append(server.post(asked).json())
        started.engine.close()
    first, again = ((one["choices"][0]["message"], one["usage"]["prompt_tokens_details"]) for one in answers)
    assert first[0] == again[0]
    assert first[0]["content"] == pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=12).text
    assert (first[1]["cached_tokens"], again[1]["cached_tokens"]) == (0, answers[0]["usage"]["prompt_tokens"])
    assert started.engine.prefixes.files.limit == 16 << 20


def test_logprobs(server, pipe):
    alone = pipe.generate(QUESTION, max_new_tokens=8, logprobs=3, temperature=2.0, seed=1)
    response = server.post(question(logprobs=True, top_logprobs=3, max_tokens=8, temperature=2.0, seed=1))
    found = response.json()["choices"][0]["logprobs"]["content"]
    decode = pipe.processor.tokenizer.decode
    assert [one["token"] for one in found] == [decode([token]) for token in alone.token_ids]
    assert [bytes(one["bytes"]).decode() for one in found] == [one["token"] for one in found]
    # The seed gives the same tokens; their logits have the bits of the same trees only.
    assert [one["logprob"] for one in found] == pytest.approx([one.logprob for one in alone.logprobs], abs=1e-4)
    for one, expected in zip(found, alone.logprobs, strict=True):
        assert [top["token"] for top in one["top_logprobs"]] == [decode([token]) for token, _ in expected.top]


def test_completions_take_prompts_as_they_are(server, pipe):
    prompts = PROMPTS[:2]
    ids = [pipe.processor.tokenizer(text, return_tensors="pt") for text in prompts]
    out = [pipe.model.generate(**one, max_new_tokens=10, do_sample=False)[0, one.input_ids.shape[1] :] for one in ids]
    expected = [pipe.processor.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out]
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
    usage = found["usage"]
    assert usage["prompt_tokens"] == sum(one.input_ids.shape[1] for one in ids)
    twice = server.post({**body, "n": 2}, "completions").json()
    assert [choice["text"] for choice in twice["choices"]] == [text for text in expected for _ in range(2)]
    counts = {name: twice["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    generated = 2 * usage["completion_tokens"]  # the tokens of a prompt count once
    assert counts == {
        "prompt": usage["prompt_tokens"],
        "completion": generated,
        "total": usage["prompt_tokens"] + generated,
    }
    chunks = events(server.post({**body, "prompt": prompts[0], "stream": True}, "completions"))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected[0]
    streamed = [at for chunk in chunks for choice in chunk["choices"] for at in choice["logprobs"]["text_offset"]]
    assert streamed == offsets


def test_models_health_and_metrics(server):
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny-llava", "model", 2048)
    assert httpx.get(f"{server.url}/v1/models/tiny-llava").json() == model
    assert httpx.get(f"{server.url}/health").status_code == 200
    before = figures(server)
    assert before["vllm:num_requests_running"] == before["vllm:num_requests_waiting"] == 0
    assert before["vllm:num_torch_threads"] == torch.get_num_threads()
    began = time.perf_counter()
    for _ in range(2):
        server.post(question(max_tokens=20, n=2))
    seconds, after = time.perf_counter() - began, figures(server)
    for name, count in (("time_to_first_token_seconds_count", 4), ("request_success_total/length", 4)):
        assert after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0) == count
    assert after["vllm:inter_token_latency_seconds_count"] > before["vllm:inter_token_latency_seconds_count"]
    latency = "vllm:inter_token_latency_seconds_sum"
    assert after[latency] - before[latency] < 2 * seconds  # of two choices at a time


def figures(server):
    """Values of the metrics by name, with the last label if there are several."""
    found = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            head, value = line.rsplit(" ", 1)
            name, _, labels = head.partition("{")
            more = [part for part in labels.strip("}").split(",") if not part.startswith("model_name")]
            found["/".join([name, *(part.split('"')[1] for part in more)])] = float(value)
    return found


def test_media_are_limited(pipe, tmp_path):
    with served(pipe, Limits(max_images=1, max_videos=1, max_pixels=10_000, max_body=1)) as server:

        def answered(asked, status=400):
            response = server.post(asked)
            assert response.status_code == status, response.text
            return response.json() if status == 200 else response.json()["error"]

        fits, large = (data_uri(png(tmp_path, width, 100)) for width in (100, 101))
        answered(question(QUESTION, fits, max_tokens=1), 200)
        assert "at most 10000 pixels, received 101x100" in answered(question(QUESTION, large))["message"]
        video = {"type": "video_url", "video_url": {"url": data_uri(CLIP, "video/mp4")}}
        found = answered(question(messages=[{"role": "user", "content": [video]}]))
        assert "messages[0].content[0].video_url.url: expected at most 10000 pixels" in found["message"]
        for asked, kind in (
            (question(QUESTION, fits, fits), "image"),
            (question(messages=[{"role": "user", "content": [video, video]}]), "video"),
        ):
            found = answered(asked)
            assert found["message"] == f"a request may have at most 1 {kind}s: got 2"
            assert found["param"] == f"messages[0].content[1].{kind}_url.url"
        for url, message in (
            ("data:image/png;base64,QUJD", "expected an image, received text"),
            ("data:image/png,abc", "data:TYPE;base64,CONTENT"),
            ("", "must be a data URI"),
            ("file:///etc/passwd", "must be a data URI"),
            (data_uri(CLIP), "expected an image, received an MP4 or MOV video"),
        ):
            assert message in answered(question(QUESTION, url))["message"], url
        # Bodies are limited with and without a Content-Length.
        big = json.dumps(question("x" * (1 << 20))).encode()
        for body in (big, iter([big[:1000], big[1000:]])):
            response = httpx.post(f"{server.url}/v1/chat/completions", content=body, timeout=TIMEOUT)
            assert response.status_code == 413
            assert response.json()["error"]["message"] == "a request's body must have at most 1048576 bytes: got more"
        assert server.idle


def test_a_text_model_refuses_images_and_reads_parts_as_text(one_thread):
    pipe = mmspec.load("tiny-hybrid", drafter=None, device="cpu")
    with served(pipe) as server:
        parts = [{"type": "text", "text": "Work out:"}, {"type": "text", "text": "3 + 4"}]
        body = {"model": "tiny-hybrid", "temperature": 0, "max_tokens": 4}
        (found,) = texts(server.post({**body, "messages": [{"role": "user", "content": parts}]}))
        assert found == pipe.generate("Work out:\n3 + 4", max_new_tokens=4).text
        response = server.post({**question(QUESTION, data_uri(SCENE)), "model": "tiny-hybrid"})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the model reads text only: got image_url"
        figures = server.post({**body, "messages": USER}).json()["metrics"]["speculative_decoding"]
        assert (figures["num_draft_tokens"], figures["mean_acceptance_length"]) == (0, 1.0)  # without a drafter


def test_keys_hosts_and_origins(pipe):
    """The guard's own rules are in ``test_middleware``."""
    options = {"api_key": "secret", "hosts": {"127.0.0.1"}, "origins": ["http://app.example"]}
    key, app = {"Authorization": "Bearer secret"}, {"Origin": "http://app.example"}
    with served(pipe, **options) as server:
        for headers, status in ((key, 200), (key | app, 200), (app, 401), (key | {"Host": "evil.example"}, 403)):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.get(f"{server.url}/v1/models")
        assert (refused.headers["WWW-Authenticate"], refused.json()["error"]["code"]) == ("Bearer", "invalid_api_key")
        for origin, allowed in (("http://app.example", "http://app.example"), ("http://evil.example", None)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            preflight = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
            assert preflight.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompts", "n", "seed"), [(1, 3, 7), (2, 1, 7), (2, 2, (1 << 64) - 1)])
def test_the_seed_of_a_choice_depends_on_its_place_among_those_of_its_prompt(server, pipe, prompts, n, seed, stream):
    expected = [
        pipe.generate(
            prompt, max_new_tokens=TOKENS, chat_template=False, seed=(seed + number) % (1 << 64), **SAMPLED
        ).text
        for prompt in PROMPTS[:prompts]
        for number in range(n)
    ]
    assert len(set(expected)) == len(expected)
    body = {"model": "tiny-llava", "prompt": PROMPTS[:prompts], "n": n, "seed": seed, **SAMPLED}
    assert texts(server.post({**body, "max_tokens": TOKENS, "stream": stream}, "completions")) == expected


def completion(server, **fields):
    return texts(server.post({**GREEDY, **fields}, "completions"))


def test_prompts_of_token_ids_and_echo(server, pipe):
    ids = pipe.processor.tokenizer(TEXT)["input_ids"]
    said = pipe.generate(TEXT, max_new_tokens=8, chat_template=False).text
    assert pipe.generate(ids, max_new_tokens=8).text == said
    for prompt in (ids, [ids]):
        assert completion(server, prompt=prompt) == [said]
    given = pipe.processor.tokenizer.decode(ids)
    for stream in (False, True):
        assert completion(server, prompt=[ids, ids[:2]], n=2, echo=True, stream=stream)[:2] == [given + said] * 2
        assert completion(server, prompt=TEXT, echo=True, stream=stream) == [TEXT + said]


def test_an_images_token_needs_its_image(pipe):
    token = pipe.processor.tokenizer.convert_tokens_to_ids(pipe.hf_processor.image_token)
    with pytest.raises(UserError, match=f"images and videos need chat messages: got their token {token}"):
        pipe.generate([1, token])


def test_structured_completions(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    assert completion(server, prompt="A: ", response_format=form)[0] in ("1", "2")
    assert completion(server, prompt="A: ", response_format={"type": "json_object"})[0].startswith("{")


def test_tokens(server, pipe):
    def post(path, body):
        response = httpx.post(f"{server.url}/{path}", json=body, timeout=TIMEOUT)
        return response.json()

    ids = pipe.processor.tokenizer(TEXT)["input_ids"]
    names = pipe.processor.tokenizer.convert_ids_to_tokens(ids)
    limit = {"max_model_len": pipe.context_limit}
    assert post("tokenize", {"model": "tiny-llava", "prompt": TEXT, "return_token_strs": True}) == {
        **limit,
        "count": len(ids),
        "tokens": ids,
        "token_strs": names,
    }
    named = pipe.processor.tokenizer("a</s>b")["input_ids"]
    typed = pipe.processor.tokenizer("a</s>b", split_special_tokens=True)["input_ids"]
    for more, expected in (({}, named), ({"parse_special": True}, named), ({"parse_special": False}, typed)):
        assert post("tokenize", {"prompt": "a</s>b", **more})["tokens"] == expected
    plain = pipe.processor.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert post("tokenize", {"prompt": TEXT, "add_special_tokens": False})["tokens"] == plain
    messages = question()["messages"]
    chat = post("tokenize", {"messages": messages})
    assert chat["count"] == pipe.generate(messages, max_new_tokens=1).stats.num_prompt_tokens
    error = post("tokenize", {"messages": messages, "parse_special": True})["error"]
    assert "parse_special go with prompt" in error["message"]
    assert post("detokenize", {"tokens": plain}) == {"prompt": TEXT}


@pytest.fixture(scope="module")
def coder(one_thread):
    """A random model whose tokenizer has <s> before prompts and tokens of fill-in-the-middle that are not special."""
    tokenizer = _sentencepiece("legacy")
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=False) for name in ("fim_prefix", "fim_suffix")])
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=False) for name in ("fim_middle", "file_sep")])
    with served(pipeline_of(tokenizer)) as running:
        yield running


def test_special_tokens_of_prompts(coder):
    named, prompt = coder.pipe.processor.tokenizer, "<s>the</s>a"
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    for more, keywords in (
        ({}, {}),
        ({"add_special_tokens": False}, {"add_special_tokens": False}),
        ({"parse_special": False}, {"split_special_tokens": True}),
        ({"parse_special": False, "add_special_tokens": False}, plain),
    ):
        asked = {"temperature": 0, "max_tokens": 6, "prompt": [prompt, "a b"], "echo": True, **more}
        answers = [
            coder.pipe.generate(named(one, **keywords)["input_ids"], max_new_tokens=6) for one in asked["prompt"]
        ]
        found = coder.post(asked, "completions").json()
        joined = [before + one.text for before, one in zip(asked["prompt"], answers, strict=True)]
        assert [choice["text"] for choice in found["choices"]] == joined
        assert found["usage"]["prompt_tokens"] == sum(one.stats.num_prompt_tokens for one in answers)
    chat = {"messages": [{"role": "user", "content": prompt}]}
    coder.pipe.processor.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    try:
        tokens = httpx.post(f"{coder.url}/tokenize", json=chat, timeout=TIMEOUT).json()["tokens"]
    finally:
        coder.pipe.processor.tokenizer.chat_template = None
    assert not {1, 2} & {*tokens}


@pytest.mark.parametrize("stream", [False, True])
def test_a_middle_between_prompt_and_suffix(coder, stream):
    processor = coder.pipe.processor
    names = [f"<|{name}|>" for name in ("fim_prefix", "fim_suffix", "fim_middle", "file_sep")]
    pre, suf, mid, sep = processor.tokenizer.convert_tokens_to_ids(names)
    the, b = (processor.text_ids(text, add_special_tokens=False) for text in ("the</s>", "b"))
    asked = {"temperature": 0, "max_tokens": 6, "stream": stream}
    for end, reason in ((None, "length"), (sep, "stop")):
        asked |= {"logit_bias": {end: 100}} if end else {}
        bias = {"logit_bias": {end: 100.0}, "stop_token_ids": [end]} if end else {}
        expected = coder.pipe.generate([1, pre, *the, suf, *b, mid], max_new_tokens=6, **bias)
        response = coder.post({**asked, "prompt": "the</s>", "suffix": "b"}, "completions")
        assert texts(response) == [expected.text]
        assert (expected.finish_reason, expected.text == "") == (reason, end is not None)
        body = {**asked, "n_predict": 6, "input_prefix": "the</s>", "input_suffix": "b", "prompt": "a</s>"}
        body |= {"input_extra": [{"text": "b", "time": [1, 2]}], "n_indent": 4, "samplers": ["infill"]}
        body.pop("max_tokens")
        response = httpx.post(f"{coder.url}/infill", json=body, timeout=TIMEOUT)
        assert response.status_code == 200, response.text
        parts = response.text.removesuffix("\n\n").split("\n\n") if stream else [f"data: {response.text}"]
        parts = [json.loads(part.removeprefix("data: ")) for part in parts]
        files = [processor.text_ids(text, add_special_tokens=False) for text in ("tmp\n", "b", "filename\n", "a")]
        start = processor.tokenizer("a</s>", add_special_tokens=False)["input_ids"]
        ids = [1, sep, *files[0], *files[1], sep, *files[2], pre, *the, *start, suf, *b, mid]
        expected = coder.pipe.generate(ids, max_new_tokens=6, **bias)
        assert "".join(part["content"] for part in parts) == expected.text
        assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
        kept = {"stop_type": "eos" if end else "limit", "tokens_evaluated": len(ids), "model": "m", "truncated": False}
        assert parts[-1].items() >= kept.items()
        assert parts[-1]["tokens_predicted"] == len(expected.token_ids)


def test_a_middle_needs_its_tokens(server):
    bodies = {"v1/completions": {"prompt": "a", "suffix": "b"}, "infill": {"input_prefix": "a", "input_suffix": "b"}}
    for path, body in bodies.items():
        found = httpx.post(f"{server.url}/{path}", json=body, timeout=TIMEOUT)
        message = "a suffix needs a model that fills in the middle: it has no token such as <|fim_middle|>"
        assert (found.status_code, found.json()["error"]["message"]) == (400, message)


def test_paths(server):
    assert httpx.get(f"{server.url}/openapi.json").status_code == 404
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    unknown = httpx.get(f"{server.url}/v2").json()["error"]["message"]
    for endpoint in ("POST /v1/chat/completions", "DELETE /v1/responses/{name}", "GET /v1/models", "GET /livez"):
        assert endpoint in page.text
        assert endpoint in unknown
    response = httpx.get(f"{server.url}/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"


WORD = "naïve 👩‍🚀 日本"
ASKED = {
    "model": "tiny-hybrid",
    "temperature": 0,
    "max_tokens": 80,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": WORD}}},
}


@pytest.fixture(scope="module")
def hybrid(one_thread):
    pytest.importorskip("llguidance")
    with served(mmspec.load("tiny-hybrid", drafter=None, device="cpu")) as running:
        yield running


def chunks(response):
    return [chunk["choices"][0] for chunk in events(response)]


def test_bytes_spell_the_text(hybrid):
    body = {**ASKED, "messages": [{"role": "user", "content": "Say it."}], "logprobs": True, "top_logprobs": 2}
    choice = hybrid.post(body).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert json.loads(choice["message"]["content"]) == WORD
    assert b"".join(bytes(one["bytes"]) for one in tokens).decode() == f'"{WORD}"</s>'
    assert "bytes:\\xc3" in [one["token"] for one in tokens]
    streamed = [chunk.get("logprobs") for chunk in chunks(hybrid.post({**body, "stream": True}))]
    assert [one for part in streamed if part for one in part["content"]] == tokens


def test_offsets_are_characters_of_the_text(hybrid):
    body = {**ASKED, "prompt": "Say it.", "logprobs": 5}
    choice = hybrid.post(body, "completions").json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    processor = hybrid.pipe.processor
    spelt = [processor.token_bytes(token) for token in processor.text_ids(text, add_special_tokens=False)]
    # The offset of a token is its first character; the last token is the end of the sequence.
    before = [b"".join(spelt[:place]).decode(errors="ignore") for place in range(len(spelt) + 1)]
    assert found["text_offset"] == [len(one) for one in before]
    assert all(len(top) == 5 for top in found["top_logprobs"])
    streamed = chunks(hybrid.post({**body, "stream": True}, "completions"))
    assert [at for chunk in streamed for at in chunk["logprobs"]["text_offset"]] == found["text_offset"]


def test_offsets_of_a_stop_string_are_at_the_end(hybrid):
    body = {**ASKED, "prompt": "Say it.", "logprobs": 0, "stop": "ve 👩"}
    choice = hybrid.post(body, "completions").json()["choices"][0]
    assert choice["text"] == '"naï'
    assert choice["logprobs"]["text_offset"][-1] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echoes_of_sentencepiece(one_thread, stream):
    """Prompts and answers join as in the decoded whole: one blank before a word, none before the prompt."""
    tokenizer = _sentencepiece("legacy")
    tokenizer.backend_tokenizer.decoder = TOKENIZERS["llama"]().backend_tokenizer.decoder
    word = tokenizer.convert_tokens_to_ids("▁the")
    prompts = [tokenizer("a b").input_ids, tokenizer("the", add_special_tokens=False).input_ids]
    body = {"model": "m", "echo": True, "temperature": 0, "max_tokens": 2, "logit_bias": {word: 100}, "stream": stream}
    with served(pipeline_of(tokenizer)) as running:
        for prompt in ("a b", " the", "<s> b"):
            asked = {**body, "prompt": prompt, "parse_special": False}
            assert texts(running.post(asked, "completions")) == [f"{prompt} the the"]
        found = texts(running.post({**body, "prompt": prompts, "n": 2}, "completions"))
    wholes = [tokenizer.decode([*prompt, word, word]) for prompt in prompts]
    assert wholes == ["<s> a b the the", "the the the"]
    assert found == [whole for whole in wholes for _ in range(2)]


def test_tokens_of_one_text():
    """SentencePiece: letters are tokens twice. Offsets after a stop string are at the end."""
    io = Processor(_TOKENIZERS["first"]())
    named = io.tokenizer.convert_tokens_to_ids
    asked = CompletionRequest(model="m", prompt="x", logprobs=2)
    form = TextFormat("m", io, asked, [""])
    ids = [named("▁the"), named("▁a"), named("</s>")]
    top = [(named("a"), -1.0), (named("<0x61>"), -2.0)]
    logprobs = [TokenLogprob(*one, top, 4 * at) for at, one in enumerate(zip(ids, (-1.0, -2.5, -inf), strict=True))]
    form.add(0, mmspec.Piece(" the a", ids, "stop", logprobs=logprobs))
    logprobs = form.whole()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" the", " a", "</s>"]
    assert logprobs["text_offset"] == [0, 4, 6]
    assert logprobs["token_logprobs"] == [-1.0, -2.5, -9999.0]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, f"token_id:{named('<0x61>')}": -2.0}


def test_chunks_of_reasoning_and_figures_of_two_choices(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(formats, "clock", lambda: now[0])
    asked = ChatCompletionRequest(messages=USER, n=2, stream=True, stream_options={"include_usage": True})
    form = ChatFormat("m", None, asked, ["", ""], "flash")
    first, second = (Stats(num_prompt_tokens=11, num_cached_tokens=cached, num_generated_tokens=3) for cached in (5, 6))
    first.record_step(4, 2, 1, 2)
    second.record_step(6, 3, 2, 3)
    for stage, seconds in (("queue_s", 2.0), ("first_token_s", 3.0), ("first_token_s", 11.0)):
        now[0] += seconds
        form.reached(stage)
    pieces = [(0, Piece("", [1], reasoning="Hm", num_reasoning_tokens=2)), (0, Piece("So", [2], reasoning="!"))]
    pieces += [(1, Piece("", [3])), (0, Piece("A", [4], "stop", first)), (1, Piece("B", [5, 6], "length", second))]
    *deltas, last = (chunk for index, piece in pieces for chunk in form.chunks(index, piece))
    thought = [{"reasoning": text, "reasoning_content": text} for text in ("Hm", "!")]
    texts = [thought[0], {**thought[1], "content": "So"}, {"content": ""}, {"content": "A"}, {"content": "B"}]
    assert [chunk["choices"] for chunk in deltas] == [
        ({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason},)
        for index, delta, reason in zip((0, 0, 1, 0, 1), texts, (None, None, None, "stop", "length"), strict=True)
    ]
    usage = {"prompt_tokens": 11, "completion_tokens": 11, "total_tokens": 22}
    details = {"prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": {"reasoning_tokens": 2}}
    figures = {"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 10, "num_spec_tokens": 3}
    figures |= {"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.3, "acceptance_histogram": [0, 1, 1]}
    figures |= {"lossless": True, "num_rejected_outputs": 0, "drafter_error": "", "drafter": "flash"}
    assert (last["choices"], last["usage"]) == ((), usage | details)
    assert last["metrics"] == {"speculative_decoding": figures}
    timings = {"cache_n": 5, "prompt_n": 6, "prompt_ms": 3000, "prompt_per_token_ms": 500, "prompt_per_second": 2}
    timings |= {"predicted_n": 11, "predicted_ms": 11000, "predicted_per_token_ms": 1000, "predicted_per_second": 1}
    assert last["timings"] == timings
    logged = form.logged()
    assert (logged.pop("queue_s"), logged.pop("first_token_s")) == ("2.000", "5.000")
    assert logged.pop("id").startswith("chatcmpl-")
    assert logged == {"finish": "stop,length", "prompt_tokens": 11, "generated_tokens": 6, "acceptance_length": 2.5}
    messages, said = [one["message"] for one in form.whole()["choices"]], {"role": "assistant", "refusal": None}
    assert messages[0] == {**said, "content": "SoA", "reasoning": "Hm!", "reasoning_content": "Hm!"}
    assert messages[1] == {**said, "content": "B"}
