"""Limits of `MediaDecoder` at exact sizes, how often a file is decoded, and workers that have died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import psutil
import pytest
from PIL import Image

from mmspec import workers
from mmspec.vision.decoding import Cause, DecodeError, MediaDecoder

# Injected into the worker: it appends each time limit to the file LIMITS, and each decoded height to the file CALLS;
# images one pixel wide fail by the name in FAULTS at their height - 1.
FAULTY = """
import os, signal, time, mmspec.workers, mmspec.vision.decode_worker as worker
load, alarm = worker.load_image, mmspec.workers._set_alarm
def note(name, value):
    with open(os.path.join(FOLDER, name), "a") as file:
        file.write(f"{value}\\n")
def armed(seconds):
    note("LIMITS", seconds)
    alarm(seconds)
def faulty(source, **options):
    image = load(source, **options)
    note("CALLS", image.height)
    fault = FAULTS[image.height - 1] if image.width == 1 else None
    if fault == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "time": signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(10000)
    if fault == "memory": bytearray(1 << 40)
    if fault == "exception": raise TypeError("not so")
    return image
worker.load_image, mmspec.workers._set_alarm = faulty, armed
"""
FAULTS = [cause for cause in get_args(Cause) if cause != "stop"]
MIB = 1 << 20


@pytest.fixture
def decoder(tmp_path, monkeypatch):
    """A decoder with the faults of `FAULTY` injected."""
    serve = "serve(sys.argv[1], int(sys.argv[2]))"
    assert workers._PROGRAM.endswith(serve)
    given = f"FOLDER, FAULTS = {str(tmp_path)!r}, {FAULTS!r}\n"
    monkeypatch.setattr(workers, "_PROGRAM", workers._PROGRAM.removesuffix(serve) + "\n" + given + FAULTY + serve)
    decoder = MediaDecoder(workers=2, seconds=30)
    yield decoder
    decoder.close()


def noted(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().split()]


def picture(path: Path, width: int = 8, height: int = 9, size: int = 0) -> Path:
    """A PNG file of ``size`` bytes, if it is given."""
    Image.new("RGB", (width, height)).save(path, "PNG")
    if size:
        with path.open("ab") as file:
            file.truncate(size)
    return path


def test_a_file_has_one_second_more_per_mib(tmp_path, decoder):
    sizes = [1 << 10, 1 << 19, MIB - 1, MIB, MIB + 1, 5 * MIB]
    for size in sizes:
        path = picture(tmp_path / "a.png", size=size)
        assert decoder.load(path).size == decoder.load(path.read_bytes()).size == (8, 9)
    expected = [seconds for size in sizes for seconds in 2 * (pytest.approx(30 + size / MIB), 0)]
    assert noted(tmp_path, "LIMITS") == expected


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("cause", FAULTS)
def test_only_failures_that_an_earlier_file_may_have_caused_are_tried_again(tmp_path, decoder, cause, used):
    """In a fresh worker; what takes too long would take as long again."""
    height = 1 + FAULTS.index(cause)
    if used:
        decoder.load(picture(tmp_path / "good.png"))
    with pytest.raises(DecodeError) as caught:
        decoder.load(picture(tmp_path / "bad.png", 1, height))
    assert caught.value.cause == cause
    assert noted(tmp_path, "CALLS").count(height) == (2 if used and cause != "time" else 1)


def test_workers_that_failed_or_died_are_dropped(tmp_path, decoder):
    """Neither their processes nor their pipes stay."""
    good = picture(tmp_path / "good.png")
    decoder.load(good)
    this = psutil.Process()
    descriptors = this.num_fds()
    for height in (*range(1, 1 + len(FAULTS)), None):
        (worker,) = decoder._workers._workers
        if height is None:
            worker.process.kill()
        else:
            with pytest.raises(DecodeError):
                decoder.load(picture(tmp_path / "bad.png", 1, height))
        assert decoder.load(good).size == (8, 9)
        assert worker.process.returncode is not None
        assert decoder._workers._workers == {*decoder._workers._idle}
        assert worker not in decoder._workers._workers
        assert this.num_fds() == descriptors
