"""The server and its clients: endpoints of the page and OpenAI's API in one process, on one engine; public servers."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from urllib.parse import quote
from urllib.request import proxy_bypass

import httpx
import psutil
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

import mmspec
from mmspec.demos import service
from mmspec.demos.catalog import Catalog
from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.models import RUNNING, WAITING, ModelCache
from mmspec.demos.racing import Race
from mmspec.demos.server import make_api
from tests.demos.serving import SHORT, TIMEOUT, demo_server, stored_path, upload
from tests.process import ROOT
from tests.testkit.serve_process import KEY, gone
from tests.testkit.served import CLIP, LONG, QUESTION, SCENE, data_uri, eventually, question

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGE, VIDEO = str(SCENE), str(CLIP)


@pytest.fixture(scope="module")
def models():
    return ModelCache(device="cpu")


@pytest.fixture(scope="module")
def address(models):
    with demo_server(models=models, api=make_api(models, "tiny-llava")) as url:
        yield url


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False, httpx_kwargs={"timeout": TIMEOUT})


@pytest.fixture
def engine(models):
    """The engine of the page and of the API."""
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


def long_stream(address, **headers):
    body = question(stream=True, **LONG)
    return httpx.stream("POST", f"{address}v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT)


def turns_of(address):
    """The API's choices that run and wait, as its metrics have them."""
    text = httpx.get(f"{address}metrics", timeout=TIMEOUT).text
    names = (f'vllm:num_requests_{one}{{model_name="tiny-llava"}}' for one in ("running", "waiting"))
    return tuple(int(float(re.search(f"^{re.escape(name)} (.*)$", text, re.MULTILINE)[1])) for name in names)


