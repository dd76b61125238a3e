"""Tests of `load_video`: frames carry a painted number, compared with the timestamps that the test wrote."""

import gc
import hashlib
import itertools
import os
import struct
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from transformers.video_utils import read_video_pyav

pytest.importorskip("av")

import av

from mmspec.errors import CutWarning, UserError
from mmspec.vision import video_readers
from mmspec.vision.video import MAX_FRAMES, kind_of, load_video
from tests.media_files import PROFILE, film, pages

TICK = Fraction(1, 1000)
SIDE = 64
needs_decord = pytest.mark.skipif(find_spec("decord") is None, reason="decord is an optional dependency")
ONE = 1 << 16
BFRAMES = {"preset": "ultrafast", "bf": "3", "b-pyramid": "none", "b-adapt": "0"}


def paint(number, width=SIDE, height=SIDE):
    """A frame with a 12-bit number as black and white blocks, 3 rows of 4, readable after any codec."""
    bits = np.array([(number >> bit) & 1 for bit in range(12)], dtype=np.uint8).reshape(3, 4)
    blocks = np.kron(bits * 255, np.ones((height // 3, width // 4), dtype=np.uint8))
    page = np.zeros((height, width), dtype=np.uint8)
    page[: blocks.shape[0], : blocks.shape[1]] = blocks
    return np.repeat(page[:, :, None], 3, axis=2)


def number_of(image):
    page = np.asarray(image.convert("L"))
    rows, columns = page.shape[0] // 3, page.shape[1] // 4
    return sum(
        1 << (row * 4 + column)
        for row in range(3)
        for column in range(4)
        if page[row * rows + rows // 2, column * columns + columns // 2] > 127
    )


def numbers(video):
    return [number_of(frame) for frame in video.frames]


def encode(path, stamps, *, codec="libx264", options=None, mux=None, gop=12, size=(SIDE, SIDE), tick=TICK, **more):
    """Write a video with one numbered frame per timestamp in ms; the last frame lasts as long as the one before."""
    with av.open(str(path), "w", options=mux or {}) as container:
        lengths = [b - a for a, b in itertools.pairwise(stamps)] or [100]
        lengths.append(lengths[-1])
        options = options or {"preset": "ultrafast"}
        stream = container.add_stream(codec, rate=Fraction(1000, lengths[-1]), options=options)
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size = "yuv420p", gop
        stream.codec_context.time_base = tick
        stream.codec_context.sample_aspect_ratio = more.get("pixel_aspect", Fraction(1))
        for number, stamp in enumerate(stamps):
            frame = av.VideoFrame.from_ndarray(paint(number, *size), format="rgb24")
            frame.pts, frame.time_base, frame.duration = stamp, TICK, lengths[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def on_screen(stamps, end, count):
    """Reference: index of the frame displayed at the centre of each segment."""
    shift = stamps[0]
    chosen = []
    for index in range(count):
        target = Fraction(2 * index + 1, 2 * count) * (end - shift)
        chosen.append(max((i for i, stamp in enumerate(stamps) if stamp - shift <= target), default=0))
    return chosen


def even(count, step=100, start=0):
    return [start + step * index for index in range(count)]


def set_display_matrix(path, a, b, c, d):
    """Of an MP4 or MOV: its place in a version 0 track header."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def in_own_process(program, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MALLOC_PERTURB_": "165"},  # glibc overwrites freed memory, which reveals use after free
        check=False,
    )


@pytest.mark.parametrize(
    ("suffix", "codec", "options", "start"),
    [
        ("mp4", "libx264", None, 0),
        ("mp4", "libx264", BFRAMES, 700),
        ("mov", "libx264", BFRAMES, 0),
        ("mkv", "libx264", BFRAMES | {"x264-params": "open-gop=1:keyint=12"}, 700),
        ("webm", "libvpx", {"deadline": "realtime", "cpu-used": "8"}, 0),
        ("avi", "mpeg4", {}, 0),
        ("ts", "libx264", BFRAMES, 5000),
    ],
)
def test_samples_the_displayed_frame(tmp_path, suffix, codec, options, start):
    stamps = even(50, start=start)
    path = encode(tmp_path / f"a.{suffix}", stamps, codec=codec, options=options)
    for count in (1, 3, 25, 50, 120):
        video, expected = load_video(path, frames=count), on_screen(stamps, start + 5000, count)
        assert numbers(video) == expected
        assert video.times == pytest.approx([i / 10 for i in expected], abs=1e-3)
        assert video.duration == pytest.approx(5.0, abs=1e-3)


@pytest.mark.parametrize(
    ("suffix", "backend"), [("mp4", "pyav"), ("mkv", "pyav"), pytest.param("mp4", "decord", marks=needs_decord)]
)
@pytest.mark.parametrize("tail", [2, 3, 5])
def test_packet_durations_out_of_order(tmp_path, suffix, tail, backend):
    """With B-frames, an MP4's packets last until the next one is decoded: over a pause in which another is shown."""
    stamps = [*even(20), *even(tail, start=22_000)]
    path = encode(tmp_path / f"a.{suffix}", stamps, options={"preset": "ultrafast", "bf": "3"})
    video = load_video(path, frames=8, backend=backend)
    assert video.duration == pytest.approx(stamps[-1] / 1000, abs=0.15)
    expected = on_screen(stamps, round(video.duration * 1000), 8)
    assert numbers(video) == expected


KINDS: dict[str, dict[str, Any]] = {
    "B-frames": {"options": BFRAMES},
    "variable frame rate": {"stamps": [0, 40, 80, 900, 950, 1000, 1400, 3000, 3100, 3150, 5000], "options": BFRAMES},
    "transport stream": {"suffix": "ts", "options": BFRAMES},
    "odd size": {"suffix": "avi", "codec": "mpeg4", "options": {}, "size": (75, 51), "tick": Fraction(1, 10)},
    "pixel aspect": {"size": (96, 48), "pixel_aspect": Fraction(3, 2)},
    "turned": {"size": (96, 48)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_frames_equal_transformers_reading(tmp_path, kind):
    """Its reader ignores display matrix and pixel aspect, which Pillow applies here."""
    given = {"stamps": even(20), "suffix": "mp4"} | KINDS[kind]
    path = encode(tmp_path / f"a.{given.pop('suffix')}", given.pop("stamps"), **given)
    if kind == "turned":
        set_display_matrix(path, 0, ONE, -ONE, 0)
    frames, _ = read_video_pyav(str(path), lambda metadata: range(MAX_FRAMES))
    expected = [Image.fromarray(frame) for frame in frames]
    if kind == "pixel aspect":
        expected = [frame.resize((144, 48), Image.Resampling.BICUBIC) for frame in expected]
    if kind == "turned":
        expected = [frame.transpose(Image.Transpose.ROTATE_270) for frame in expected]
    with av.open(str(path)) as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    video = load_video(path, frames=MAX_FRAMES)
    ours = dict(zip(video.times, video.frames, strict=True))
    assert list(ours) == pytest.approx([time - times[0] for time in times])
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(ours.values(), expected, strict=True))


def test_edit_lists_cut_the_start_and_the_end(tmp_path):
    mux = {"use_editlist": "1", "avoid_negative_ts": "disabled"}
    video = load_video(encode(tmp_path / "start.mp4", even(40, start=-1500), mux=mux), frames=25)
    assert (numbers(video), video.duration) == (list(range(15, 40)), pytest.approx(2.5))
    path = encode(tmp_path / "a.mp4", even(50), options=BFRAMES)
    data = bytearray(path.read_bytes())
    at = data.index(b"elst") + 12  # duration of the first entry, in the movie's clock of 1000 ticks a second
    assert struct.unpack_from(">I", data, at) == (5000,)
    struct.pack_into(">I", data, at, 3000)
    path.write_bytes(data)
    video = load_video(path, frames=30)
    assert (numbers(video), video.duration) == (list(range(30)), pytest.approx(3.0))


@pytest.fixture
def decoded(monkeypatch):
    frames: list[int] = []
    step = video_readers._FrameReader._decode_next

    def counted(reader):
        frames.append(1)
        return step(reader)

    monkeypatch.setattr(video_readers._FrameReader, "_decode_next", counted)
    return frames


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_seeking_equals_decoding_from_the_start(tmp_path, monkeypatch, decoded, suffix):
    stamps = even(600, step=40)
    options = BFRAMES | {"x264-params": "open-gop=1:keyint=15:min-keyint=15:scenecut=0"}
    path = encode(tmp_path / f"long.{suffix}", stamps, options=options, gop=15, size=(32, 48))
    sought = load_video(path, frames=9)
    assert len(decoded) < 300
    assert numbers(sought) == on_screen(stamps, 24000, 9)
    monkeypatch.setattr(video_readers, "SEEKABLE", ("no such demuxer",))
    assert load_video(path, frames=9).times == sought.times
    assert len(decoded) > 550


def test_long_last_keyframe_interval_is_decoded_once(tmp_path, decoded):
    """A seek within it would go back to its keyframe, which is decoded already."""
    options = {"preset": "ultrafast", "x264-params": "keyint=1000:scenecut=0"}
    path = encode(tmp_path / "a.mp4", even(200), options=options, gop=1000)
    assert numbers(load_video(path, frames=10)) == list(range(10, 200, 20))
    assert len(decoded) <= 201


def test_seek_to_a_false_keyframe(tmp_path):
    path = encode(tmp_path / "a.mp4", even(120), codec="mpeg4", options={}, gop=12)
    data = path.read_bytes()
    assert data.count(b"stss") == 1
    path.write_bytes(data.replace(b"stss", b"free"))  # an MP4 without a list of keyframes declares all frames keyframes
    assert numbers(load_video(path, frames=7)) == on_screen(even(120), 12000, 7)


def test_raw_stream_without_times_or_duration(tmp_path):
    video = load_video(encode(tmp_path / "a.h264", even(30), options=BFRAMES), frames=6)
    assert numbers(video) == on_screen(even(30), 3000, 6)


@pytest.mark.parametrize("suffix", ["gif", "png", "mp4"])
def test_a_last_frame_that_stands(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "mp4":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=10, options={"preset": "ultrafast"})
            stream.width, stream.height = SIDE, SIDE
            packets = [
                packet
                for number in range(4)
                for packet in stream.encode(av.VideoFrame.from_ndarray(paint(number), format="rgb24"))
            ] + stream.encode(None)
            packets[-1].duration = 9 * (packets[1].pts - packets[0].pts)
            container.mux(packets)
    else:
        pages = [Image.fromarray(paint(number)) for number in range(4)]
        pages[0].save(path, save_all=True, append_images=pages[1:], duration=[100, 100, 100, 900])
    assert kind_of(path) == "video"
    video = load_video(path, frames=6)
    assert video.duration == pytest.approx(1.2, abs=1e-3)
    assert numbers(video) == on_screen(even(4), 1200, 6) == [1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libvpx", "ffv1"])
def test_transparency_of_encoded_frames_is_white(codec, tmp_path):
    pages = np.zeros((90, 48, 64, 4), np.uint8)
    path = tmp_path / f"a.{'mkv' if codec == 'ffv1' else 'webm'}"
    with av.open(str(path), "w") as out:
        options = {"auto-alt-ref": "0", "deadline": "realtime", "cpu-used": "8"} if "vpx" in codec else {}
        stream = out.add_stream(codec, rate=10, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuva420p", 10
        for number, page in enumerate(pages):
            page[:, :32] = 200, 2 * number, 40, 255
            frame = av.VideoFrame.from_ndarray(page, "rgba").reformat(format="yuva420p")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    video = load_video(path, frames=3)
    for number, frame in zip((15, 45, 75), video.frames, strict=True):
        assert np.abs(np.subtract(frame.getpixel((8, 24)), (200, 2 * number, 40))).max() < 12
        assert min(frame.getpixel((56, 24))) > 240


MATRICES = {
    "90": ((0, ONE, -ONE, 0), Image.Transpose.ROTATE_270),  # clockwise, as phones write it
    "180": ((-ONE, 0, 0, -ONE), Image.Transpose.ROTATE_180),
    "270": ((0, -ONE, ONE, 0), Image.Transpose.ROTATE_90),
    "mirror": ((-ONE, 0, 0, ONE), Image.Transpose.FLIP_LEFT_RIGHT),
    "flip": ((ONE, 0, 0, -ONE), Image.Transpose.FLIP_TOP_BOTTOM),
    "transpose": ((0, ONE, ONE, 0), Image.Transpose.TRANSPOSE),
    "transverse": ((0, -ONE, -ONE, 0), Image.Transpose.TRANSVERSE),
}


def test_display_matrix(tmp_path):
    path = encode(tmp_path / "a.mp4", even(6), size=(96, 48), options={"preset": "ultrafast", "qp": "0"})
    plain = load_video(path, frames=1).frames[0]
    for matrix, transposition in MATRICES.values():
        turned = load_video(set_display_matrix(path, *matrix), frames=1).frames[0]
        assert np.array_equal(np.asarray(turned), np.asarray(plain.transpose(transposition)))


@pytest.mark.parametrize("backend", ["pyav", pytest.param("decord", marks=needs_decord)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("aspect", "shown"), [((2, 1), (192, 64)), ((1, 2), (96, 128)), ((16, 15), (102, 64))])
def test_pixels_that_are_not_square(tmp_path, aspect, shown, turned, backend):
    path = encode(tmp_path / "a.mp4", even(6), size=(96, 64), pixel_aspect=Fraction(*aspect))
    if turned:
        set_display_matrix(path, 0, ONE, -ONE, 0)
    frame = load_video(path.read_bytes(), frames=6, backend=backend).frames[5]
    assert frame.size == (shown[::-1] if turned else shown)
    assert number_of(frame.transpose(Image.Transpose.ROTATE_90) if turned else frame) == 5


def test_pixel_aspect_counts_for_the_largest_size(tmp_path):
    path = encode(tmp_path / "a.mp4", even(6), size=(1920, 1080), pixel_aspect=Fraction(1, 100))
    assert_user_error(path, "expected frames of at most 89478485 pixels, received 1920x108000")


def test_colours_of_bt709(tmp_path):
    """Levels from the standard's own equations; converted as BT.601, the green would be 203."""
    colour, red_share, blue_share = np.array([20, 180, 60]), 0.2126, 0.0722
    red, green, blue = colour / 255
    luma = red_share * red + (1 - red_share - blue_share) * green + blue_share * blue
    differences = (blue - luma) / (1 - blue_share), (red - luma) / (1 - red_share)
    levels = round(16 + 219 * luma), *(round(128 + 112 * difference) for difference in differences)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        stream.codec_context.colorspace = stream.codec_context.color_range = 1  # BT.709, limited range
        frame = av.VideoFrame(SIDE, SIDE, "yuv420p")
        for plane, level in zip(frame.planes, levels, strict=True):
            plane.update(bytes([level]) * plane.buffer_size)
        frame.colorspace = frame.color_range = 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    pixel = load_video(tmp_path / "a.mp4", frames=1).frames[0].getpixel((32, 32))
    assert np.abs(np.array(pixel) - colour).max() <= 4


@pytest.mark.parametrize("kind", ["animated PNG", "mirrored MOV"])
def test_a_colour_profile(tmp_path, kind):
    """In a subprocess, which a double free of the profile's name would crash."""
    path, expected = tmp_path / "a", pages()
    if kind == "animated PNG":
        expected[0].save(path, "PNG", save_all=True, append_images=expected[1:], duration=100, icc_profile=PROFILE)
    else:
        path.write_bytes(film("mov", "png", {}, icc_profile=PROFILE))
        set_display_matrix(path, -ONE, 0, 0, ONE)
        expected = [ImageOps.mirror(page) for page in expected]
    program = (
        "import gc, hashlib, sys\n"
        "from mmspec.vision.video import load_video\n"
        "video = load_video(sys.argv[1], frames=6)\n"
        "gc.collect()\n"
        "print(*[hashlib.md5(frame.tobytes()).hexdigest() for frame in video.frames])\n"
    )
    done = in_own_process(program, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [hashlib.md5(frame.tobytes()).hexdigest() for frame in expected]


def test_number_of_frames(tmp_path):
    path = encode(tmp_path / "a.mp4", even(50))
    rates = [(None, None, 8), (None, 1.0, 5), (None, 2.5, 12), (None, 0.01, 1), (3, 10.0, 3), (100, 2.0, 10)]
    for frames, fps, count in [*rates, (4, None, 4)]:
        video = load_video(path, frames=frames, fps=fps)
        assert numbers(video) == on_screen(even(50), 5000, count)


def test_short_videos_repeat_frames(tmp_path):
    video = load_video(encode(tmp_path / "a.mp4", [0, 1000]), frames=6)
    assert numbers(video) == [0, 0, 0, 1, 1, 1]
    one = load_video(encode(tmp_path / "b.mp4", [0]), frames=3)
    assert one.times == [0.0, 0.0, 0.0]


def test_memory_does_not_grow_with_length(tmp_path, decoded):
    path = encode(tmp_path / "long.mkv", even(3000, step=33), gop=5000)  # one keyframe: all of it is decoded
    gc.collect()
    before = psutil.Process().memory_info().rss
    video = load_video(path, frames=4)
    grown = psutil.Process().memory_info().rss - before
    assert numbers(video) == on_screen(even(3000, step=33), 99000, 4)
    assert len(decoded) > 2600
    assert grown < 12 << 20  # 3000 decoded frames would be 18 MiB as YUV and 37 MiB as RGB


@pytest.mark.parametrize(
    ("suffix", "mux"), [("mp4", {}), ("mp4", {"movflags": "faststart"}), ("mkv", {}), ("webm", {}), ("avi", {})]
)
def test_truncated(tmp_path, suffix, mux):
    codec = {"webm": "libvpx", "avi": "mpeg4"}.get(suffix, "libx264")
    options = {"webm": {"deadline": "realtime", "cpu-used": "8"}, "avi": {}}.get(suffix)
    tick = Fraction(1, 10) if suffix == "avi" else TICK  # with ticks of 1 ms, most of an AVI is its index
    whole = encode(tmp_path / f"whole.{suffix}", even(50), codec=codec, options=options, mux=mux, tick=tick)
    data, cut = whole.read_bytes(), tmp_path / f"cut.{suffix}"
    for share in (0.02, 0.8, 0.85):
        cut.write_bytes(data[: int(len(data) * share)])
        if share == 0.02 or (suffix == "mp4" and not mux):  # without an index
            assert_user_error(cut, f"cut.{suffix}: expected ")
            continue
        with pytest.warns(CutWarning) as noted:
            video = load_video(cut, frames=6)
        (message,) = (str(one.message) for one in noted)
        assert message == f"{cut} is cut short: frames are of the first {video.duration:.2f} s of 5.00 s"
        there = round(10 * video.duration)
        assert 30 <= there < 45
        assert numbers(video) == on_screen(even(there), 100 * there, 6)


@pytest.mark.parametrize(("suffix", "filler"), [("mp4", 255), ("mkv", 0)])
def test_corrupt_data_in_the_middle(tmp_path, suffix, filler):
    data = bytearray(encode(tmp_path / f"a.{suffix}", even(50)).read_bytes())
    data[len(data) // 3 : len(data) // 2] = bytes([filler]) * (len(data) // 2 - len(data) // 3)
    with pytest.raises(UserError, match=r"breaks after|broken"):
        load_video(bytes(data), frames=40)


def test_a_broken_file_is_decoded_up_to_its_last_good_frame(tmp_path):
    """A seek into broken data fails; the frames before that are then decoded from the first on."""
    options = BFRAMES | {"x264-params": "keyint=15:min-keyint=15:scenecut=0"}
    path = encode(tmp_path / "a.mp4", even(600, step=40), options=options, gop=15, size=(32, 48))
    data = bytearray(path.read_bytes())
    first, last = (len(data) * share // 100 for share in (42, 60))
    data[first:last] = bytes(last - first)
    with pytest.raises(UserError, match=r"expected a frame at 20\.00 s, received a video that breaks after 1\d\."):
        load_video(bytes(data), frames=3)


def write_audio(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def assert_user_error(source, expected, **options):
    with pytest.raises(UserError) as caught:
        load_video(source, **options)  # type: ignore[arg-type]
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sources_that_are_not_videos(tmp_path):
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile a.mp4\n")
    assert_user_error(tmp_path / "list.mp4", "received text")
    assert_user_error(np.random.default_rng(0).bytes(5000), "expected a video, received unknown data")
    assert_user_error(write_audio(tmp_path / "sound.mp4"), "received audio only")
    Image.new("RGB", (8, 8)).save(tmp_path / "still.jpg")
    assert_user_error(tmp_path / "still.jpg", "received a JPEG image; pass it as an image")


def test_options_out_of_range(tmp_path):
    path = encode(tmp_path / "a.mp4", even(50))
    assert_user_error(path, "frames must be >= 1: got 0", frames=0)
    assert_user_error(path, "got 513", frames=513)
    assert_user_error(path, "got '8'", frames="8")
    for fps in (0.0, -1.0, float("nan"), float("inf")):
        assert_user_error(path, "fps must be ", fps=fps)
    assert_user_error(path, "is 5000 frames: expected at most 512", fps=1000.0)
    assert_user_error(path, "is 513 frames: expected at most 512", fps=102.6)
    assert len(load_video(path, fps=102.4).times) == MAX_FRAMES
    assert_user_error(path, "backend must be one of pyav, decord: received 'cv2'", backend="cv2")


@pytest.mark.parametrize("backend", ["pyav", pytest.param("decord", marks=needs_decord)])
def test_max_duration(tmp_path, backend):
    path = encode(tmp_path / "a.mp4", even(50))
    duration = load_video(path, frames=1).duration
    message = f"expected a video of at most {duration - 0.5:g} s, received"
    assert_user_error(path, message, max_duration=duration - 0.5, backend=backend)
    assert len(load_video(path, frames=3, max_duration=duration).frames) == 3


def test_bytes_and_file_objects(tmp_path):
    path = encode(tmp_path / "a.mp4", even(20))
    expected = load_video(path, frames=4).times
    assert load_video(path.read_bytes(), frames=4).times == expected
    with path.open("rb") as file:
        assert load_video(file, frames=4).times == expected
        assert not file.closed
    # Larger than any read-ahead buffer.
    large = encode(tmp_path / "a.avi", even(50), codec="rawvideo", options={"threads": "1"}, tick=Fraction(1, 10))
    with large.open("rb") as file:
        assert numbers(load_video(file, frames=5)) == [5, 15, 25, 35, 45]


def test_metadata_that_is_not_utf8(tmp_path):
    path = encode(tmp_path / "a.mp4", even(4))
    data = path.read_bytes()
    assert b"Lavf" in data  # the muxer's name
    assert load_video(data.replace(b"Lavf", b"L\xe9vf"), frames=4).times == load_video(path, frames=4).times


def test_file_name_is_not_read_as_a_protocol(tmp_path, monkeypatch):
    encode(tmp_path / "a.mp4", even(20)).rename(tmp_path / "concat:a|b")
    monkeypatch.chdir(tmp_path)
    assert load_video("concat:a|b", frames=2).times == pytest.approx([0.5, 1.5])


@needs_decord
@pytest.mark.parametrize("frames", [11, 20])
def test_decord_equals_pyav(tmp_path, frames):
    """It rounds times to float32: with 20, of the starts of frames, 0.1 becomes 0.1000000015 > 0.1."""
    path = encode(tmp_path / "a.mp4", even(40), options=BFRAMES)
    ours, theirs = load_video(path, frames=frames), load_video(path, frames=frames, backend="decord")
    assert numbers(theirs) == numbers(ours)
    assert theirs.times == pytest.approx(ours.times, abs=1e-4)
    assert theirs.duration == pytest.approx(ours.duration, abs=1e-4)


@needs_decord
@pytest.mark.parametrize(("suffix", "codec"), [("vob", "mpeg2video"), ("avi", "mpeg4")])
def test_decord_refuses_packets_without_timestamps(tmp_path, suffix, codec):
    options = {"bf": "2"} if codec == "mpeg4" else {}
    path = encode(tmp_path / f"a.{suffix}", even(50, step=40), codec=codec, options=options, tick=Fraction(1, 25))
    assert numbers(load_video(path, frames=5)) == [5, 15, 25, 35, 45]
    assert_user_error(
        path, "expected a video with timestamps for decord, received one without; use backend pyav", backend="decord"
    )


@needs_decord
def test_decord_refuses_frames_that_it_misreads(tmp_path):
    path = encode(tmp_path / "a.mp4", even(6), size=(48, 96))
    assert load_video(path, frames=6).frames[5].size == (48, 96)
    assert_user_error(path, "width decord can read, received 48 pixels; use backend pyav", backend="decord")


def test_missing_decord_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "decord", None)
    assert_user_error(encode(tmp_path / "a.mp4", even(4)), "pip install -e '.[decord]'", backend="decord")


def test_kind_of_detects_by_content(tmp_path):
    film = encode(tmp_path / "film.mp4", even(4))
    assert kind_of(film.rename(tmp_path / "film.png")) == "video"
    Image.new("RGB", (8, 8)).save(tmp_path / "still.mp4", format="PNG")
    assert kind_of(tmp_path / "still.mp4") == "image"
    (tmp_path / "notes.png").write_text("hello")
    with pytest.raises(UserError, match=r"notes\.png: expected an image or a video, received text"):
        kind_of(tmp_path / "notes.png")
    with pytest.raises(UserError, match="audio only"):
        kind_of(write_audio(tmp_path / "sound.mp4"))


def test_no_leaks_and_no_output(tmp_path):
    """In a subprocess, whose file descriptor 2 would show FFmpeg's messages."""
    good = encode(tmp_path / "good.mp4", even(20))
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(good.read_bytes()[:700])
    program = (
        "import gc, os, sys, psutil\n"
        "from mmspec.vision.video import load_video\n"
        "def count(): gc.collect(); return psutil.Process().num_fds()\n"
        "load_video(sys.argv[1]); before = count()\n"
        "for path in sys.argv[1:] * 3:\n"
        "    try: load_video(path)\n"
        "    except ValueError: pass\n"
        "assert count() == before, (before, count())\n"
    )
    done = in_own_process(program, good, bad)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("backend", ["pyav", "decord"])
def test_without_pyav_videos_are_refused(backend, tmp_path, monkeypatch):
    """With decord too, which tells neither times nor pixel aspects."""
    path = encode(tmp_path / "a.mp4", even(8))
    (tmp_path / "still.jpg").write_bytes(b"\xff\xd8\xff")
    for name in [name for name in sys.modules if name.startswith(("av.", "mmspec.vision.video_"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "av", None)
    assert kind_of(path) == "video"
    expected = f"{path}: reading a video needs the package av, which is not installed: run pip install av"
    assert_user_error(path, expected, backend=backend)
    with pytest.raises(UserError, match="expected an image or a video"):
        kind_of(tmp_path / "still.jpg")
