"""What visitors send and may select: requests, conversations, catalog, uploads on disk, and accepted HTTP requests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import time

import av
import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from mmspec import plugins
from mmspec.demos import chat_request, storage
from mmspec.demos.catalog import Catalog, check_methods
from mmspec.demos.chat_request import MAX_UPLOAD_MIB, ChatRequest, ChatState, Token, Turn
from mmspec.demos.server import RequestFilter
from mmspec.demos.storage import UploadFolder, temporary_folder
from mmspec.drafters.registry import drafter_specs
from mmspec.errors import UserError
from mmspec.vision.images import load_image
from mmspec.vision.video import load_video
from tests.demos.serving import write_video
from tests.process import ROOT


@pytest.fixture
def files(tmp_path):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "image.png")
    write_video(tmp_path / "video.mp4", "mpeg4", (32, 32))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    return {name: str(tmp_path / name) for name in ("image.png", "video.mp4", "broken.png", "gone.png")}


def test_requests_of_the_pipeline(files):
    image = files["image.png"]
    request = ChatRequest("image", " What? ", [image] * 8).pipeline_request()
    assert (request["prompt"], [one.size for one in request["images"]]) == ("What?", [(20, 10)] * 8)
    video = ChatRequest("video", "What?", [files["video.mp4"]], frames=3).pipeline_request()["videos"]
    assert [len(one.frames) for one in video] == [3]
    keywords = {"temperature": 0.5, "seed": 3, "max_new_tokens": 7}
    assert ChatRequest("text", "What?", **keywords).pipeline_request() == {"prompt": "What?", **keywords}
    history = [("What?", "A box."), ("Red?", "Yes.")]
    messages = ChatRequest("image", "And?", [image, image], history).pipeline_request()["prompt"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    assert [message["content"] for message in messages[3:]] == [
        [{"type": "text", "text": one}] for one in ("Yes.", "And?")
    ]
    messages = ChatRequest("text", "And?", [], history[:1]).pipeline_request()["prompt"]
    assert [message["content"] for message in messages] == ["What?", "A box.", "And?"]


@pytest.mark.parametrize(
    ("kind", "uploads", "options", "message"),
    [
        ("image", ["image.png"], {"prompt": "  \n"}, "the prompt must not be empty: type a question"),
        ("text", [], {"history": [("a", "b")] * 12}, "a conversation must have at most 12 questions: start a new one"),
        ("image", ["image.png"] * 9, {}, "a question must have at most 8 images: got 9"),
        ("image", [], {}, "no image was uploaded: upload one or select an example"),
        ("image", ["gone.png"], {}, "gone.png was removed (uploads are kept for a limited time): upload it again"),
        ("image", ["broken.png"], {}, "broken.png: expected an image"),
        ("video", ["broken.png"], {}, "broken.png: expected a video"),
        ("video", ["video.mp4"] * 2, {}, "a question must have at most 1 videos: got 2"),
        ("video", ["video.mp4"], {}, "video.mp4: expected a video of at most 1.5 s, received one of 2.0 s"),
        ("text", [], {"prompt": "x" * 4001}, "prompt: String should have at most 4000 characters"),
        ("video", [], {"frames": 33}, "frames must be <= 32: got 33"),
        ("text", [], {"max_new_tokens": 0}, "max_new_tokens must be >= 1: got 0"),
        ("text", [], {"max_new_tokens": 513}, "max_new_tokens must be <= 512: got 513"),
        ("text", [], {"temperature": 5.1}, "temperature must be <= 5: got 5.1"),
        ("text", [], {"temperature": -1}, "temperature must be >= 0: got -1"),
        ("text", [], {"temperature": float("nan")}, "temperature must be"),
        ("text", [], {"seed": -1}, "seed must be >= 0: got -1"),
        ("sound", [], {}, "kind must be 'image', 'video' or 'text': got 'sound'"),
    ],
)
def test_refused_requests(files, monkeypatch, kind, uploads, options, message):
    """Errors are one line, name the visitor's file, and nothing of the server."""
    monkeypatch.setattr(chat_request, "MAX_VIDEO_SECONDS", 1.5)
    fields = {"kind": kind, "prompt": "What?", "uploads": [files[name] for name in uploads], **options}
    with pytest.raises(UserError) as error:
        ChatRequest(**fields).pipeline_request()
    assert str(error.value).startswith(message)
    assert str(Path(files["image.png"]).parent) not in str(error.value)


