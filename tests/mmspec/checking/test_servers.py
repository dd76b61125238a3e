"""Two servers compared: this project's own with itself, and with servers that are wrong on purpose."""

import json
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import replace
from math import exp, log
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("peft")

import mmspec
from mmspec.checking import cases, sides
from mmspec.checking.cases import CASES, run_case
from mmspec.checking.sides import Answer, LocalSide, Question, ServerSide, SkippedError
from mmspec.checking.trial import Trial
from mmspec.cli import main
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.params import SamplingParams
from tests.mmspec.targets.test_lora import saved
from tests.testkit.served import served

Change = Callable[[dict[str, Any]], dict[str, Any]]
FEW = ("prose", "sessions", "markers", "logprobs")
LOCAL = ("rehearsed", "now-and-then", "tree-sizes", "adapters")


@pytest.fixture(scope="module")
def servers():
    pipe = mmspec.load("tiny-llava", device="cpu", dtype="float32", prefix_cache=1 << 26)
    with served(pipe) as drafted, served(Pipeline(pipe.target, pipe.processor, None, pipe.name)) as plain:
        yield drafted, plain


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch):
    monkeypatch.setattr(cases, "_SERVER_DRAWS", 80)


def result(url, against, name):
    tested, other = ServerSide("tested", url, None, None), ServerSide("other", against, None, None, scored=True)
    with closing(Trial(tested, [other], 1e-4)) as trial:
        found = run_case(trial, name)
    assert [side._client.is_closed for side in (tested, other)] == [True, True]
    return found


@contextmanager
def wrong(url, request=dict, reply=dict):
    """The address of a server that passes requests on, and changes them or their replies."""

    def answer(asked):
        body = request(json.loads(asked.content)) if asked.content else None
        found = httpx.request(asked.method, f"{url}{asked.url.path}", json=body, timeout=60)
        if body is not None and found.is_success and found.headers["content-type"] == "application/json":
            return httpx.Response(found.status_code, json=reply(found.json()))
        return httpx.Response(found.status_code, content=found.content)

    def client(base, key=None):
        transport = httpx.MockTransport(answer) if base == "http://wrong" else None
        return httpx.Client(base_url=base, transport=transport, timeout=60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "open_client", client)
        yield "http://wrong"


def without(name):
    return lambda body: {key: value for key, value in body.items() if key != name}


def without_images(body):
    first, *later = body["messages"]
    texts = [one if isinstance(one["content"], str) else {**one, "content": one["content"][-1:]} for one in later]
    return {**body, "messages": [first, *texts]}


def cooler(body):
    return {**body, "temperature": 0.9 * body["temperature"]}


def with_fields(**fields):
    return lambda body: {**body, **fields}


def logprobs_of(reply):
    return [choice["logprobs"]["content"] for choice in reply["choices"] if choice.get("logprobs")]


def with_scaled_logprobs(reply):
    """Log probabilities at temperature 0.9, as reported by servers that apply the temperature first."""
    for one in (one for content in logprobs_of(reply) for one in content):
        total = log(sum(exp(other["logprob"] / 0.9) for other in one["top_logprobs"]))
        for other in (one, *one["top_logprobs"]):
            other["logprob"] = other["logprob"] / 0.9 - total
    return reply


def with_first_choice(reply):
    choices = [{**reply["choices"][0], "index": index} for index in range(len(reply["choices"]))]
    return {**reply, "choices": choices}


def with_later_logprobs(reply):
    """Each token has the log probability of the next token."""
    for content in logprobs_of(reply):
        numbers = [one["logprob"] for one in content]
        for one, number in zip(content, [*numbers[1:], 0.0], strict=True):
            one["logprob"] = number
    return reply


def without_alternatives(reply):
    for content in logprobs_of(reply):
        content[2]["top_logprobs"] = []
    return reply


def with_other_word(reply):
    for choice in reply["choices"]:
        words = choice["message"]["content"].split(" ")
        if len(words) > 9:
            words[8] = "wrong"
        choice["message"]["content"] = " ".join(words)
    return reply


