"""Tests of the server through its API: endpoints, errors, limits, cancelling, removal of uploads."""

import itertools
import re
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

import mmspec
from mmspec.demos import service
from mmspec.demos.catalog import make_catalog
from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.models import ModelCache
from mmspec.demos.racing import Race, StreamedAnswer
from mmspec.vision.embedded import samples
from tests.demos.serving import (
    SHORT,
    TIMEOUT,
    demo_server,
    needs_smollm2,
    save_ten_minute_video,
    stored_path,
    upload,
)

IMAGE, VIDEO = str(samples() / "scene.png"), str(samples() / "clip.mp4")


@pytest.fixture(scope="module")
def models():
    return ModelCache(device="cpu")


@pytest.fixture(scope="module")
def address(models):
    with demo_server(models=models) as url:
        yield url


@pytest.fixture
def guarded():
    """A server with a login that removes uploads after one second."""
    with demo_server(auth=("ann", "secret"), cleanup=(1, 1)) as url:
        yield url


@contextmanager
def logged_in(guarded):
    """An HTTP client that has logged in."""
    with httpx.Client(timeout=TIMEOUT) as ann:
        assert ann.post(f"{guarded}login", data={"username": "ann", "password": "secret"}).status_code == 200
        yield ann


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False, httpx_kwargs={"timeout": TIMEOUT})


def test_api_lists_named_endpoints_only(client):
    found = client.view_api(print_info=False, return_format="dict")
    assert sorted(found["named_endpoints"]) == ["/caption_image", "/caption_video", "/compare", "/generate"]
    assert found["unnamed_endpoints"] == {}
    (returned,) = found["named_endpoints"]["/caption_image"]["returns"]
    assert returned["type"]["properties"]["tokens_per_second"] == {"type": "number"}
    assert returned["type"]["properties"]["text"] == {"type": "string"}


def test_server_says_which_one_it_is(address, models):
    """What the page asks for every second; it shows a restart."""
    ids = {httpx.get(f"{address}gradio_api/alive").text for _ in range(2)}
    with demo_server(models=models, auth=("ann", "secret")) as other:
        ids.add(httpx.get(f"{other}gradio_api/alive").text)  # without a login, too
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)


def test_first_tab_is_raced_before_a_visitor_comes(models, monkeypatch):
    raced = []
    monkeypatch.setattr(
        service, "race", lambda *given: iter([raced.append(given[2]["prompt"]) or Race([], equal=True)])
    )
    monkeypatch.setattr(Race, "pays", True)
    with demo_server(models=models, opened=True):
        deadline = time.monotonic() + TIMEOUT
        while not raced and time.monotonic() < deadline:
            time.sleep(0.01)
    assert raced == ["Describe the image."]


def test_caption_equals_plain_decoding(client):
    result = client.predict(handle_file(IMAGE), api_name="/caption_image", **SHORT)
    alone = mmspec.load("tiny-llava", drafter=None).generate("Describe the image.", images=IMAGE, **SHORT)
    assert result["text"] == alone.text.strip()
    assert result["tokens"] == 12
    assert (result["finish_reason"], result["model"], result["drafter"]) == ("length", "tiny-llava", "flash")
    assert result["tokens_per_second"] > 0 < result["seconds"]


def test_video_and_text_endpoints(client):
    result = client.predict(handle_file(VIDEO), frames=2, api_name="/caption_video", **SHORT)
    assert result["tokens"] == 12
    result = client.predict("Work out: 3 + 4", api_name="/generate", **SHORT)
    assert result["model"] == "tiny-hybrid"
    assert result["text"].startswith("3 + 4")


def test_compare_endpoint(client):
    result = client.predict("Describe the image.", handle_file(IMAGE), api_name="/compare", **SHORT)
    assert result["equal"] is True
    assert (result["first_difference"], result["runs"]) == (-1, 3)
    plain, fast = result["lanes"]
    assert plain["text"] == fast["text"] != ""
    assert (result["baseline"], result["fastest"]) == (plain["drafter"], fast["drafter"]) == ("none", "flash")
    assert plain["acceptance"] == 1.0 <= fast["acceptance"]
    assert result["decode_speedup"] == pytest.approx(fast["tokens_per_second"] / plain["tokens_per_second"])
    assert result["end_to_end_speedup"] == pytest.approx(plain["seconds"] / fast["seconds"])