TOKENS = [Token("A", "first", 0), Token(" <b", "accepted", 1), Token("ox>", "accepted", 1), Token(".", "bonus", 1)]


def test_page_keeps_a_conversation():
    conversation = ChatState([Turn.of("What?", TOKENS, stopped=True)], seed=7, running="id", opened=True)
    sent = json.loads(json.dumps(asdict(conversation)))
    assert ChatState.parse(sent) == conversation
    assert [token.text for token in conversation.turns[0].tokens] == ["A", " <box>", "."]
    assert conversation.history == [("What?", "A <box>.")]
    (turn,) = sent["turns"]
    many = ChatState.parse({**sent, "turns": [{**turn, "prompt": f"{number}?"} for number in range(40)]}).turns
    assert [one.prompt for one in many] == [f"{number}?" for number in range(28, 40)]
    for changes in (
        {"tokens": turn["tokens"] * 300},
        {"tokens": [{"text": "A", "origin": '"><script>', "step": 0}]},
        {"tokens": [{"text": "A", "origin": "first", "step": "many"}]},
        {"stopped": "perhaps"},
    ):
        assert ChatState.parse({**sent, "turns": [{**turn, **changes}]}) == ChatState()
    for malformed in ({**sent, "seed": None}, None, [1]):
        assert ChatState.parse(malformed) == ChatState()


def test_catalogs():
    closed = Catalog.of(["llava", "/models/hybrid"], ["/drafters/msd"], open=False)
    assert closed.models == ("llava", "/models/hybrid")
    assert closed.drafters == ("auto", "/drafters/msd", "none")
    for model, drafter in (("llava", "auto"), ("/models/hybrid", "/drafters/msd"), ("llava", "none")):
        closed.check(model, drafter)
    message = "^model must be one that this server offers: expected llava, /models/hybrid, got '/etc'$"
    with pytest.raises(UserError, match=message):
        closed.check("/etc", "auto")
    usual, free = Catalog.of(open=False), Catalog.of(["llava"], ["/drafters/msd"])
    assert usual.models == tuple(plugins.installed())
    assert {"auto", "ngram", "msd", "none"} <= set(usual.drafters)
    for name in ("small:/etc", "/drafters/../msd", "../msd", "/"):
        for catalog in (closed, usual):
            with pytest.raises(UserError, match=r"drafter must be one that this server offers: .* got "):
                catalog.check(catalog.default, name)
    assert free.models == ("llava", *plugins.installed())
    assert free.drafters[:2] == ("auto", "/drafters/msd")
    free.check("/any/folder", "small:/another")
    assert "tiny-hybrid" in free.models_for("text")
    assert "tiny-hybrid" not in free.models_for("image")
    methods = Catalog.of().methods("tiny-llava")
    assert methods[:2] == ["none", "flash"]
    assert {"msd", "recycle", "ngram", "flash@chain", "msd@chain"} <= set(methods)
    alone = [spec.name for spec in drafter_specs() if spec.alone]
    assert Catalog.of().methods("somebody/model") == ["none", "auto", *alone]
    listed = Catalog.of(["tiny-llava"], ["ngram", "/d/eagle"], open=False).methods("tiny-llava")
    assert listed == ["none", "auto", "ngram", "/d/eagle"]
    for methods in ([], ["none"], ["msd", "msd"], ["none", "ngram", "msd", "flash", "recycle"]):
        with pytest.raises(UserError, match="a race compares methods: expected 2 to 4 different ones, got"):
            check_methods(methods)


DRAWN, PHOTOGRAPHS, TEXT = ["tiny-hybrid", "tiny-llava"], ["smol-llava"], ["smollm2"]


@pytest.mark.parametrize(
    ("models", "open", "installed", "defaults"),  # for image, video and text
    [
        ([], True, DRAWN, "tiny-llava tiny-llava tiny-hybrid"),
        (["llava"], True, DRAWN, "llava llava tiny-hybrid"),
        (["llava", "other"], False, DRAWN, "llava llava llava"),
        (["tiny-hybrid"], True, DRAWN + TEXT, "tiny-llava tiny-llava tiny-hybrid"),
        (["smollm2", "llava"], False, DRAWN + TEXT, "llava llava smollm2"),
        ([], True, DRAWN + TEXT, "tiny-llava tiny-llava smollm2"),
        (["tiny-hybrid"], True, PHOTOGRAPHS + DRAWN, "smol-llava tiny-llava tiny-hybrid"),
        (["smol-llava"], True, PHOTOGRAPHS + DRAWN, "smol-llava tiny-llava tiny-hybrid"),
        (["smol-llava"], False, PHOTOGRAPHS + DRAWN, "smol-llava smol-llava smol-llava"),
    ],
)
def test_default_models_are_in_the_catalog(models, open, installed, defaults, monkeypatch):
    monkeypatch.setattr(plugins, "installed", lambda: installed)
    monkeypatch.setattr(plugins, "embedded", lambda: [name for name in installed if name != "smollm2"])
    monkeypatch.setattr(plugins, "reads_text_only", lambda name: name in ("tiny-hybrid", "smollm2"))
    made = Catalog.of(models, open=open)
    assert [made.default_model(kind) for kind in ("image", "video", "text")] == defaults.split()
    assert set(defaults.split()) <= set(made.models)