WRONG = [
    ("prose", {"reply": with_other_word}),
    ("stop-string", {"request": without("stop")}),
    ("min-tokens", {"request": without("min_tokens")}),
    ("image-turns", {"request": without_images}),
    ("choices", {"reply": with_first_choice}),
    ("logprobs", {"reply": with_later_logprobs}),
    ("logprobs", {"reply": without_alternatives}),
    ("sampling", {"request": with_fields(temperature=0)}),
    ("choices", {"request": without("n")}),
    ("temperature", {"request": cooler}),
]


@pytest.mark.parametrize(("name", "changes"), WRONG, ids=[name for name, _ in WRONG])
def test_a_wrong_server_is_found(name, changes, servers):
    with wrong(servers[0].url, **changes) as url:
        found = result(url, servers[1].url, name)
    assert found["outcome"] == "different", found


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in CASES if name not in LOCAL]
)
def test_a_server_with_drafts_equals_one_without(name, servers):
    for _ in range(3):  # on a busy machine, the policy may draft nothing
        found = result(servers[0].url, f"{servers[1].url}/v1/", name)
        assert found["outcome"] == "equal", found
        assert found["tokens"] > 15
        if found["accepted"]:
            break
    assert found["accepted"] > 0


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"request": cooler, "reply": with_scaled_logprobs}, "different", ""),
        ({"request": lambda body: {"min_p": 0.5, "repetition_penalty": 1.5} | body}, "equal", ""),  # of a GGUF file
        ({"request": with_fields(repetition_penalty=1.5)}, "skipped", "other does not sample from the log"),
        ({"request": with_fields(top_logprobs=5)}, "skipped", "needs 20 log probabilities"),
    ],
)
def test_log_probabilities_that_are_not_the_samplers(changes, outcome, reason, servers, monkeypatch):
    """Log probabilities after the temperature are found; an equal penalty on both sides is not."""
    monkeypatch.setattr(cases, "POWER", 0.1)  # of fewer tokens
    with wrong(servers[0].url, **changes) as url:
        found = result(url, url if outcome == "skipped" else servers[1].url, "temperature")
    assert (found["outcome"], found["reason"][: len(reason)]) == (outcome, reason), found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft asks for
def test_a_server_that_ignores_an_adapter(tmp_path):
    """It is found by the one question of eight whose answer the adapter changes; without any, nothing is proven."""
    folder = saved(tmp_path, "tiny-llava", 2, lora_alpha=1, target_modules=["v_proj"])
    pipe = mmspec.load("tiny-llava", adapters={"one": folder}, device="cpu", dtype="float32")
    with served(pipe) as own, served(Pipeline(pipe.target, pipe.processor, None, pipe.name)) as plain:
        assert result(own.url, plain.url, "adapters")["outcome"] == "equal"
        with wrong(own.url, with_fields(model=pipe.name)) as url:
            assert result(url, plain.url, "adapters")["outcome"] == "different"
            found = result(own.url, url, "adapters")
            assert found["outcome"] == "different", found
            found = result(url, url, "adapters")
    assert found["outcome"] == "skipped"
    assert found["reason"] == "cannot tell whether one is used: it changes none of 8 answers"


@pytest.mark.parametrize("name", LOCAL)
def test_cases_that_need_the_model_here_are_skipped(name, servers):
    found = result(servers[0].url, servers[1].url, name)
    assert found["outcome"] == "skipped"
    assert found["reason"]


def test_what_a_server_refuses_is_skipped_and_its_error_fails_a_case(servers):
    for changes, expected in (
        ({"request": with_fields(temperature=-1)}, ("skipped", "tested refuses: temperature must be >= 0: got -1")),
        ({"reply": with_fields(choices=None)}, ("failed", "TypeError: 'NoneType' object is not iterable")),
    ):
        with wrong(servers[0].url, **changes) as url:
            found = result(url, servers[1].url, "prose")
        assert (found["outcome"], found["reason"]) == expected