def test_compare_takes_a_video_and_methods(client):
    methods = ["none", "msd", "msd@chain", "ngram"]
    given = {"video": handle_file(VIDEO), "frames": 2, "methods": methods, **SHORT}
    result = client.predict(prompt="Describe the video.", api_name="/compare", **given)
    assert [lane["drafter"] for lane in result["lanes"]] == methods
    assert len({lane["text"] for lane in result["lanes"]}) == 1
    assert result["equal"]


@pytest.mark.slow
@needs_smollm2
def test_race_of_a_text_only_model():
    """It is the default for texts, and images have one that takes them."""
    with demo_server(catalog=make_catalog(["smollm2"])) as url:
        client = Client(url, verbose=False, httpx_kwargs={"timeout": TIMEOUT})
        methods = ["none", "recycle+ngram", "recycle@chain"]
        result = client.predict("Count from one to ten.", methods=methods, max_new_tokens=24, api_name="/compare")
        assert [(lane["model"], lane["drafter"]) for lane in result["lanes"]] == [("smollm2", name) for name in methods]
        assert result["equal"]
        assert result["lanes"][0]["text"] == result["lanes"][2]["text"]
        assert "two" in result["lanes"][0]["text"].lower() or "2" in result["lanes"][0]["text"]
        seen = client.predict(handle_file(IMAGE), api_name="/caption_image", **SHORT)
        assert (seen["model"], seen["tokens"]) == ("tiny-llava", 12)
        with pytest.raises(AppError, match="reads text only"):
            client.predict(handle_file(IMAGE), model="smollm2", api_name="/caption_image")


def test_every_parameter_is_documented(client):
    found = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
    for endpoint in found.values():
        assert endpoint["description"]
        for parameter in endpoint["parameters"]:
            assert len(parameter["python_type"]["description"]) > 10


def test_named_subset_of_parameters_over_http(address):
    given = {"prompt": "Work out: 3 + 4", "max_new_tokens": 12}
    joined = httpx.post(f"{address}gradio_api/call/v2/generate", json=given, timeout=TIMEOUT).json()
    events = httpx.get(f"{address}gradio_api/call/generate/{joined['event_id']}", timeout=TIMEOUT).text
    assert "event: complete" in events
    assert '"text": "3 + 4' in events


def test_full_queue_is_a_sentence(client, models, monkeypatch):
    monkeypatch.setattr("mmspec.demos.models.RUNNING", 0)
    monkeypatch.setattr("mmspec.demos.models.WAITING", 0)
    for name in ("/generate", "/compare"):
        with pytest.raises(AppError, match="the server is busy with 0 requests: try again in a minute"):
            client.predict("Work out: 3 + 4", api_name=name)


def test_answers_are_streamed(client):
    job = client.submit(handle_file(IMAGE), drafter="none", api_name="/caption_image", **SHORT)
    texts = [result["text"] for result in job]
    assert len(texts) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("/generate", {"prompt": " "}, "the prompt must not be empty"),
        ("/generate", {"prompt": "x", "model": "nobody/nothing"}, "cannot load model 'nobody/nothing'"),
        ("/generate", {"prompt": "x", "drafter": "nonsense"}, "unknown drafter"),
        ("/generate", {"prompt": "x", "max_new_tokens": 513}, "max_new_tokens must lie in 1..512: got 513"),
        ("/generate", {"prompt": "x", "max_new_tokens": "many"}, "max_new_tokens must be of type int: got 'many'"),
        ("/generate", {"prompt": "x" * 4001}, "at most 4000 characters"),
        ("/generate", {"prompt": "x", "temperature": -1}, "temperature must be 0 or"),
        ("/generate", {"prompt": None}, "prompt must be of type str"),
        ("/compare", {"prompt": "x", "methods": ["none"]}, "expected 2 to 4 different ones, got Plain"),
        ("/compare", {"prompt": "x", "methods": "none"}, "methods must be a list of names"),
        (
            "/compare",
            {"prompt": "x", "methods": ["none", "ngram+recycle@chain"]},
            "chains need a drafter that can draft them",
        ),
        ("/caption_image", {"image": None}, "no image was uploaded"),
        ("/caption_image", {"image": {"path": "/etc/hostname"}}, "the image must be uploaded"),
        ("/caption_image", {"image": {"path": "https://example.org/a.png"}}, "the image must be uploaded"),
        ("/caption_image", {"image": {"path": "a\0.png"}}, "the image must be uploaded"),
        ("/caption_image", {"image": handle_file(VIDEO)}, "clip.mp4: expected an image"),
        ("/caption_video", {"video": handle_file(IMAGE)}, "scene.png: expected a video"),
        ("/caption_image", {"image": handle_file(IMAGE), "model": "tiny-hybrid"}, "reads text only"),
    ],
)
def test_invalid_arguments_raise_one_line(client, name, arguments, message):
    with pytest.raises(AppError) as error:
        client.predict(api_name=name, **arguments)
    shown = str(error.value)
    assert message in shown
    assert "Traceback" not in shown
    assert "/tmp" not in shown