@pytest.mark.parametrize("given", ["", "example.org"])
def test_the_demo_starts_behind_a_proxy(monkeypatch, given):
    """gradio asks its own address at the start; further addresses that the user excepts stay so."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for one in (name, name.upper()):
            monkeypatch.setenv(one, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", given)
    with demo_server() as url:
        assert "gradio" in httpx.get(url, trust_env=False, timeout=TIMEOUT).text
        direct = [proxy_bypass(host) for host in ("127.0.0.1", "example.org", "example.com")]
        assert direct == [True, bool(given), False]
    assert os.environ["no_proxy"] == given


def test_endpoints_are_named_and_described(client):
    found = client.view_api(print_info=False, return_format="dict")
    assert sorted(found["named_endpoints"]) == ["/caption_image", "/caption_video", "/compare", "/generate"]
    assert found["unnamed_endpoints"] == {}
    (returned,) = found["named_endpoints"]["/caption_image"]["returns"]
    assert returned["type"]["properties"]["tokens_per_second"] == {"type": "number"}
    for endpoint in found["named_endpoints"].values():
        assert endpoint["description"]
        for parameter in endpoint["parameters"]:
            assert len(parameter["python_type"]["description"]) > 10


def test_answers_are_streamed(client, address):
    job = client.submit(handle_file(IMAGE), drafter="none", api_name="/caption_image", **SHORT)
    texts = [result["text"] for result in job]
    assert len(texts) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    given = {"temperature": 1.0, "seed": 5, **SHORT}
    result = client.predict(handle_file(IMAGE), "What is it?", api_name="/caption_image", **given)
    alone = mmspec.load("tiny-llava", drafter=None).generate("What is it?", images=IMAGE, **given)
    assert (result["text"], result["tokens"]) == (alone.text.strip(), len(alone.token_ids))
    assert (result["finish_reason"], result["model"], result["drafter"]) == (alone.finish_reason, "tiny-llava", "flash")
    assert result["tokens_per_second"] > 0 < result["seconds"]
    assert client.predict(handle_file(VIDEO), frames=2, api_name="/caption_video", **SHORT)["tokens"] == 12
    # A named subset of the parameters over HTTP.
    given = {"prompt": "Work out: 3 + 4", "max_new_tokens": 12}
    joined = httpx.post(f"{address}gradio_api/call/v2/generate", json=given, timeout=TIMEOUT).json()
    events = httpx.get(f"{address}gradio_api/call/generate/{joined['event_id']}", timeout=TIMEOUT).text
    assert "event: complete" in events
    assert '"text": "3 + 4' in events
    assert '"model": "tiny-hybrid"' in events


def test_races(client):
    result = client.predict("Describe the image.", handle_file(IMAGE), api_name="/compare", **SHORT)
    assert (result["equal"], result["first_difference"], result["runs"]) == (True, -1, 3)
    plain, fast = result["lanes"]
    assert plain["text"] == fast["text"] != ""
    assert (result["baseline"], result["fastest"]) == (plain["drafter"], fast["drafter"]) == ("none", "flash")
    assert plain["acceptance"] == 1.0 <= fast["acceptance"]
    assert plain["draft_acceptance_rate"] == 0 < fast["draft_acceptance_rate"] <= 1
    assert result["decode_speedup"] == pytest.approx(fast["tokens_per_second"] / plain["tokens_per_second"])
    assert result["end_to_end_speedup"] == pytest.approx(plain["seconds"] / fast["seconds"])
    methods = ["none", "msd", "msd@chain", "ngram"]
    given = {"video": handle_file(VIDEO), "frames": 2, "methods": methods, **SHORT}
    result = client.predict(prompt="Describe the video.", api_name="/compare", **given)
    assert [lane["drafter"] for lane in result["lanes"]] == methods
    assert result["equal"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("/generate", {"prompt": " "}, "the prompt must not be empty"),
        ("/generate", {"prompt": "x", "model": "nobody/nothing"}, "cannot load model 'nobody/nothing'"),
        ("/generate", {"prompt": "x", "drafter": "nonsense"}, "unknown drafter"),
        ("/generate", {"prompt": "x", "temperature": "hot"}, "temperature must be a number: got 'hot'"),
        ("/generate", {"prompt": None}, "prompt must be text: got None"),
        ("/compare", {"prompt": "x", "methods": ["none"]}, "expected 2 to 4 different ones, got Plain"),
        ("/compare", {"prompt": "x", "methods": "none"}, "methods must be a list: got 'none'"),
        ("/compare", {"prompt": "x", "methods": ["none", 1]}, "methods[1] must be text: got 1"),
        ("/compare", {"prompt": "x", "methods": ["ngram", "none@chain"]}, "plain decoding drafts no chains"),
        ("/compare", {"prompt": "x", "image": handle_file(IMAGE), "video": handle_file(VIDEO)}, "one upload"),
        ("/caption_image", {"image": None}, "no image was uploaded"),
        ("/caption_image", {"image": {"path": "/etc/hostname"}}, "the image must be uploaded"),
        ("/caption_image", {"image": {"path": "https://example.org/a.png"}}, "the image must be uploaded"),
        ("/caption_image", {"image": {"path": "a\0.png"}}, "the image must be uploaded"),
        ("/caption_image", {"image": handle_file(VIDEO)}, "clip.mp4: expected an image"),
        ("/caption_image", {"image": handle_file(IMAGE), "model": "tiny-hybrid"}, "reads text only"),
        *(
            ("/caption_image", {"image": {"path": "a"}, field: fetched}, "URLs are not downloaded: expected an upload")
            for fetched in [{"path": "https://example.org/a.png", "meta": {"_type": "gradio.FileData"}}]
            for field in ("image", "prompt")
        ),
    ],
)
def test_invalid_arguments_raise_one_line(client, name, arguments, message):
    with pytest.raises(AppError) as error:
        client.predict(api_name=name, **arguments)
    shown = str(error.value)
    assert message in shown
    assert "Traceback" not in shown
    assert "/tmp" not in shown


def test_internal_error_shows_no_details(client, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr(service, "stream_answer", broken)
    with pytest.raises(AppError, match=r"internal error \(RuntimeError\); details are in the server's log") as error:
        client.predict("x", api_name="/generate")
    assert "secret" not in str(error.value)


def test_files_and_routes_of_the_page(client, address):
    path, api = stored_path(address), f"{address}gradio_api/"
    assert httpx.get(f"{api}file={path}", timeout=TIMEOUT).content == b"an upload"
    upward = f"{path}/../../..{IMAGE}"
    for outside in (IMAGE, upward, "pyproject.toml", ".gradio/cached_examples/a", "//etc/hostname"):
        assert httpx.get(f"{api}file={quote(outside)}", timeout=TIMEOUT).status_code == 403
    with pytest.raises(AppError, match="the image must be uploaded"):
        client.predict({"path": upward}, api_name="/caption_image", **SHORT)
    answer = httpx.post(f"{api}component_server", timeout=TIMEOUT)
    assert (answer.status_code, answer.text) == (404, "not found")
    assert upload(address, bytes(MAX_UPLOAD_MIB * 2**20 + 1)).status_code == 413


@pytest.mark.usefixtures("slow")
def test_cancelled_requests_free_their_slots(client, address, engine):
    given = {"temperature": 5.0, "seed": 11, "max_new_tokens": 512}
    job = client.submit(handle_file(IMAGE), api_name="/caption_image", **given)
    next(iter(job))
    (sequence,) = engine.core.running
    job.cancel()
    assert eventually(lambda: engine.core.running == [])
    assert (sequence.done, sequence.finish_reason, sequence.error) == (True, None, None)
    with long_stream(address, **{"Accept-Encoding": "br, gzip"}) as stream:  # a client of the API that goes away
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert eventually(lambda: len(engine.core.running) == 1)
        (sequence,) = engine.core.running
    assert eventually(lambda: engine.core.running == [] and turns_of(address) == (0, 0))
    assert (sequence.done, sequence.finish_reason, sequence.error) == (True, None, None)


def test_paths_and_limits_of_both(models, address, client):
    assert httpx.get(address).headers["content-type"].startswith("text/html")
    assert httpx.get(f"{address}v1/models").json()["data"][0]["id"] == "tiny-llava"
    assert httpx.get(f"{address}health").status_code == 200
    assert "error" in httpx.get(f"{address}v1/nothing").json()
    assert "detail" in httpx.get(f"{address}v1x").json()  # the page's
    for headers in ({"Host": "example.org"}, {"Origin": "http://example.org"}):  # pages of other names and origins
        assert httpx.get(f"{address}v1/models", headers=headers).status_code == 403
    assert "at most 8 images" in post(address, question("x", *[data_uri(SCENE)] * 9)).json()["error"]["message"]
    assert post(address, question(n=9)).status_code == 400
    places = models.turns.join(RUNNING + WAITING)
    refused = post(address, question())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for name in ("/generate", "/compare"):
        with pytest.raises(AppError, match="the server is busy with 32 requests: try again in a minute"):
            client.predict("Work out: 3 + 4", api_name=name)
    models.turns.leave(places)


RACED = []


@pytest.fixture(scope="module")
def public():
    """A server with 1 MiB for uploads, which removes uploads not used for 1000 s."""
    models = ModelCache(device="cpu")
    options = {
        "catalog": Catalog.of(["tiny-hybrid", "tiny-llava"], ["ngram"], open=False),
        "api": make_api(models, "tiny-hybrid", host=None, key="secret"),
        "auth": ("ann", "pass"),
        "upload_space": 1,
        "cleanup": (0.05, 1000),
        "opened": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "race", lambda *given: RACED.append(given[2]) or iter([Race([], equal=True)]))
        patch.setattr(Race, "pays", True)
        with demo_server(models=models, **options) as url:
            assert eventually(lambda: RACED)
            patch.undo()
            yield url


def test_a_public_server(public):
    """Race of the first tab before a visitor comes, login of the page, key of the API, space and age of uploads."""
    assert [request["prompt"][:12] for request in RACED] == ["Max has 24 a"]
    assert [httpx.get(f"{public}config", headers=headers).status_code for headers in ({}, KEY)] == [401, 401]
    assert upload(public).status_code == 401
    for path in ("v1/models", "metrics"):
        assert [httpx.get(f"{public}{path}", headers=headers).status_code for headers in ({}, KEY)] == [401, 200]
    assert httpx.get(f"{public}health").status_code == 200
    assert httpx.get(f"{public}v1/models", headers=KEY | {"Host": "example.org"}).status_code == 200
    assert httpx.get(f"{public}v1/models", headers=KEY | {"Origin": "http://example.org"}).status_code == 403
    alive = {httpx.get(f"{public}gradio_api/alive").text for _ in range(2)}  # the page asks for it every second
    assert [re.fullmatch("[0-9a-f]{16}", one) is not None for one in alive] == [True]
    with httpx.Client(timeout=TIMEOUT) as ann:

        def send(size):
            return ann.post(f"{public}gradio_api/upload", files={"files": ("a.png", bytes(size))})

        logins = [{"username": "ann", "password": password} for password in ("wrong", "pass")]
        assert [ann.post(f"{public}login", data=login).status_code for login in logins] == [400, 200]
        assert [ann.get(f"{public}{path}").status_code for path in ("config", "v1/models")] == [200, 401]
        (path,) = send(600_000).json()
        rejected = send(500_000)
        assert rejected.status_code == 507
        assert rejected.json() == {"detail": "the server's space for uploads is full: try again in a few minutes"}
        assert Path(path).exists()
        os.utime(path, (0, 0))
        assert eventually(lambda: not Path(path).exists())
        assert send(500_000).status_code == 200
        addresses = re.findall(r'"(http[^"]*/file=[^"]*\.(?:png|mp4))"', ann.get(f"{public}config").text)
        assert len(addresses) >= 6  # samples are kept
        assert {ann.get(url).status_code for url in addresses} == {200}


def test_names_outside_the_catalog_raise(public):
    client = Client(public, verbose=False, auth=("ann", "pass"), httpx_kwargs={"timeout": TIMEOUT})
    offered = "must be one that this server offers: expected"
    for name, given, message in (
        ("/generate", {"model": "smollm2"}, f"model {offered} tiny-hybrid, tiny-llava, got 'smollm2'"),
        ("/compare", {"methods": ["none", "recycle"]}, f"drafter {offered} auto, ngram, none, got 'recycle'"),
    ):
        with pytest.raises(AppError, match=re.escape(message)):
            client.predict("Work out: 3 + 4", api_name=name, **given, **SHORT)


@pytest.mark.long
def test_sigterm_while_requests_of_both_run(tmp_path):
    """A demo in a process of its own leaves no uploads, other files, workers, nor tracebacks."""
    command = [sys.executable, "-c", "import sys; from mmspec.cli import main; sys.exit(main())"]
    command += ["demo", "--api", "--model", "tiny-llava", "--port", "0", "--device", "cpu"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "MMSPEC_API_KEY": "secret"}
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=PIPE, stderr=errors, text=True) as server,
    ):
        try:
            line = server.stdout.readline()
            address = line.split()[2]
            assert line == f"mmspec demo: {address} and {address}v1 (Ctrl-C to stop)\n"
            assert Path(stored_path(address)).is_relative_to(tmp_path)
            body = question(QUESTION, data_uri(SCENE), max_tokens=2)
            assert post(address, body, **KEY).status_code == 200
            workers = psutil.Process(server.pid).children(recursive=True)
            assert workers  # that decode images
            story = {"prompt": "Tell a story.", "model": "tiny-llava", "max_new_tokens": 512, "temperature": 5.0}
            job = Client(address, verbose=False).submit(**story, api_name="/generate")
            with long_stream(address, **KEY) as stream:
                lines = stream.iter_lines()
                assert json.loads(next(lines).removeprefix("data: "))["choices"]
                next(iter(job))
                server.send_signal(signal.SIGTERM)
                *_, failed, last = filter(None, lines)
            error = json.loads(failed.removeprefix("data: "))["error"]
            assert error["message"].startswith("the server is stopping")
            assert last == "data: [DONE]"
            assert eventually(lambda: gone(workers))
            assert server.wait(TIMEOUT) == 128 + signal.SIGTERM
        finally:
            server.kill()
        assert "Traceback" not in (tmp_path / "errors").read_text()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(("mmspec", "gradio"))] == []