def answer(*steps, text=""):
    found = [(token.encode(), p, tuple((other.encode(), q) for other, q in top.items())) for token, p, top in steps]
    return Answer(text or "".join(token for token, _, _ in steps), "stop", steps=tuple(found))


def test_margins_are_those_of_the_other_texts_token(servers):
    side = ServerSide("other", servers[1].url, None, None)
    own = answer(
        ("A ", -0.1, {"A ": -0.1, "The ": -2.5}),
        ("cat", -0.7, {"cat": -0.7, "car": -0.9, "c": -3.0}),
        (" sat", -0.2, {" sat": -0.2, " ran": -2.0}),
    )
    question = Question.user("What?")
    for text, position, margin in (
        ("A car ran", 1, 0.2),
        ("A cow", 1, 2.3),
        ("A dog", 1, None),
        ("The cat sat", 0, 2.4),
        ("A cat ran", 2, 1.8),
        ("A cat", 2, 1.8),
        ("A cat sat down", 3, None),
    ):
        found = side.difference(question, Answer(text, "stop"), own)
        assert found is not None
        assert found.position == position
        assert found.margin == (None if margin is None else pytest.approx(margin)), text
    side.close()
    cut = side.difference(question, Answer("A cat", "length"), own)
    assert cut is not None
    assert cut.margin is None
    assert side.difference(question, Answer("A cat sat", "stop"), own) is None
    assert side.difference(question, Answer("A cat sat", "length"), own) is not None


def test_the_command_between_servers(servers, capfd):
    options = ["--url", servers[0].url, "--against", servers[1].url, "--only", "list,stop-string", "--json"]
    assert main(["check", *options]) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found) == {"model", "drafter", "versions", "cases"}
    assert (found["model"], found["drafter"]) == ("tiny-llava", None)
    assert [found["versions"][name].split()[0] for name in ("url", "against")] == [one.url for one in servers]
    assert [(one["name"], one["outcome"]) for one in found["cases"]] == [("list", "equal"), ("stop-string", "equal")]
    with wrong(servers[0].url, without("stop")) as url:
        assert main(["check", "--url", url, *options[2:]]) == 1
    assert [one["outcome"] for one in json.loads(capfd.readouterr().out)["cases"]] == ["equal", "different"]
    for given in (["nobody"], ["--model", "nobody"]):
        assert main(["check", *given, *options]) == 2
        assert "expected a server of nobody, received one of ['tiny-llava']" in capfd.readouterr().err
    with served(servers[1].pipe, api_key="sesame") as one:  # both sides get the key
        assert main(["check", "--url", one.url, "--against", one.url, "--api-key", "sesame", "--only", "list"]) == 0


SAMPLED = {"temperature": 0.5, "top_k": 4, "top_p": 0.25, "min_p": 0.1, "repetition_penalty": 1.5, "stop": "x"}
FULL = Question.user("Hi", max_tokens=3, seed=6, n=2, min_tokens=1, top_logprobs=7, **SAMPLED)
NO_MODEL = SimpleNamespace(context_limit=9, adapters=(), processor=SimpleNamespace(chat_template_text=lambda: ""))


def test_all_fields_of_questions():
    full = replace(FULL, tools='[{"a": 1}]', adapter="b")
    assert full.params(2) == SamplingParams(**SAMPLED, max_new_tokens=3, min_new_tokens=1, seed=8)
    side = LocalSide(NO_MODEL, size=5).limited(8)
    common = {"num_draft_tokens": 5, "context_limit": 8}
    assert side.keywords(full) == {**common, "logprobs": 7, "adapter": "b", "tools": [{"a": 1}]}
    assert side.keywords(Question.user("")) == {**common, "logprobs": None, "adapter": None}
    second = FULL.then("Ho", Question.user("z" * 64, max_tokens=2))
    assert (second.max_tokens, second.text, second.n) == (2, "z" * 60 + " ...", 1)
    turns = [(one["role"], one["content"]) for one in json.loads(second.messages)]
    assert turns == [("user", "Hi"), ("assistant", "Ho"), ("user", "z" * 64)]
    assert side.request(second) == {"prompt": f"Hi\nHo\n{'z' * 64}"}
    with pytest.raises(SkippedError, match="images need a chat template"):
        side.request(Question.user("Hi", "data:"))


