"""Tests of ``mmspec demo --api``: the page and OpenAI's API in one process, on one engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE
from threading import Barrier, Event

import httpx
import psutil
import pytest
from gradio_client import Client, handle_file

import mmspec
from mmspec.demos import models as models_module
from mmspec.demos.api import API, SharedSlots
from mmspec.demos.models import ModelCache, Turns
from mmspec.serving.errors import APIError
from tests.demos.serving import SHORT, TIMEOUT, demo_server, stored_path
from tests.process import ROOT
from tests.serve_process import gone
from tests.served import LONG, QUESTION, SCENE, data_uri, eventually, question

pytestmark = pytest.mark.usefixtures("one_thread")

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def models():
    return ModelCache(device="cpu")


@pytest.fixture(scope="module")
def address(models):
    with demo_server(models=models, api=API("tiny-llava").app(models)) as url:
        yield url


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False, httpx_kwargs={"timeout": TIMEOUT})


@pytest.fixture
def engine(models):
    """The engine of both."""
    found = models.get("tiny-llava").pipeline("auto").engine
    yield found
    assert eventually(lambda: not found.core.running)


@pytest.fixture
def slow(engine, monkeypatch):
    """Makes every step of the engine take longer."""
    step = engine.core.step
    monkeypatch.setattr(engine.core, "step", lambda: (time.sleep(0.02), step()))


def post(address, body, **headers):
    return httpx.post(f"{address}v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT)


def text_of(address, body):
    response = post(address, body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def long_stream(address, **headers):
    body = question(stream=True, **LONG)
    return httpx.stream("POST", f"{address}v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT)


def test_both_at_once_give_the_answers_that_each_gives_alone(address, client, models, engine, monkeypatch):
    """Greedy and sampled, with images, in one engine over weights that are loaded once."""
    plain = mmspec.load("tiny-llava", drafter=None, device="cpu")
    sampled = {"temperature": 1.0, "seed": 5}
    options = [(QUESTION, {}), ("What is it?", sampled), ("Which colour is it?", sampled)]
    expected = [plain.generate(prompt, images=str(SCENE), max_new_tokens=24, **given).text for prompt, given in options]
    pipe = models.get("tiny-llava").pipeline("auto")
    encode, step, batches = pipe.encode, engine.core.step, []
    encoded = Barrier(2 * len(options))  # so that all start together

    def encode_and_wait(*given, **options):
        prompt = encode(*given, **options)
        encoded.wait(60)
        return prompt

    def count_and_step():
        batches.append(len(engine.core.running))
        time.sleep(0.02)
        step()

    monkeypatch.setattr(pipe, "encode", encode_and_wait)
    monkeypatch.setattr(engine.core, "step", count_and_step)
    jobs = [
        client.submit(handle_file(str(SCENE)), prompt, api_name="/caption_image", max_new_tokens=24, **given)
        for prompt, given in options
    ]
    bodies = [question(prompt, data_uri(SCENE), max_tokens=24, **given) for prompt, given in options]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: text_of(address, body), bodies))
    assert answers == expected
    assert [job.result(timeout=TIMEOUT)["text"] for job in jobs] == [text.strip() for text in expected]
    assert max(batches) > len(options)  # requests of both decode together
    assert len(models) == 1


def test_a_race_runs_alone(address, client, engine, slow):
    """It waits for the API's requests, and later ones of the API for it."""
    seen, done = [], Event()

    def race():
        job = client.submit("Describe the image.", handle_file(str(SCENE)), api_name="/compare", **SHORT)
        for _ in job:
            seen.append(len(engine.core.running))
        done.set()
        return job.result()

    with ThreadPoolExecutor(2) as threads:
        with long_stream(address) as stream:
            lines = stream.iter_lines()  # whose end closes the stream
            next(lines)
            racing = threads.submit(race)
            assert eventually(lambda: turns_of(address) == (1, 0))
            time.sleep(0.5)
            assert not done.is_set()
            assert len(engine.core.running) == 1
            later = threads.submit(text_of, address, question(max_tokens=4))
            assert eventually(lambda: turns_of(address) == (1, 1))
        assert racing.result(TIMEOUT)["equal"]
        assert later.result(TIMEOUT)
    assert max(seen) <= 1


def turns_of(address):
    """The API's choices that run and wait, as its metrics have them."""
    lines = httpx.get(f"{address}metrics", timeout=TIMEOUT).text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:num_requests"))
    return tuple(
        int(float(found[f'vllm:num_requests_{one}{{model_name="tiny-llava"}}'])) for one in ("running", "waiting")
    )