def test_path_outside_the_upload_folder_raises(client, address):
    upward = f"{stored_path(address)}/../../../{Path(IMAGE).relative_to('/')}"
    for path in (upward, upward.replace("/../../../", "/../../" + "../" * 20)):
        with pytest.raises(AppError, match="the image must be uploaded"):
            client.predict({"path": path}, api_name="/caption_image", **SHORT)


def test_seed_of_a_request(client):
    arguments = {"temperature": 1.5, "max_new_tokens": 24}
    alone = mmspec.load("tiny-hybrid", drafter=None)
    texts = [client.predict("Tell a story.", seed=seed, api_name="/generate", **arguments)["text"] for seed in (3, 4)]
    assert texts == [alone.generate("Tell a story.", seed=seed, **arguments).text.strip() for seed in (3, 4)]
    assert texts[0] != texts[1]


def test_too_long_video_raises(client, tmp_path):
    video = handle_file(save_ten_minute_video(tmp_path / "long.mp4"))
    with pytest.raises(AppError, match=r"long\.mp4: expected a video of at most 300 s, received one of \d{3}\.\d s"):
        client.predict(video, api_name="/caption_video")


def test_internal_error_shows_no_details(client, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr(service, "stream_answer", broken)
    with pytest.raises(AppError) as error:
        client.predict("x", api_name="/generate")
    assert "internal error (RuntimeError)" in str(error.value)
    assert "secret" not in str(error.value)


def test_too_large_upload_is_rejected(address):
    assert upload(address, bytes(MAX_UPLOAD_MIB * 2**20 + 1)).status_code == 413
    one = ("files", ("big.png", bytes(MAX_UPLOAD_MIB * 2**20)))
    several = httpx.post(f"{address}gradio_api/upload", files=[one, one], timeout=TIMEOUT)
    assert several.status_code == 413
    assert several.text.startswith("a request must have at most")


def test_request_without_content_length_is_rejected(address):
    boundary = {"Content-Type": "multipart/form-data; boundary=b"}
    sent = httpx.post(f"{address}gradio_api/upload", content=iter([b"--b"]), headers=boundary, timeout=TIMEOUT)
    assert (sent.status_code, sent.text) == (411, "a request must state its length: expected a Content-Length header")


def test_upload_without_login_is_rejected(guarded):
    assert upload(guarded).status_code == 401


def test_uploads_are_removed_and_samples_are_kept(guarded):
    with logged_in(guarded) as ann:
        (path,) = ann.post(f"{guarded}gradio_api/upload", files={"files": ("a.png", b"gone")}, timeout=TIMEOUT).json()
        end = time.monotonic() + TIMEOUT
        while Path(path).exists():
            assert time.monotonic() < end, "the upload was not removed"
            time.sleep(0.05)
        addresses = re.findall(r'"(http[^"]*/file=[^"]*\.(?:png|mp4))"', ann.get(f"{guarded}config").text)
        assert len(addresses) >= 6
        for url in addresses:
            assert ann.get(url).status_code == 200


def test_files_outside_the_upload_folder_are_not_served(address):
    path = stored_path(address)
    api = f"{address}gradio_api/"
    assert httpx.get(f"{api}file={path}", timeout=TIMEOUT).content == b"an upload"
    for outside in (
        IMAGE,
        f"{path}/../../..{IMAGE}",
        "pyproject.toml",
        ".gradio/cached_examples/a",
        "//etc/hostname",
    ):
        for route in ("file=", "file/"):
            assert httpx.get(f"{api}{route}{quote(outside)}", timeout=TIMEOUT).status_code == 403
    for url in (f"file={address}", "file=https://example.org/a.png"):
        assert httpx.get(api + url, timeout=TIMEOUT).text == "this file is not served"


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", "proxy=https://example.org"),
        ("GET", "deep_link?session_hash=a"),
        ("GET", "stream/a/0/1/playlist.m3u8"),
        ("POST", "process_recording"),
        ("POST", "component_server"),
        ("POST", "api/generate"),
        ("POST", "stream/a"),
        ("POST", "vibe-edit"),
    ],
)
def test_unneeded_routes_are_closed(address, method, route):
    answer = httpx.request(method, f"{address}gradio_api/{route}", timeout=TIMEOUT)
    assert (answer.status_code, answer.text) == (404, "not found")