COUNTED = "vllm:spec_decode_num_accepted_tokens_total"
PARTS = f'{COUNTED}{{m="a"}} 3.0\n{COUNTED}{{m="b"}} 4.0\nvllm:spec_decode_num_draft_tokens_total 9.0'


@pytest.mark.parametrize(
    ("model", "replies", "limit", "accepted"),
    [
        ("other", {"/metrics": PARTS, "/props": {}}, 1, 7),
        ("one", {"/metrics": "", "/props": {"default_generation_settings": {"n_ctx": 512}}}, 512, None),
        ("one", {}, None, None),
    ],
)
def test_replies_and_requests_of_a_server(model, replies, limit, accepted, monkeypatch):
    call = {"function": {"name": "f", "arguments": "{}"}}
    first = {"token": "A", "logprob": -1.0, "top_logprobs": [{"token": "?", "bytes": [195], "logprob": -2.0}]}
    choices = [
        {"index": 1, "finish_reason": "stop", "message": {"reasoning": "R", "content": "B", "tool_calls": [call]}},
        {"index": 0, "finish_reason": "length", "message": {"content": "A"}, "logprobs": {"content": [first]}},
    ]
    usage = {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {}, "prompt_tokens": 12}
    reply = {"choices": choices, "usage": usage, "timings": {"draft_n_accepted": 7}}
    listed = [{"id": "other", "max_model_len": 1}, {"id": "one"}, {"id": "two"}]
    known = {"/v1/models": {"data": listed}, "/v1/chat/completions": reply, **replies}
    bodies = []

    def handle(request):
        if request.content:
            bodies.append(json.loads(request.content))
        if request.url.path not in known:
            raise httpx.ConnectError("closed")
        found = known[request.url.path]
        text = found if isinstance(found, str) else json.dumps(found)
        return httpx.Response(200, text=text, headers={"server": "llama.cpp"})

    transport = httpx.MockTransport(handle)
    monkeypatch.setattr(sides, "open_client", lambda base, key: httpx.Client(base_url=base, transport=transport))
    side = ServerSide("it", "http://it/v1/", model, None, scored=True)
    others = [name for name in ("other", "one", "two") if name != model]
    assert (side.adapters, side.limit, side.total_accepted()) == (others, limit, accepted)
    assert side.version == "http://it (llama.cpp)"
    steps = ((b"A", -1.0, ((b"\xc3", -2.0),)),)
    assert side.ask(FULL) == [[Answer("A", "length", None, steps, 3, 4), Answer("RBf{}", "stop", None, (), 3, 4)]]
    assert side.count(replace(FULL, tools='[{"a": 1}]', adapter="two")) == 12
    greedy, drawn, told = (Question.user("Hi", **more) for more in ({}, {"temperature": 0.5}, {"top_logprobs": 2}))
    for one in (greedy, drawn, told):
        side.ask(one)
    ServerSide("it", "http://it/v1/", model, None).ask(greedy)
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    full = {**messages, **SAMPLED, "repeat_penalty": 1.5, "max_tokens": 3, "seed": 6, "n": 2, "min_tokens": 1}
    full["model"] = model
    plain = {**messages, "model": model, "max_tokens": 48, "temperature": 0, "n": 1}
    assert bodies == [
        {**full, "logprobs": True, "top_logprobs": 7},
        {**full, "max_tokens": 1, "tools": [{"a": 1}], "model": "two"},
        {**plain, "logprobs": True, "top_logprobs": 5},
        {**plain, "temperature": 0.5},
        {**plain, "logprobs": True, "top_logprobs": 2},
        plain,
    ]


def test_what_is_no_server():
    for url in ("http://127.0.0.1:1", "nonsense", "ftp://127.0.0.1"):
        with pytest.raises(UserError, match="expected a server with OpenAI's API"):
            ServerSide("tested", url, None, None)
