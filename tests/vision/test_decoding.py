"""Tests of `MediaDecoder`: equal to in-process decoding; crashes, hangs and memory limits affect one file only."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

pytest.importorskip("av")

from mmspec import workers
from mmspec.cli import main
from mmspec.demos import chat_request
from mmspec.demos.chat_request import ChatRequest, Upload
from mmspec.errors import UserError
from mmspec.vision.decoding import DecodeError, MediaDecoder
from mmspec.vision.embedded import samples
from mmspec.vision.images import load_image
from mmspec.vision.video import load_video
from tests.model_folders import save_llava

ROOT = Path(__file__).parents[2]
CLIP = samples() / "clip.mp4"

# Injected into the worker: fails on images one pixel wide; the height selects the fault.
FAULTY = """
import os, signal, time, mmspec.vision.decode_worker as worker
load = worker.load_image
poisoned = False
def faulty(source, **options):
    global poisoned
    image = load(source, **options)
    if poisoned:
        os.kill(os.getpid(), signal.SIGSEGV)
    if image.width == 1:
        poisoned = image.height == 6
        if image.height == 1: os.kill(os.getpid(), signal.SIGSEGV)
        if image.height == 2: os._exit(3)
        if image.height == 3: bytearray(1 << 40)
        if image.height == 4: raise TypeError("not so")
        if image.height == 5:
            open(source + ".reached", "w").close()
            time.sleep(10000)
    return image
worker.load_image = faulty
"""
CRASH, EXIT, MEMORY, EXCEPTION, HANG, POISON = range(1, 7)


@pytest.fixture
def decoder():
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.fixture
def faulty(monkeypatch, decoder):
    """A decoder with the faults of `FAULTY` injected."""
    serve = "serve(sys.argv[1], int(sys.argv[2]))"
    assert workers._PROGRAM.endswith(serve)
    monkeypatch.setattr(workers, "_PROGRAM", workers._PROGRAM.removesuffix(serve) + FAULTY + serve)
    return decoder


def write(path, width, height, colour="red"):
    Image.new("RGB", (width, height), colour).save(path)
    return path


OTHERS: set[int] = set()
"""Processes that tests of other modules left in this process, such as workers of servers."""


@pytest.fixture(autouse=True, scope="module")
def others():
    chat_request.decoder.cache_clear()  # ends workers that tests of the demo started
    OTHERS.update(child.pid for child in psutil.Process().children())


def children():
    own = [child for child in psutil.Process().children() if child.pid not in OTHERS]
    return [child for child in own if "decode_worker" in " ".join(child.cmdline())]


def frames_of(video):
    return [frame.tobytes() for frame in video.frames]


def test_equals_in_process_decoding(tmp_path, decoder):
    picture = tmp_path / "grün.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (37, 50, 3), dtype=np.uint8)).save(picture)
    expected = load_image(picture)
    for source in (picture, str(picture), picture.read_bytes()):
        for kind in ("image", None):
            image = decoder.load(source, kind)
            assert (image.mode, image.size, image.tobytes()) == ("RGB", expected.size, expected.tobytes())
    ours = load_video(CLIP, frames=12)
    for source in (CLIP, CLIP.read_bytes()):
        for kind in ("video", None):
            video = decoder.load(source, kind, frames=12)
            assert frames_of(video) == frames_of(ours)
            assert (video.times, video.duration, video.fps) == (ours.times, ours.duration, ours.fps)
    assert (video.name, decoder.load(CLIP, name="holiday").name) == ("<bytes>", "holiday")
    assert decoder.load(CLIP, fps=1.0, backend="decord").times == load_video(CLIP, fps=1.0).times


def test_repeated_frames_share_one_image(decoder):
    video = decoder.load(CLIP, frames=200)
    assert len(video.frames) == 200
    assert len({id(frame) for frame in video.frames}) == len(set(video.times)) < 200


def test_errors_equal_in_process_errors(tmp_path, decoder):
    write(tmp_path / "a.png", 8, 8)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:45])
    (tmp_path / "empty").touch()
    sources = [
        "text",
        "cut.png",
        "empty",
        "none",
        "a\0b",
        "\udcff",
        "https://example.org/a.png",
        b"",
        b"GIF89a",
        tmp_path,
    ]
    for source in [str(tmp_path / s) if isinstance(s, str) and ":" not in s else s for s in sources]:
        for kind, load in (("image", load_image), ("video", load_video)):
            with pytest.raises(UserError) as ours:
                load(source)
            with pytest.raises(UserError) as received:
                decoder.load(source, kind)
            assert str(received.value) == str(ours.value)
            assert not isinstance(received.value, DecodeError)
    with pytest.raises(UserError, match=r"^holiday: expected a video, received a PNG image; pass it as an image$"):
        decoder.load(tmp_path / "a.png", "video", name="holiday")
    with pytest.raises(UserError, match=r"^frames must be None or a whole number in \[1, 512\]: got 0$"):
        decoder.load(CLIP, frames=0)
    assert len(children()) == 1


def test_relative_paths_follow_the_working_directory(tmp_path, monkeypatch, decoder):
    decoder.load(CLIP)
    write(tmp_path / "a.png", 8, 9)
    monkeypatch.chdir(tmp_path)
    assert decoder.load("a.png").size == (8, 9)


def test_workers_do_not_load_torch(decoder):
    decoder.load(CLIP)
    (worker,) = children()
    assert not any("torch" in region.path for region in worker.memory_maps())
    assert worker.memory_info().rss < 200 << 20  # torch alone takes more


@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        (CRASH, "crash", "expected readable media, received a file on which the decoder fails (SIGSEGV)"),
        (EXIT, "crash", "expected readable media, received a file on which the decoder fails (exit status 3)"),
        (MEMORY, "memory", "expected a file that is decoded in 4096 MiB, received one that needs more"),
        (
            EXCEPTION,
            "exception",
            "expected readable media, received a file on which the decoder fails (TypeError: not so)",
        ),
    ],
)
def test_fault_affects_one_file_only(tmp_path, faulty, fault, cause, message):
    good, bad = write(tmp_path / "good.png", 8, 8), write(tmp_path / "bad.png", 1, fault)
    assert faulty.load(good).size == (8, 8)
    with pytest.raises(DecodeError) as caught:
        faulty.load(bad)
    assert (str(caught.value), caught.value.cause) == (f"{bad}: {message}", cause)
    assert faulty.load(good).size == (8, 8)
    assert len(children()) == 1


@pytest.fixture(params=["default", "blocked", "ignored"])
def alarm(request):
    """SIGALRM's handling in this process, which workers inherit."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN if request.param == "ignored" else signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM} if request.param == "blocked" else ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.usefixtures("alarm")
