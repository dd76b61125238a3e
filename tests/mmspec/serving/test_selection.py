"""What requests select: plain decoding, drafters, LoRA adapters; drafters that learn; limits; metrics by drafter."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep

import httpx
import pytest

import mmspec
from mmspec.adaptation import AdaptOptions
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import PerSequence
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.serving.settings import Limits, ServerSettings, _label
from tests.mmspec.serving.test_app import figures
from tests.model_folders import save_text_model
from tests.testkit.served import SCENE, data_uri, events, eventually, question, served

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = Limits(max_running=2, max_tokens=16)
NAMES = ["flash", "recycle@chain", "none"]
LOADING = {"model": "tiny-llava", "drafter": "flash", "device": "cpu", "dtype": "float32"}
LOADING |= {"trust_remote_code": False, "generation_config": "auto"}
PROMPTS = ["Describe the image.", "one two one two one two one", "What is in a picture?"]


def settings(model, adapt=None):
    loading = {"model": str(model), "drafter": "recycle", "device": "cpu", "dtype": "float32"}
    return ServerSettings({**loading, "generation_config": "auto"}, LIMITS, {}, adapt=adapt)


def test_answers_are_equal_and_the_table_is_kept(tmp_path):
    model = save_text_model(tmp_path / "model")
    (plain,) = settings(model).pipelines().values()
    assert isinstance(plain.drafter, PerSequence)
    options = AdaptOptions(tmp_path / "learned")
    (pipe,) = settings(model, options).pipelines().values()
    (table,) = pipe.drafter.members
    assert isinstance(table, Recycle)
    with served(pipe) as server:
        for prompt in ("one, two", "one, two, one", "one, two"):
            request = {"model": pipe.name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            response = server.post(request, "completions")
            expected = plain.generate(prompt, max_new_tokens=12, temperature=0.0, chat_template=False)
            assert response.json()["choices"][0]["text"] == expected.text
    assert table.entries > 0
    (kept,) = (tmp_path / "learned" / "recycle").iterdir()
    assert json.loads((kept / "config.json").read_text())["mmspec_drafter"] == "recycle"
    (again,) = settings(model, options).pipelines().values()
    assert again.drafter.entries == table.entries
    for one in (plain, pipe, again):
        one.engine.drain()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft asks for
def test_adapters_are_models(tmp_path):
    pytest.importorskip("peft")
    from tests.mmspec.targets.test_lora import saved

    folders = {name: saved(tmp_path / name, "tiny-llava", seed) for seed, name in enumerate(("one", "two"))}
    pipe = mmspec.load("tiny-llava", adapters=folders, prefix_cache=1 << 26)
    asked = [(model, prompt) for prompt in PROMPTS for model in ("tiny-llava", "one", "two")]

    def expected(model, prompt):
        name = None if model == "tiny-llava" else model
        return pipe.generate(prompt, max_new_tokens=16, temperature=0.0, adapter=name).text

    texts = [expected(*one) for one in asked]
    with served(pipe, Limits(max_running=4, max_waiting=16)) as server:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        tags = httpx.get(f"{server.url}/api/tags").json()["models"]
        assert [one["id"] for one in listed] == [one["name"] for one in tags] == ["tiny-llava", "one", "two"]
        with ThreadPoolExecutor(9) as threads:
            answers = [
                found.json() for found in threads.map(lambda one: server.post(question(one[1], model=one[0])), asked)
            ]
        unknown = server.post(question(model="three"))
        completion = {"model": "one", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
        completed = server.post(completion, "completions").json()["choices"][0]["text"]
    options = {"max_new_tokens": 16, "temperature": 0.0, "chat_template": False}
    assert completed == pipe.generate(PROMPTS[0], adapter="one", **options).text
    assert [answer["model"] for answer in answers] == [model for model, _ in asked]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == texts
    assert len(set(texts)) > len(PROMPTS)
    assert unknown.status_code == 404
    assert "expected 'tiny-llava' or 'one' or 'two', got 'three'" in unknown.text


@pytest.fixture(scope="module")
def pipes():
    loading = {**LOADING, "prefix_cache": 64 << 20, "generation_config": "mmspec"}
    return ServerSettings(loading, Limits(max_draft_tokens=20), {}, others=NAMES[1:]).pipelines()


@pytest.fixture(scope="module")
def running(pipes):
    with served(pipes["flash"], Limits(max_draft_tokens=20), drafters=pipes) as server:
        yield server


def asked(number, **fields):
    image = [data_uri(SCENE)] if number == 0 else []
    return question(PROMPTS[number], *image, max_tokens=24, **fields)


def answer(response):
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"], body["metrics"]["speculative_decoding"]


def test_answers_are_those_of_plain_decoding(running, pipes):
    assert list(pipes) == NAMES
    assert {(pipe.max_num_seqs, pipe.generation_config) for pipe in pipes.values()} == {(8, "mmspec")}
    assert len({pipe.engine for pipe in pipes.values()}) == 1
    before, choices = figures(running), [True, False, *NAMES, None]
    plain = [
        pipes["none"].generate(PROMPTS[n], **({"images": str(SCENE)} if n == 0 else {}), max_new_tokens=24)
        for n in range(3)
    ]
    jobs = [(number, choice) for choice in choices for number in range(3)]
    start = Barrier(6)

    def ask(job):
        start.wait()
        return answer(running.post(asked(job[0], speculative=job[1])))

    alone = [answer(running.post(asked(number, speculative=choice))) for number, choice in jobs]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(ask, jobs))
    for (number, choice), *found in zip(jobs, alone, together, strict=True):
        name = {True: "flash", False: "none", None: "flash"}.get(choice, choice)
        for text, stats in found:
            assert text == plain[number].text, (choice, number)
            assert stats["drafter"] == name
            assert stats["num_draft_tokens"] == 0 or name != "none"
    after = figures(running)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    for name in NAMES:
        own = [one for _, one in (*alone, *together) if one["drafter"] == name]
        for counter, field in (
            ("drafts", "num_spec_steps"),
            ("draft_tokens", "num_draft_tokens"),
            ("accepted_tokens", "num_accepted_draft_tokens"),
        ):
            added = grown[f"vllm:spec_decode_num_{counter}_total/{name}"]
            assert added == sum(one[field] for one in own)
            assert (added > 0) == (name != "none" or counter == "drafts"), (name, counter)
        by_position = f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{name}/"
        assert added == sum(value for key, value in grown.items() if key.startswith(by_position))


def test_plain_requests_decode_with_others(running, pipes, monkeypatch):
    """In one batch, where requests of another drafter wait for the first to end."""
    core, batches = pipes["flash"].engine.core, []
    decode, step = core._decode, core.step

    def watched():
        assert core.key is not None
        batches.append((core.key.speculation, [row.drafts for row in core.running]))
        decode()

    monkeypatch.setattr(core, "_decode", watched)
    monkeypatch.setattr(core, "step", lambda: (sleep(0.02), step()))  # until all three are queued
    bodies = [
        asked(1, speculative=one) | {"max_tokens": 80, "ignore_eos": True} for one in (True, False, "recycle@chain")
    ]
    with ThreadPoolExecutor(3) as threads:
        responses = [threads.submit(running.post, body) for body in bodies[:2]]
        assert eventually(lambda: any(len(rows) == 2 for _, rows in batches))
        responses.append(threads.submit(running.post, bodies[2]))
        for response in responses:
            answer(response.result())
    assert any(sorted(rows) == [False, True] for _, rows in batches)
    assert {len(rows) for speculation, rows in batches if speculation is pipes["recycle@chain"]._speculation} == {1}


def test_draft_tokens_of_a_request(running, pipes):
    for number in (0, 5, 20):
        text, stats = answer(running.post(asked(1, num_draft_tokens=number)))
        expected = pipes["flash"].generate(PROMPTS[1], max_new_tokens=24, num_draft_tokens=number)
        assert (text, stats["num_draft_tokens"]) == (expected.text, expected.stats.num_draft_tokens)
        assert stats["drafter"] == ("flash" if number else "none")
    streamed = events(running.post(asked(1, speculative="recycle@chain", num_draft_tokens=3, stream=True)))
    assert streamed[-1]["metrics"]["speculative_decoding"]["drafter"] == "recycle@chain"
    body = {"model": "tiny-llava", "input": PROMPTS[1], "speculative": False, "temperature": 0, "max_output_tokens": 24}
    response = running.post(body, "responses").json()
    assert response["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    body = {"model": "tiny-llava", "prompt": "one two", "speculative": "recycle@chain", "max_tokens": 4}
    assert running.post(body, "completions").json()["metrics"]["speculative_decoding"]["drafter"] == "recycle@chain"


def test_an_operators_choice(pipes):
    with served(pipes["flash"], Limits(fixed_speculation=True), drafters=pipes) as server:
        for name, value in (("speculative", False), ("speculative", "none"), ("num_draft_tokens", 4)):
            error = server.post(asked(1, **{name: value})).json()["error"]
            assert error["message"] == f"{name} is chosen by this server: expected none, got {value!r}"
        assert answer(server.post(asked(1)))[1]["drafter"] == "flash"
    with served(pipes["flash"], num_draft_tokens=3) as server:
        for fields, number in (({}, 3), ({"num_draft_tokens": 7}, 7), ({"speculative": False}, 0)):
            expected = pipes["flash"].generate(PROMPTS[1], max_new_tokens=24, num_draft_tokens=number)
            assert answer(server.post(asked(1, **fields)))[1]["num_draft_tokens"] == expected.stats.num_draft_tokens


def test_names_of_drafters(pipes):
    given = ("auto", "ngram@chain", "out/law", "/out/law/")
    assert [_label(one, pipes["flash"]) for one in given] == ["flash", "ngram@chain", "law", "law"]
    with pytest.raises(UserError, match=r"^unknown drafter"):
        ServerSettings({**LOADING, "model": "tiny-hybrid"}, Limits(), {}, others=["ngrams"]).pipelines()
    settings = ServerSettings({**LOADING, "model": "tiny-hybrid", "drafter": "ngram"}, Limits(), {}, others=["ngram"])
    with pytest.raises(UserError, match=r"^drafters must have different names: got ngram, ngram$"):
        settings.pipelines()


def test_the_limit_of_the_context_is_that_of_every_drafter():
    """Not of the caller's own requests."""
    pipe = mmspec.load("tiny-llava", "flash", device="cpu", dtype="float32")
    pipes = {"flash": pipe, "none": Pipeline(pipe.target, pipe.processor, None, pipe.name)}
    with served(pipe, Limits(max_model_len=60), drafters=pipes) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 60
        assert httpx.post(f"{server.url}/tokenize", json={"prompt": "one"}).json()["max_model_len"] == 60
        for name in pipes:
            body = question("Describe the image.", data_uri(SCENE), max_tokens=200, speculative=name, ignore_eos=True)
            assert server.post(body).json()["usage"]["total_tokens"] == 60, name
            refused = server.post(question("one two " * 60, speculative=name))
            assert refused.status_code == 400
            assert "shorter than the model's context of 60 tokens" in refused.json()["error"]["message"], name
    assert pipe.context_limit == 2048