@pytest.mark.parametrize("field", ["image", "prompt"])
def test_urls_are_not_downloaded(client, field):
    fetched = {"path": "https://example.org/a.png", "meta": {"_type": "gradio.FileData"}}
    given = {"image": {"path": "a"}, field: fetched}
    with pytest.raises(AppError, match="URLs are not downloaded: expected an uploaded file"):
        client.predict(**given, api_name="/caption_image")


def test_cancelling_closes_the_generator(client, monkeypatch):
    seen = []
    end = time.monotonic() + TIMEOUT

    def endless(*_):
        try:
            while time.monotonic() < end:
                seen.append("step")
                yield StreamedAnswer("tiny", "none")
                time.sleep(0.02)
        except GeneratorExit:
            seen.append("cancelled")
            raise

    monkeypatch.setattr(service, "stream_answer", endless)
    job = client.submit("Tell a story.", api_name="/generate")
    while len(seen) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    job.cancel()
    while seen[-1] != "cancelled" and time.monotonic() < end:
        time.sleep(0.02)
    assert seen[-1] == "cancelled"
    monkeypatch.undo()
    assert client.predict("Work out: 3 + 4", api_name="/generate", **SHORT)["text"].startswith("3 + 4")


def test_stopped_stream_frees_its_slot(client, models, monkeypatch):
    engine = models.get("tiny-hybrid").pipeline("auto").engine
    step = engine.core.step
    monkeypatch.setattr(engine.core, "step", lambda: (time.sleep(0.02), step()))  # not to end before it is stopped
    job = client.submit("Tell a story.", temperature=5.0, max_new_tokens=512, api_name="/generate")
    next(iter(job))
    (sequence,) = engine.core.running
    job.cancel()
    end = time.monotonic() + TIMEOUT
    while engine.core.running and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.core.running == []
    assert sequence.cancelled
    assert sequence.finish_reason is None


def test_concurrent_clients_get_the_answers_that_they_would_get_alone(address, client):
    """Two that decode together, one of another model, and a race."""
    clients = [client, *(Client(address, verbose=False, httpx_kwargs={"timeout": TIMEOUT}) for _ in range(3))]
    requests = [
        ("/caption_image", {"image": handle_file(IMAGE)}),
        ("/caption_image", {"image": handle_file(IMAGE), "prompt": "What is it?"}),
        ("/generate", {"prompt": "Work out: 3 + 4"}),
        ("/compare", {"prompt": "Describe the image.", "image": handle_file(IMAGE)}),
    ]
    jobs = [one.submit(api_name=name, **given) for one, (name, given) in zip(clients, requests, strict=True)]
    *answers, race = [job.result(timeout=TIMEOUT) for job in jobs]
    vision, text = (mmspec.load(name, drafter=None) for name in ("tiny-llava", "tiny-hybrid"))
    alone = [
        vision.generate("Describe the image.", images=IMAGE),
        vision.generate("What is it?", images=IMAGE),
        text.generate("Work out: 3 + 4"),
    ]
    assert [answer["text"] for answer in answers] == [one.text.strip() for one in alone]
    assert race["equal"]
    assert race["lanes"][0]["text"] == answers[0]["text"]


def test_login(guarded):
    assert httpx.get(f"{guarded}config", timeout=TIMEOUT).status_code == 401
    wrong = {"username": "ann", "password": "wrong"}
    assert httpx.post(f"{guarded}login", data=wrong, timeout=TIMEOUT).status_code == 400
    with logged_in(guarded) as ann:
        assert ann.get(f"{guarded}config").status_code == 200