def test_hang_ends_at_the_time_limit(tmp_path, faulty):
    faulty.seconds = 0.5
    with pytest.raises(DecodeError, match=r"within 0.5 s plus 1 s per MiB, received one that takes longer") as caught:
        faulty.load(write(tmp_path / "bad.png", 1, HANG))
    assert caught.value.cause == "time"
    faulty.seconds = 600
    assert faulty.load(write(tmp_path / "good.png", 8, 8)).size == (8, 8)


def test_memory_limit(tmp_path):
    decoder = MediaDecoder(memory=256 << 20)
    path = tmp_path / "large.png"
    Image.new("1", (9000, 9000)).save(path)  # 11 KB; 324 MB in Pillow's RGB
    with pytest.raises(DecodeError, match="is decoded in 256 MiB, received one that needs more") as caught:
        decoder.load(path)
    assert caught.value.cause == "memory"


def test_delayed_crash_does_not_fail_the_next_file(tmp_path, faulty):
    good, poison = write(tmp_path / "good.png", 8, 8), write(tmp_path / "poison.png", 1, POISON)
    assert faulty.load(poison).size == (1, POISON)
    (before,) = children()
    assert faulty.load(good).size == (8, 8)
    (after,) = children()
    assert before.pid != after.pid


def test_worker_killed_between_files(decoder):
    decoder.load(CLIP)
    (worker,) = children()
    worker.kill()
    assert len(decoder.load(CLIP).frames) == 8


def test_worker_killed_while_decoding(tmp_path, faulty):
    bad = write(tmp_path / "bad.png", 1, HANG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(faulty.load, bad)
        while not Path(f"{bad}.reached").exists():
            time.sleep(0.01)
        children()[0].kill()
        with pytest.raises(DecodeError, match=r"the decoder fails \(SIGKILL\)"):
            waiting.result()
    assert faulty.load(write(tmp_path / "good.png", 8, 8)).size == (8, 8)


def test_threads_share_a_decoder(tmp_path, faulty):
    jobs = [(write(tmp_path / f"{k}.png", 1 if k % 4 == 3 else 8, 1 if k % 4 == 3 else k + 2), k) for k in range(12)]

    def work(job):
        path, number = job
        try:
            return faulty.load(path).size == (8, number + 2)
        except DecodeError as error:
            return error.cause

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, jobs)) == [True, True, True, "crash"] * 3
    assert len(children()) <= 2