SIZE = 1 << 16  # minimum that each file counts


@pytest.fixture
def uploads(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/scene.png").write_bytes(bytes(10 * SIZE))
    made = UploadFolder(tmp_path, limit=3 * SIZE)
    made.exempt_existing()
    return made


def store(uploads, name, size=SIZE, age=0.0):
    """Store a file as gradio does, in a folder named by a hash of its content."""
    path = uploads.folder / f"sha-{name}" / name
    path.parent.mkdir()
    path.write_bytes(bytes(size))
    os.utime(path, (time() - age,) * 2)
    return path


def test_least_recently_used_uploads_are_evicted(uploads):
    old, older, new = store(uploads, "old", age=1000), store(uploads, "older", age=2000), store(uploads, "new", size=1)
    assert uploads.reserve(SIZE)
    assert (older.parent.exists(), old.exists()) == (False, True)
    assert uploads.reserve(SIZE)  # the first reservation is still held
    assert not old.exists()
    assert not uploads.reserve(SIZE)
    assert new.exists()
    uploads.release(SIZE)
    assert uploads.reserve(SIZE)
    uploads.remove_unused(age=50)
    broken = uploads.folder / "tmp1"
    broken.write_bytes(b"an interrupted upload")
    os.utime(broken, (0, 0))
    uploads.remove_unused(age=50)
    assert (new.exists(), broken.exists()) == (True, False)
    uploads.remove_unused(age=0)
    assert sorted(path.name for path in uploads.folder.rglob("*")) == ["samples", "scene.png"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{folder}/sha/a.png", True),
        ("{folder}/sha/../b.png", True),
        ("{folder}/sha/../../../etc/hostname", False),
        ("{folder}-other/a.png", False),
        ("{folder}/link/hostname", False),
        ("/etc/hostname", False),
        ("https://example.org/a.png", False),
        ("{folder}/a\0.png", False),
        ("{folder}/loop", False),
    ],
)
def test_contains(uploads, path, expected):
    (uploads.folder / "link").symlink_to("/etc")
    (uploads.folder / "loop").symlink_to("/")
    assert uploads.contains(path.format(folder=uploads.folder)) is expected


