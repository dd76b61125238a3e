"""The server as programs see it: named endpoints, mistakes, limits, cancelling, uploads that go away."""

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
from demos import service
from demos.questions import LARGEST_UPLOAD
from demos.runs import Run
from tests.demos.serving import PATIENCE, SHORT, demo_server, stored, ten_minutes, upload
from vision.embedded import samples

PICTURE, FILM = str(samples() / "scene.png"), str(samples() / "clip.mp4")


@pytest.fixture(scope="module")
def address():
    with demo_server() as url:
        yield url


@pytest.fixture
def guarded():
    """One that asks who you are, and keeps uploads for a second."""
    with demo_server(auth=("ann", "secret"), removal=(1, 1)) as url:
        yield url


@contextmanager
def visitor(guarded):
    """One who has logged in."""
    with httpx.Client(timeout=PATIENCE) as ann:
        assert ann.post(f"{guarded}login", data={"username": "ann", "password": "secret"}).status_code == 200
        yield ann


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False, httpx_kwargs={"timeout": PATIENCE})


def test_only_the_named_endpoints_can_be_called(client):
    found = client.view_api(print_info=False, return_format="dict")
    assert sorted(found["named_endpoints"]) == ["/caption_image", "/caption_video", "/compare", "/generate"]
    assert found["unnamed_endpoints"] == {}
    (returned,) = found["named_endpoints"]["/caption_image"]["returns"]
    assert returned["type"]["properties"]["tokens_per_second"] == {"type": "number"}
    assert returned["type"]["properties"]["text"] == {"type": "string"}


def test_a_caption_is_the_models_own(client):
    result = client.predict(handle_file(PICTURE), api_name="/caption_image", **SHORT)
    alone = mmspec.load("tiny-llava", drafter=None).generate("Describe the image.", images=PICTURE, **SHORT)
    assert result["text"] == alone.text.strip()
    assert result["tokens"] == 12
    assert (result["finish_reason"], result["model"], result["drafter"]) == ("length", "tiny-llava", "flash")
    assert result["tokens_per_second"] > 0 < result["seconds"]


def test_a_video_and_a_text(client):
    result = client.predict(handle_file(FILM), frames=2, api_name="/caption_video", **SHORT)
    assert result["tokens"] == 12
    result = client.predict("Work out: 3 + 4", api_name="/generate", **SHORT)
    assert result["model"] == "tiny-hybrid"
    assert result["text"].startswith("3 + 4")


def test_plain_and_speculative_compared(client):
    result = client.predict("Describe the image.", handle_file(PICTURE), api_name="/compare", **SHORT)
    assert result["equal"] is True
    assert result["first_difference"] == -1
    assert result["plain"]["text"] == result["speculative"]["text"] != ""
    assert result["plain"]["drafter"] == "none"
    assert result["plain"]["acceptance"] == 1.0 <= result["speculative"]["acceptance"]
    speeds = [result[way]["tokens_per_second"] for way in ("speculative", "plain")]
    assert result["decode_speedup"] == pytest.approx(speeds[0] / speeds[1])


def test_text_arrives_in_pieces(client):
    job = client.submit(handle_file(PICTURE), drafter="none", api_name="/caption_image", **SHORT)
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
        ("/caption_image", {"image": None}, "there is nothing to look at yet"),
        ("/caption_image", {"image": {"path": "/etc/hostname"}}, "the image must be uploaded"),
        ("/caption_image", {"image": {"path": "https://example.org/a.png"}}, "the image must be uploaded"),
        ("/caption_image", {"image": {"path": "a\0.png"}}, "the image must be uploaded"),
        ("/caption_image", {"image": handle_file(FILM)}, "clip.mp4: expected an image"),
        ("/caption_video", {"video": handle_file(PICTURE)}, "scene.png: expected a video"),
        ("/caption_image", {"image": handle_file(PICTURE), "model": "tiny-hybrid"}, "reads text only"),
    ],
)
def test_mistakes_are_told_in_one_line(client, name, arguments, message):
    with pytest.raises(AppError) as error:
        client.predict(api_name=name, **arguments)
    told = str(error.value)
    assert message in told
    assert "Traceback" not in told
    assert "/tmp" not in told


def test_a_path_that_leaves_the_uploads_is_refused(client, address):
    upward = f"{stored(address)}/../../../{Path(PICTURE).relative_to('/')}"
    for path in (upward, upward.replace("/../../../", "/../../" + "../" * 20)):
        with pytest.raises(AppError, match="the image must be uploaded"):
            client.predict({"path": path}, api_name="/caption_image", **SHORT)


def test_the_seed_is_the_requests_own(client):
    asked = {"temperature": 1.5, "max_new_tokens": 24}
    alone = mmspec.load("tiny-hybrid", drafter=None)
    texts = [client.predict("Tell a story.", seed=seed, api_name="/generate", **asked)["text"] for seed in (3, 4)]
    assert texts == [alone.generate("Tell a story.", seed=seed, **asked).text.strip() for seed in (3, 4)]
    assert texts[0] != texts[1]