def test_no_descriptors_or_processes_leak(tmp_path, faulty):
    good, bad = write(tmp_path / "good.png", 8, 8), write(tmp_path / "bad.png", 1, CRASH)
    this = psutil.Process()
    faulty.load(good)
    before = this.num_fds()
    with pytest.raises(DecodeError):
        faulty.load(bad)
    faulty.load(good)
    assert this.num_fds() == before
    faulty.close()
    assert children() == []
    assert this.num_fds() == before - 2


def test_interrupted_load_discards_the_worker(tmp_path, faulty, monkeypatch):
    good = write(tmp_path / "good.png", 8, 8)
    faulty.load(good)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Image, "frombytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            faulty.load(good)
    assert faulty.load(write(tmp_path / "other.png", 9, 9)).size == (9, 9)  # not the reply to the interrupted request


@pytest.mark.parametrize("end", ["exit", "kill while decoding", "kill"])
def test_workers_exit_with_their_process(tmp_path, end):
    bad = write(tmp_path / "bad.png", 1, HANG)
    program = f"""
import os, psutil, threading, time
from contextlib import suppress
from mmspec import workers
from mmspec.vision import decoding
workers._PROGRAM = workers._PROGRAM.replace("serve(sys", {FAULTY!r} + "serve(sys")
decoder = decoding.MediaDecoder()
decoder.load({str(CLIP)!r})
print(psutil.Process().children()[0].pid, flush=True)
input()
def hang():
    with suppress(decoding.DecodeError):
        decoder.load({str(bad)!r})
if {end!r} != "kill":
    decoder.seconds = 600 if {end!r} == "exit" else 3
    threading.Thread(target=hang, daemon=True).start()
    while not os.path.exists({f"{bad}.reached"!r}):
        time.sleep(0.01)
print("ready", flush=True)
if {end!r} != "exit":
    input()
"""
    command = [sys.executable, "-W", "error", "-c", program]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT) as process:
        worker = psutil.Process(int(process.stdout.readline()))  # it waits, and so does its process
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        if end != "exit":
            process.kill()
        assert process.wait() == (0 if end == "exit" else -signal.SIGKILL)
        worker.wait(120)
        assert process.stderr.read() == ""


def test_workers_ignore_sigint(decoder):
    decoder.load(CLIP)
    (worker,) = children()
    assert os.getpgid(worker.pid) != os.getpgid(0)  # a terminal's Ctrl-C would end it while it starts
    os.kill(worker.pid, signal.SIGINT)
    decoder.load(CLIP)
    assert [child.pid for child in children()] == [worker.pid]


def test_worker_that_cannot_start_raises(monkeypatch, decoder, capfd):
    monkeypatch.setattr(workers, "_PROGRAM", "import sys; sys.exit('no such luck')")
    with pytest.raises(RuntimeError, match=r"the worker of mmspec\.vision\.decode_worker did not start: exit status 1"):
        decoder.load(CLIP)
    assert "no such luck" in capfd.readouterr().err


def test_crash_skips_one_file_of_a_folder(tmp_path, faulty, capfd):
    (tmp_path / "in").mkdir()
    for name, width in (("a.png", 8), ("bad.png", 1), ("c.png", 9)):
        write(tmp_path / "in" / name, width, CRASH)
    model = str(save_llava(tmp_path / "model"))
    out = tmp_path / "out.jsonl"
    main(
        [
            "caption",
            str(tmp_path / "in"),
            "--out",
            str(out),
            "--model",
            model,
            "--drafter",
            "none",
            "--max-new-tokens",
            "2",
        ]
    )
    captions = [line["file"] for line in map(json.loads, out.read_text().splitlines()) if "text" in line]
    assert captions == ["a.png", "c.png"]
    assert "skipped bad.png: " in capfd.readouterr().err


def test_crash_prints_one_error_line(tmp_path, faulty, capfd):
    bad = write(tmp_path / "bad.png", 1, CRASH)
    assert main(["caption", str(bad)]) == 2
    message = f"error: {bad}: expected readable media, received a file on which the decoder fails (SIGSEGV)\n"
    assert capfd.readouterr().err == message


def test_crash_fails_one_demo_request(tmp_path, faulty, monkeypatch):
    monkeypatch.setattr(chat_request, "decoder", lambda: faulty)
    sent = [Upload(str(write(tmp_path / f"{width}.png", width, CRASH)), "holiday.png") for width in (1, 8)]
    with pytest.raises(UserError, match=r"^holiday.png: .* the decoder fails \(SIGSEGV\)$"):
        ChatRequest("image", "What?", (sent[0],)).pipeline_request()
    assert ChatRequest("image", "What?", (sent[1],)).pipeline_request()["images"][0].size == (8, CRASH)
