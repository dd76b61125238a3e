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
from mmspec.demos import chat_request
from mmspec.errors import CutWarning, UserError
from mmspec.vision.decoding import DecodeError, MediaDecoder
from mmspec.vision.embedded import samples
from mmspec.vision.images import load_image
from mmspec.vision.video import load_video
from tests.media_files import cut_clip

ROOT = Path(__file__).parents[2]
CLIP = samples() / "clip.mp4"

# Injected into the worker: it appends each time limit to the file LIMITS, and each decoded height to the file CALLS;
# images one pixel wide fail by the name in FAULTS at their height - 1. A poisoned worker dies at the next file.
FAULTY = """
import os, signal, time, mmspec.workers, mmspec.vision.decoding as worker
load, alarm = worker.load_image, mmspec.workers._set_alarm
poisoned = False
def note(name, value):
    with open(os.path.join(FOLDER, name), "a") as file:
        file.write(f"{value}\\n")
def armed(seconds):
    note("LIMITS", seconds)
    alarm(seconds)
def faulty(source, **options):
    global poisoned
    image = load(source, **options)
    if poisoned: os.kill(os.getpid(), signal.SIGSEGV)
    note("CALLS", image.height)
    fault = FAULTS[image.height - 1] if image.width == 1 else None
    poisoned = fault == "poison"
    if fault == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "exit": os._exit(3)
    if fault == "memory": bytearray(1 << 40)
    if fault == "exception": raise TypeError("not so")
    if fault == "time": signal.setitimer(signal.ITIMER_REAL, 0.01)
    if fault in ("time", "hang"): time.sleep(10000)
    return image
worker.load_image, mmspec.workers._set_alarm = faulty, armed
"""
FAULTS = {  # what is said of them
    "crash": "expected readable media, received a file on which the decoder fails (SIGSEGV)",
    "exit": "expected readable media, received a file on which the decoder fails (exit status 3)",
    "memory": "expected a file that is decoded in 4096 MiB, received one that needs more",
    "exception": "expected readable media, received a file on which the decoder fails (TypeError: not so)",
    "time": "expected a file that is decoded within 60 s plus 1 s per MiB, received one that takes longer",
    "hang": "",
    "poison": "",
}
SERVE = "serve(sys.argv[1], int(sys.argv[2]))"
MIB = 1 << 20
OTHERS: set[int] = set()
"""Processes that tests of other modules left in this process, such as workers of servers."""


def faulty_program(folder):
    assert workers._PROGRAM.endswith(SERVE)
    given = f"FOLDER, FAULTS = {str(folder)!r}, {list(FAULTS)!r}\n"
    return workers._PROGRAM.removesuffix(SERVE) + "\n" + given + FAULTY + SERVE


@pytest.fixture
def decoder():
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.fixture
def faulty(monkeypatch, tmp_path, decoder):
    monkeypatch.setattr(workers, "_PROGRAM", faulty_program(tmp_path))
    return decoder


def noted(folder, name):
    path = folder / name
    return [json.loads(line) for line in path.read_text().split()] if path.exists() else []


def write(path, width, height, size=0):
    """A PNG file, of ``size`` bytes if it is given."""
    Image.new("RGB", (width, height), "red").save(path, "PNG")
    if size:
        with path.open("ab") as file:
            file.truncate(size)
    return path


def bad(folder, fault):
    """A file on which a faulty decoder fails, and its height."""
    height = 1 + list(FAULTS).index(fault)
    return write(folder / f"{fault}.png", 1, height), height


@pytest.fixture(autouse=True, scope="module")
def others():
    chat_request.decoder.cache_clear()  # ends workers that tests of the demo started
    OTHERS.update(child.pid for child in psutil.Process().children())


def children():
    own = [child for child in psutil.Process().children() if child.pid not in OTHERS]
    return [child for child in own if "mmspec.vision.decoding" in " ".join(child.cmdline())]


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
            assert [frame.tobytes() for frame in video.frames] == [frame.tobytes() for frame in ours.frames]
            assert (video.times, video.duration, video.fps) == (ours.times, ours.duration, ours.fps)
    assert (video.name, decoder.load(CLIP, name="holiday").name) == ("<bytes>", "holiday")
    assert decoder.load(CLIP, fps=1.0, backend="decord").times == load_video(CLIP, fps=1.0).times


def test_notes_of_workers_are_warnings_here(decoder):
    for read in (load_video, decoder.load):
        with pytest.warns(CutWarning, match=r"^holiday is cut short: frames are of the first 0\.\d\d s of 4\.00 s$"):
            read(cut_clip(), name="holiday")