def test_a_video_of_ten_minutes_is_refused(client, tmp_path):
    film = handle_file(ten_minutes(tmp_path / "long.mp4"))
    with pytest.raises(AppError, match=r"long\.mp4: expected a video of at most 300 s, received one of \d{3}\.\d s"):
        client.predict(film, api_name="/caption_video")


def test_a_failure_of_ours_shows_no_details(client, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr(service, "follow", broken)
    with pytest.raises(AppError) as error:
        client.predict("x", api_name="/generate")
    assert "something went wrong here (RuntimeError)" in str(error.value)
    assert "secret" not in str(error.value)


def test_too_large_an_upload_is_refused(address):
    assert upload(address, bytes(LARGEST_UPLOAD * 2**20 + 1)).status_code == 413
    one = ("files", ("big.png", bytes(LARGEST_UPLOAD * 2**20)))
    several = httpx.post(f"{address}gradio_api/upload", files=[one, one], timeout=PATIENCE)
    assert several.status_code == 413
    assert several.text.startswith("a request must have at most")


def test_a_request_without_its_length_is_refused(address):
    boundary = {"Content-Type": "multipart/form-data; boundary=b"}
    sent = httpx.post(f"{address}gradio_api/upload", content=iter([b"--b"]), headers=boundary, timeout=PATIENCE)
    assert (sent.status_code, sent.text) == (411, "a request must tell its length: expected a Content-Length header")


def test_who_has_not_logged_in_sends_nothing(guarded):
    refused = upload(guarded)
    assert refused.status_code == 401


def test_uploads_are_removed_and_samples_stay(guarded):
    with visitor(guarded) as ann:
        (path,) = ann.post(f"{guarded}gradio_api/upload", files={"files": ("a.png", b"gone")}, timeout=PATIENCE).json()
        end = time.monotonic() + PATIENCE
        while Path(path).exists():
            assert time.monotonic() < end, "an upload outlived its time"
            time.sleep(0.05)
        addresses = re.findall(r'"(http[^"]*/file=[^"]*\.(?:png|mp4))"', ann.get(f"{guarded}config").text)
        assert len(addresses) >= 6
        for url in addresses:
            assert ann.get(url).status_code == 200


def test_files_outside_of_the_uploads_are_not_served(address):
    path = stored(address)
    api = f"{address}gradio_api/"
    assert httpx.get(f"{api}file={path}", timeout=PATIENCE).content == b"an upload"
    for outside in (
        PICTURE,
        f"{path}/../../..{PICTURE}",
        "pyproject.toml",
        ".gradio/cached_examples/a",
        "//etc/hostname",
    ):
        for route in ("file=", "file/"):
            assert httpx.get(f"{api}{route}{quote(outside)}", timeout=PATIENCE).status_code == 403
    for url in (f"file={address}", "file=https://example.org/a.png"):
        assert httpx.get(api + url, timeout=PATIENCE).text == "this file is not served"


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
def test_routes_that_nobody_needs_are_closed(address, method, route):
    answer = httpx.request(method, f"{address}gradio_api/{route}", timeout=PATIENCE)
    assert (answer.status_code, answer.text) == (404, "not found")


@pytest.mark.parametrize("field", ["image", "prompt"])
def test_addresses_are_not_fetched(client, field):
    fetched = {"path": "https://example.org/a.png", "meta": {"_type": "gradio.FileData"}}
    given = {"image": {"path": "a"}, field: fetched}
    with pytest.raises(AppError, match="addresses are not fetched: expected an uploaded file"):
        client.predict(**given, api_name="/caption_image")


def test_cancelling_stops_the_work(client, monkeypatch):
    seen = []
    end = time.monotonic() + PATIENCE

    def endless(*_):
        try:
            while time.monotonic() < end:
                seen.append("step")
                yield Run("tiny", "none")
                time.sleep(0.02)
        except GeneratorExit:
            seen.append("cancelled")
            raise

    monkeypatch.setattr(service, "follow", endless)
    job = client.submit("Tell a story.", api_name="/generate")
    while len(seen) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    job.cancel()
    while seen[-1] != "cancelled" and time.monotonic() < end:
        time.sleep(0.02)
    assert seen[-1] == "cancelled"
    monkeypatch.undo()
    assert client.predict("Work out: 3 + 4", api_name="/generate", **SHORT)["text"].startswith("3 + 4")


def test_two_at_once_both_get_their_answer(address, client):
    other = Client(address, verbose=False, httpx_kwargs={"timeout": PATIENCE})
    jobs = [
        client.submit(handle_file(PICTURE), api_name="/caption_image", **SHORT),
        other.submit("Work out: 3 + 4", api_name="/generate", **SHORT),
    ]
    texts = [job.result(timeout=PATIENCE)["text"] for job in jobs]
    assert texts[0].startswith("There is")
    assert texts[1].startswith("3 + 4")


def test_visitors_can_be_asked_who_they_are(guarded):
    assert httpx.get(f"{guarded}config", timeout=PATIENCE).status_code == 401
    wrong = {"username": "ann", "password": "wrong"}
    assert httpx.post(f"{guarded}login", data=wrong, timeout=PATIENCE).status_code == 400
    with visitor(guarded) as ann:
        assert ann.get(f"{guarded}config").status_code == 200