def test_a_client_that_goes_away_frees_its_slot(address, engine, slow):
    with long_stream(address, **{"Accept-Encoding": "br, gzip"}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert eventually(lambda: len(engine.core.running) == 1)
        (sequence,) = engine.core.running
    assert eventually(lambda: engine.core.running == [] and turns_of(address) == (0, 0))
    assert sequence.cancelled


def test_paths(address):
    assert httpx.get(address).headers["content-type"].startswith("text/html")
    assert httpx.get(f"{address}v1/models").json()["data"][0]["id"] == "tiny-llava"
    assert httpx.get(f"{address}health").status_code == 200
    assert "error" in httpx.get(f"{address}v1/nothing").json()
    assert "detail" in httpx.get(f"{address}v1x").json()  # the page's


def test_limits_of_the_api_stay(address, monkeypatch):
    assert "at most 8 images" in post(address, question("x", *[data_uri(SCENE)] * 9)).json()["error"]["message"]
    broken = post(address, question("x", "data:image/png;base64,aGVsbG8="))
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    assert post(address, question(n=9)).status_code == 400
    monkeypatch.setattr(models_module, "RUNNING", 0)
    monkeypatch.setattr(models_module, "WAITING", 0)
    refused = post(address, question())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert httpx.get(address).status_code == 200


def test_access(models):
    """The page has its login, the API its key; a page of another name or origin reaches the API with neither."""
    with demo_server(models=models, api=API("tiny-llava", key="secret").app(models), auth=("ann", "pass")) as url:
        assert httpx.get(f"{url}config").status_code == 401
        for path in ("v1/models", "metrics"):
            assert httpx.get(f"{url}{path}").status_code == 401
            assert httpx.get(f"{url}{path}", headers=KEY).status_code == 200
        assert httpx.get(f"{url}health").status_code == 200
        assert httpx.get(f"{url}config", headers=KEY).status_code == 401
        with httpx.Client() as ann:
            assert ann.post(f"{url}login", data={"username": "ann", "password": "pass"}).status_code == 200
            assert ann.get(f"{url}config").status_code == 200
            assert ann.get(f"{url}v1/models").status_code == 401
        for headers in ({"Host": "example.org"}, {"Origin": "http://example.org"}):
            assert httpx.get(f"{url}v1/models", headers=KEY | headers).status_code == 403
    with demo_server(models=models, api=API("tiny-llava", host=None).app(models)) as url:
        assert httpx.get(f"{url}v1/models", headers={"Host": "example.org"}).status_code == 200


def test_shared_slots(monkeypatch):
    monkeypatch.setattr(models_module, "RUNNING", 3)
    monkeypatch.setattr(models_module, "WAITING", 3)

    async def scenario():
        turns, order = Turns(), []
        slots = SharedSlots(turns)

        async def ask(name, count):
            await slots.acquire(count)
            order.append(name)

        page = turns.join()
        tasks = []
        for name, count in (("a", 2), ("b", 2), ("c", 1)):
            tasks.append(asyncio.ensure_future(ask(name, count)))
            await asyncio.sleep(0)
        assert (order, slots.running, slots.waiting) == (["a"], 2, 3)
        with pytest.raises(APIError) as full:
            await slots.acquire(1)
        assert full.value.status == 429
        tasks[1].cancel()
        await asyncio.sleep(0.1)
        assert (order, slots.running, slots.waiting) == (["a"], 2, 1)
        turns.leave(page)
        await asyncio.sleep(0.1)
        assert (order, slots.running, slots.waiting) == (["a", "c"], 3, 0)
        race = turns.join(alone=True)
        slots.release(2)
        assert turns.ahead(race[0]) == 1
        later = asyncio.ensure_future(ask("later", 1))
        slots.release()
        assert turns.ahead(race[0]) is None
        await asyncio.sleep(0.1)
        assert (order, slots.running, slots.waiting) == (["a", "c"], 0, 1)
        turns.leave(race)
        await later
        slots.release()
        assert turns._turns == []

    asyncio.run(scenario())


@pytest.mark.long
def test_sigterm_while_both_run(tmp_path):
    command = [sys.executable, "-c", "import sys; from mmspec.cli import main; sys.exit(main())"]
    options = ["demo", "--api", "--model", "tiny-llava", "--port", "0", "--device", "cpu"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "MMSPEC_API_KEY": "secret"}
    with subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stdout=PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            address = line.split()[2]
            assert line == f"mmspec demo: {address} and {address}v1 (Ctrl-C to stop)\n"
            stored_path(address)
            body = question(QUESTION, data_uri(SCENE), max_tokens=2)
            assert post(address, body, **KEY).status_code == 200
            workers = psutil.Process(server.pid).children(recursive=True)
            assert workers  # that decode images
            page = Client(address, verbose=False)
            story = {"prompt": "Tell a story.", "model": "tiny-llava", "max_new_tokens": 512, "temperature": 5.0}
            job = page.submit(**story, api_name="/generate")
            with long_stream(address, **KEY) as stream:
                lines = stream.iter_lines()
                assert json.loads(next(lines).removeprefix("data: "))["choices"]
                next(iter(job))
                server.send_signal(signal.SIGTERM)
                *_, failed, last = filter(None, lines)
                error = json.loads(failed.removeprefix("data: "))["error"]
                assert error["message"].startswith("the server is stopping")
                assert last == "data: [DONE]"
                assert server.wait(TIMEOUT) == 128 + signal.SIGTERM
            assert eventually(lambda: gone(workers))
        finally:
            server.kill()
    assert list(tmp_path.glob("mmspec-demo-*")) == []