def test_temporary_folders(tmp_path, monkeypatch):
    """Only folders of killed servers of this user are removed; the same port has a folder of the same name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mmspec-demo-elsewhere").symlink_to(tmp_path / "elsewhere")
    script = "from mmspec.demos.storage import *\nwith temporary_folder() as at:\n    print(at, flush=True); input()"
    options = {"cwd": ROOT, "env": os.environ | {"TMPDIR": str(tmp_path)}, "text": True}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    living, killed = (subprocess.Popen([sys.executable, "-c", script], **options) for _ in range(2))
    with living, killed:
        its, stale = (Path(process.stdout.readline().strip()) for process in (living, killed))
        killed.kill()
        killed.wait()
        with temporary_folder(7860) as folder:
            found = [path.exists() for path in (stale, its, tmp_path / "mmspec-demo-elsewhere")]
            assert (found, os.listdir(tmp_path / "elsewhere")) == ([False, True, True], [])
            (folder / "upload").touch()
            with temporary_folder(7860) as beside:
                assert beside != folder
        with temporary_folder(7860) as again:
            assert (again, os.listdir(again), again.stat().st_mode & 0o777) == (folder, ["lock"], 0o700)
        assert not folder.exists()
        living.communicate("\n")
    assert not its.exists()


@pytest.mark.parametrize(("size", "small"), [((1200, 601), (400, 200)), ((31, 7), (30, 6)), ((900, 1), (400, 2))])
def test_preview_of_an_image(tmp_path, size, small):
    path = str(tmp_path / "scan.tiff")
    Image.new("RGB", size, "navy").save(path)
    shown = storage.write_preview(path, "image")
    assert (storage.original_of(shown), storage.original_of(path)) == (path, path)
    with Image.open(shown) as image:
        assert (image.format, image.size) == ("PNG", small)
    assert load_image(shown).getpixel((0, 0)) == (0, 0, 128)


def test_preview_of_a_video(tmp_path):
    path = write_video(tmp_path / "clip.avi", "mpeg4", (800, 450))
    shown = storage.write_preview(path, "video")
    assert storage.original_of(shown) == path
    with av.open(shown) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.name, codec.width, codec.height, codec.pix_fmt) == ("h264", 400, 224, "yuv420p")
    clip = load_video(shown, frames=4)
    assert clip.duration == pytest.approx(2, abs=0.1)
    assert [np.asarray(frame).mean() > 127 for frame in clip.frames] == [False, False, True, True]
    (tmp_path / "a.tiff").write_bytes(b"II*\x00broken")
    with pytest.raises(UserError, match=r"^a\.tiff: expected"):
        storage.write_preview(str(tmp_path / "a.tiff"), "image")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.tiff", "clip.avi", "clip.avi.preview.mp4"]


@pytest.fixture
def send(tmp_path):
    """Send requests through the filter; the application answers after it has read ``reads`` times."""
    uploads = UploadFolder(tmp_path, 1 << 40)

    def status(method, path, headers=None, reads=2, limit=1 << 40):
        uploads.limit = limit

        async def application(scope, receive, send):
            for _ in range(reads):
                await receive()
            reserved = uploads.reserve((1 << 40) - 100)
            uploads.release(((1 << 40) - 100) * reserved)
            await PlainTextResponse(f"{reserved}")(scope, receive, send)

        async def ask():
            transport = httpx.ASGITransport(RequestFilter(application, uploads))
            async with httpx.AsyncClient(transport=transport, base_url="http://demo") as client:
                request = client.build_request(method, path)
                given = {name: str(value).encode("latin-1") for name, value in (headers or {}).items()}
                request.headers = httpx.Headers(given)
                return await client.send(request)

        response = asyncio.run(ask())
        return response.status_code, response.text

    return status


PREFIX = "/gradio_api"
POSTS = [f"{PREFIX}/{route}" for route in ("upload", "queue/join", "cancel", "reset", "call/x", "run/x")]


@pytest.mark.parametrize("route", ["/login", *POSTS])
def test_open_routes_take_requests_up_to_their_limit(send, route):
    most = MAX_UPLOAD_MIB * 2**20 + 2**16 if route.endswith("/upload") else 2**20
    assert send("POST", route, {"Content-Length": most})[0] == 200
    error = f"a request must have at most {most} bytes: got {most + 1}"
    assert send("POST", route, {"Content-Length": most + 1}) == (413, error)
    # A chunked body may be longer than its stated length.
    chunked = {"Transfer-Encoding": "chunked"}
    lengths = [{"Content-Length": length} for length in ("", "-1", "+1", "1.0", "²", "0x1")]
    for headers in ({}, chunked, {"Content-Length": "10", **chunked}, *lengths):
        assert send("POST", route, headers) == (
            411,
            "a request must state its length: expected a Content-Length header",
        )


def test_other_routes_are_closed_and_other_files_are_not_served(send, tmp_path):
    for route in ("/", "/proxy=x", "/component_server", "/uploads", "/call", "/run", "/queue/data", "/stream/a"):
        assert send("POST", PREFIX + route, {"Content-Length": 1}) == (404, "not found")
    for method in ("GET", "HEAD"):
        for route in ("/proxy=x", "/deep_link", "/stream/a", "/custom_component/a"):
            assert send(method, PREFIX + route)[0] == 404
        for fetch in ("/file=", "/file/"):
            assert send(method, f"{PREFIX}{fetch}{tmp_path}/a.png")[0] == 200
            assert send(method, f"{PREFIX}{fetch}/etc/passwd")[0] == 403
    assert send("GET", "/")[0] == 200


def test_space_is_reserved_when_a_body_is_read(send):
    for length, reads, remains in ((100, 2, True), (101, 2, False), (101, 0, True)):  # 0: the login check refused it
        assert send("POST", "/upload", {"Content-Length": length}, reads) == (200, str(remains))
    with pytest.raises(HTTPException, match="the server's space for uploads is full") as caught:
        send("POST", "/upload", {"Content-Length": 100}, limit=99)
    assert caught.value.status_code == 507