def test_repeated_frames_share_one_image(decoder):
    video = decoder.load(CLIP, frames=200)
    assert len(video.frames) == 200
    assert len({id(frame) for frame in video.frames}) == len(set(video.times)) < 200


def test_errors_equal_in_process_errors(tmp_path, decoder):
    write(tmp_path / "a.png", 8, 8)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:45])
    (tmp_path / "empty").touch()
    files = [str(tmp_path / name) for name in ("text", "cut.png", "empty", "none", "a\0b", "\udcff")]
    for source in [*files, "https://example.org/a.png", b"", b"GIF89a", tmp_path]:
        for kind, load in (("image", load_image), ("video", load_video)):
            with pytest.raises(UserError) as ours:
                load(source)
            with pytest.raises(UserError) as received:
                decoder.load(source, kind)
            assert str(received.value) == str(ours.value)
            assert not isinstance(received.value, DecodeError)
    with pytest.raises(UserError, match=r"^holiday: expected a video, received a PNG image; pass it as an image$"):
        decoder.load(tmp_path / "a.png", "video", name="holiday")
    with pytest.raises(UserError, match=r"^frames must be >= 1: got 0$"):
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


def test_a_file_has_one_second_more_per_mib(tmp_path, faulty):
    sizes = [1 << 10, 1 << 19, MIB - 1, MIB, MIB + 1, 5 * MIB]
    for size in sizes:
        path = write(tmp_path / "a.png", 8, 9, size)
        assert faulty.load(path).size == faulty.load(path.read_bytes()).size == (8, 9)
    expected = [seconds for size in sizes for seconds in 2 * (pytest.approx(60 + size / MIB), 0)]
    assert noted(tmp_path, "LIMITS") == expected


@pytest.mark.parametrize("fault", [fault for fault, message in FAULTS.items() if message])
def test_a_fault_affects_one_file_only(tmp_path, faulty, fault):
    """What an earlier file may have caused is tried again in a fresh worker; what takes too long would again.

    Neither processes nor pipes of workers that failed stay.
    """
    (path, height), good = bad(tmp_path, fault), write(tmp_path / "good.png", 8, 8)
    this, descriptors = psutil.Process(), None
    for tries in (1, 1 if fault == "time" else 2):  # first with a fresh worker, then with one that was used
        before = noted(tmp_path, "CALLS").count(height)
        with pytest.raises(DecodeError) as caught:
            faulty.load(path)
        assert str(caught.value) == f"{path}: {FAULTS[fault]}"
        assert caught.value.cause == ("crash" if fault == "exit" else fault)
        assert noted(tmp_path, "CALLS").count(height) - before == tries
        assert faulty.load(good).size == (8, 8)
        assert len(children()) == 1
        assert descriptors in (None, this.num_fds())
        descriptors = this.num_fds()
    faulty.close()
    assert children() == []
    assert this.num_fds() == descriptors - 2


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
        faulty.load(bad(tmp_path, "hang")[0])
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


def test_workers_that_died_between_files_are_replaced(tmp_path, faulty):
    """Killed, or by a fault of the file before."""
    good, (poison, height) = write(tmp_path / "good.png", 8, 8), bad(tmp_path, "poison")
    for end in ("poison", "kill"):
        assert faulty.load(poison if end == "poison" else good).height in (height, 8)
        (before,) = children()
        if end == "kill":
            before.kill()
        assert faulty.load(good).size == (8, 8)
        assert [child.pid for child in children()] != [before.pid]


def test_worker_killed_while_decoding(tmp_path, faulty):
    path, height = bad(tmp_path, "hang")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(faulty.load, path)
        while height not in noted(tmp_path, "CALLS"):
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
    path, _ = bad(tmp_path, "hang")
    program = f"""
import os, psutil, threading, time
from contextlib import suppress
from mmspec import workers
from mmspec.vision import decoding
workers._PROGRAM = {faulty_program(tmp_path)!r}
decoder = decoding.MediaDecoder()
decoder.load({str(CLIP)!r})
print(psutil.Process().children()[0].pid, flush=True)
input()
def hang():
    with suppress(decoding.DecodeError):
        decoder.load({str(path)!r})
if {end!r} != "kill":
    decoder.seconds = 600 if {end!r} == "exit" else 3
    threading.Thread(target=hang, daemon=True).start()
    while not os.path.exists({str(tmp_path / "CALLS")!r}):
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
    with pytest.raises(RuntimeError, match=r"the worker of mmspec\.vision\.decoding did not start: exit status 1"):
        decoder.load(CLIP)
    assert "no such luck" in capfd.readouterr().err
