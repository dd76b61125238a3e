"""Sample frames of videos with FFmpeg (PyAV), or with decord, an optional dependency imported on first use.

FFmpeg streams, with exact timestamps and seeks over long gaps. decord applies rotation, but ignores mirroring,
transparency and edit lists (it returns frames that edit lists remove) and does not detect truncated files. It cannot
read animated GIF or raw streams.
"""

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.codec import CodecContext
from av.container import InputContainer
from av.filter import Graph
from av.packet import Packet
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from mmspec.errors import CutWarning, UserError, first_line, missing
from mmspec.files import readable_path
from mmspec.vision.images import composite_on_white
from mmspec.vision.media import MAX_PIXELS, MediaSource

ChooseTimes = Callable[[Fraction], list[Fraction]]
"""Function from a duration to ascending sample times, both in seconds."""

TimedFrames = list[tuple[Fraction, Image.Image]]
"""(Presentation time in seconds from the first frame, RGB image) of each sampled frame."""

# Demuxers with a timestamp index, which makes seeking exact. Other containers are decoded from the start.
SEEKABLE = ("mov", "matroska")

# Accept metadata that is not UTF-8; PyAV 19 and later always do.
_LENIENT: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}

# Demuxers that render text, or accept any file by its suffix.
_NOT_VIDEO = frozenset({"image2", "tty", "bin", "xbin", "adf", "idf", "rawvideo"})

# First bytes of a video, for demuxers that find data anywhere in a file, such as a photograph within a document.
_START_CODE = b"\x00\x00"  # and 0 or 1
_RAW = {"mjpeg": b"\xff\xd8"} | dict.fromkeys(
    ("h264", "hevc", "vvc", "m4v", "mpegvideo", "mpeg", "cavsvideo"), _START_CODE
)

# libvpx decodes transparency, which is in side data of packets; FFmpeg's own decoders, the default, ignore it.
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}

# A file counts as truncated if its packets end earlier than declared by more than both of these.
_TOLERANCE_SECONDS = Fraction(1, 2)
_TOLERANCE_FRACTION = Fraction(1, 100)
_HEADERS = 256  # bytes: a truncated file ends within a packet and its headers; more unread bytes mean a broken file

_DISPLAY_MATRIX = 6  # AV_FRAME_DATA_DISPLAYMATRIX of libavutil/frame.h
_OTHER_SIDE_DATA = [kind for kind in range(64) if kind != _DISPLAY_MATRIX]

_NO_TIMESTAMP = 2**62  # ticks; FFmpeg marks a packet without a timestamp by -2**63


def open_video(
    media: MediaSource, stack: ExitStack, *, expected: str = "a video"
) -> tuple[InputContainer, VideoStream]:
    """Open a video with FFmpeg; ``stack`` closes it. Cover art of audio files is not a video stream. Raises
    ``UserError``: the source is not a video, audio only, or has frames of more than ``MAX_PIXELS``."""
    # "file:" and the protocol whitelist keep file names and contents from making FFmpeg open anything else.
    source = f"file:{media.path}" if media.path is not None else stack.enter_context(media.open())
    try:
        container = av.open(source, "r", options={"protocol_whitelist": "file"}, **_LENIENT)
    except av.FFmpegError as error:
        if media.description.endswith("video"):
            raise UserError(f"{media.name}: expected {expected}, received a broken one ({error.strerror})") from None
        raise media.refusal(expected) from None
    stack.enter_context(container)
    kind = container.format.name
    if kind.endswith("_pipe") or kind in _NOT_VIDEO or not media.head.startswith(_RAW.get(kind, b"")):
        raise media.refusal(expected)
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        description = "audio only" if container.streams.audio else "a file without a video stream"
        raise UserError(f"{media.name}: expected {expected}, received {description}")
    best = container.streams.best("video")
    stream = best if isinstance(best, VideoStream) and best in streams else streams[0]
    if stream.codec_context is None:
        raise UserError(f"{media.name}: expected {expected}, received a codec that FFmpeg cannot decode")
    width, height = display_size(stream.width, stream.height, stream.sample_aspect_ratio)
    if width * height > MAX_PIXELS:
        size = f"{width}x{height}"
        raise UserError(f"{media.name}: expected frames of at most {MAX_PIXELS} pixels, received {size}")
    stream.thread_type = "AUTO"
    return container, stream


def display_size(width: int, height: int, pixel_aspect: Fraction | None) -> tuple[int, int]:
    """Width and height of a frame after conversion to square pixels: one side grows, the other side stays.
    ``pixel_aspect``: width / height of a pixel; None or 0 if unknown."""
    aspect = pixel_aspect or Fraction(1)
    return round(width * max(aspect, Fraction(1))), round(height / min(aspect, Fraction(1)))


def average_rate(stream: VideoStream) -> Fraction:
    """Frames per second according to the container; 25 if unknown."""
    return stream.average_rate or stream.guessed_rate or Fraction(25)


class PacketScan:
    """Timestamp statistics of a container's packets, in seconds on the stream's clock.

    Packets come in decoding order. If that differs from presentation order (B-frames), the duration of a packet may be
    the time until the next packet is decoded: the last frame then lasts at most as long as the frame before it.

    Attributes:
        interval, longest_gap: nominal time between two frames, and longest time between two keyframes.
        largest, position: bytes of the largest packet, and file offset of the end of the last packet.
        other_end: end of the last packet of other streams.
    """

    def __init__(self, stream: VideoStream) -> None:
        self._stream = stream
        self.interval = 1 / (stream.guessed_rate or stream.average_rate or Fraction(25))
        self._count = 0
        self._starts: list[Fraction] = []  # start times of the last two displayed frames
        self._length = Fraction(0)  # duration of the last displayed frame
        self._reordered = False
        self.other_end = Fraction(0)
        self.keyframe: Fraction | None = None
        self.longest_gap = Fraction(0)
        self.largest = self.position = 0

    @property
    def end(self) -> Fraction:
        """End of the last video frame."""
        if not self._starts:
            return Fraction(0)
        length = self._length
        if self._reordered and len(self._starts) == 2:
            length = min(length, self._starts[1] - self._starts[0])
        return self._starts[-1] + length

    def add(self, packet: "Packet[Any]") -> None:
        self.largest = max(self.largest, packet.size)
        self.position = max(self.position, (packet.pos or 0) + packet.size)
        if packet.size == 0 or packet.is_discard or packet.is_corrupt:  # discarded by an edit list; cut within
            return
        of_video = packet.stream is self._stream
        ticks = packet.dts if packet.pts is None else packet.pts
        start = self._count * self.interval if ticks is None else ticks * packet.time_base
        length = packet.duration * packet.time_base if packet.duration else self.interval if of_video else Fraction(0)
        if not of_video:
            self.other_end = max(self.other_end, start + length)
            return
        self._count += 1
        if not self._starts or start >= self._starts[-1]:
            self._length = length
        else:
            self._reordered = True
        self._starts = sorted({*self._starts, start})[-2:]
        if packet.is_keyframe:
            self.longest_gap = max(self.longest_gap, start - (start if self.keyframe is None else self.keyframe))
            self.keyframe = start

    def declared_end(self, container: InputContainer) -> Fraction:
        """The end of the last stream according to the container; 0 if unknown or estimated."""
        name = container.format.name
        if name == "avi":
            return self._stream.frames * (self._stream.time_base or self.interval)  # one tick per frame
        if name.startswith(SEEKABLE) and container.duration:
            # Muxers disagree on whether the duration includes a start after 0: use the earlier end.
            return Fraction(min(container.start_time or 0, 0) + container.duration, av.time_base)
        return Fraction(0)


def sample_with_pyav(media: MediaSource, choose_times: ChooseTimes) -> tuple[TimedFrames, Fraction, Fraction]:
    """Sample the frames displayed at the times that ``choose_times`` returns; also returns the duration in seconds, and
    the average frame rate. For a truncated file, the duration covers the available frames, and a ``CutWarning`` reports
    how much is missing. Raises ``UserError``: the source is not a video, or broken before the last sampled frame."""
    with closing(_FrameReader(media)) as reader:
        duration = max(reader.end - reader.origin, Fraction(0))
        if reader.declared is not None:
            seconds = f"{float(duration):.2f} s of {float(reader.declared - reader.origin):.2f} s"
            warnings.warn(f"{media.name} is cut short: frames are of the first {seconds}", CutWarning, stacklevel=2)
        sampled: TimedFrames = []
        for target in choose_times(duration):
            frame = reader.frame_at(target)
            time = reader.time(frame)
            if sampled and sampled[-1][0] == time:
                sampled.append(sampled[-1])
            else:
                sampled.append((time, _to_upright_rgb(frame, reader.size)))
        return sampled, duration, reader.rate


class _FrameReader:
    """Reads a file's frames in presentation order; owns the open container.

    Times are in seconds from the first frame, except those on the stream's own clock.
    """

    def __init__(self, media: MediaSource) -> None:
        self.name = media.name
        self._media = media
        self._stack = ExitStack()
        self.close = self._stack.close
        self._failure: str | None = None  # why decoding stopped
        self._container: InputContainer
        self._stream: VideoStream
        self._frames: Iterator[VideoFrame]
        self._current: VideoFrame  # displayed now
        self._next_frame: VideoFrame | None  # displayed next; None after the last frame
        self._longest_gap: Fraction  # longest time between two keyframes, or from the last keyframe to the end
        self.declared: Fraction | None = None  # original end of a truncated file, on the stream's clock
        self._scan_packets()  # before decoding: a file object has a single position
        try:
            self._restart()
        except UserError:
            self.close()
            raise
        first = self._current
        self.origin = self._timestamp(first)
        # Size and aspect for all frames, before rotation: streams may change them.
        self.size = display_size(first.width, first.height, self._stream.sample_aspect_ratio)

    def time(self, frame: VideoFrame) -> Fraction:
        """Presentation time in seconds from the first frame."""
        return self._timestamp(frame) - self.origin

    def frame_at(self, target: Fraction) -> VideoFrame:
        """The frame displayed at ``target`` seconds: the last frame not later, or the first frame. Targets must ascend.
        Raises ``UserError``: the file is broken before the next frame, or the frame is corrupt."""
        seekable = self._container.format.name.startswith(SEEKABLE)
        if seekable and target - self.time(self._current) > self._longest_gap:
            self._seek(target)
        while self._next_frame is not None and self.time(self._next_frame) <= target:
            self._current, self._next_frame = self._next_frame, self._decode_next()
        if self._current.is_corrupt:
            self._failure = "a corrupt frame"
        if self._failure is not None and (self._next_frame is None or self._current.is_corrupt):
            end = f"a video that breaks after {float(self.time(self._current)):.2f} s ({self._failure})"
            raise UserError(f"{self.name}: expected a frame at {float(target):.2f} s, received {end}")
        return self._current

    def _scan_packets(self) -> None:
        """Read the timestamps of all packets without decoding, in constant memory."""
        failed = True
        with ExitStack() as stack:
            container, stream = open_video(self._media, stack)
            scan = PacketScan(stream)
            with suppress(av.FFmpegError):
                for packet in container.demux(*container.streams.video, *container.streams.audio):
                    scan.add(packet)
                failed = False
            declared = scan.declared_end(container)
            self.rate = average_rate(stream)
        self._interval = scan.interval
        self._longest_gap = max(scan.longest_gap, scan.end - (scan.keyframe or Fraction(0)))
        self.end = scan.end
        if declared - max(scan.end, scan.other_end) > max(_TOLERANCE_SECONDS, declared * _TOLERANCE_FRACTION):
            with self._media.open() as file:
                unread = file.seek(0, os.SEEK_END) - scan.position
            if failed or unread > 2 * scan.largest + _HEADERS:
                raise UserError(
                    f"{self.name}: expected a video, received one that breaks after {float(self.end):.2f} s"
                )
            self.declared = declared

    def _restart(self) -> None:
        self.close()
        self._container, self._stream = open_video(self._media, self._stack)
        self._count = 0
        self._start_decoding()

    def _start_decoding(self, *, at_keyframe: bool = False) -> None:
        """Decode from the container's position; ``at_keyframe`` skips frames whose references may be missing."""
        alpha = _ALPHA_DECODERS.get(self._stream.codec.name) if self._stream.metadata.get("alpha_mode") == "1" else None
        self._frames = self._decoded(alpha)
        first = self._decode_next()
        while at_keyframe and alpha is None and first is not None and not first.key_frame:
            first = self._decode_next()
        if first is None:
            reason = self._failure or "no frame can be decoded"
            raise UserError(f"{self.name}: expected a readable video, received a broken one ({reason})")
        self._current, self._next_frame = first, self._decode_next()

    def _decoded(self, decoder: str | None) -> Iterator[VideoFrame]:
        """Frames from the container's position, up to a packet truncated by the end of the file."""
        context: Any = CodecContext.create(decoder, "r") if decoder else self._stream.codec_context
        for packet in self._container.demux(self._stream):
            if self.declared is None or not packet.is_corrupt:
                yield from context.decode(packet)

    def _decode_next(self) -> VideoFrame | None:
        if self._failure is not None:
            return None
        try:
            frame = next(self._frames, None)
        except av.FFmpegError as error:
            self._failure = error.strerror or "unreadable data"
            return None
        if frame is not None and frame.pts is None:  # raw streams have no timestamps
            frame.pts, frame.time_base = self._count, self._interval
        self._count += 1
        return frame

    def _seek(self, target: Fraction) -> None:
        """Seek to the last keyframe not later than ``target``; if that fails, restart from the first frame.

        Containers index decoding times, which may be earlier than presentation times: if the keyframe found is
        displayed after ``target``, seek further back.
        """
        before = self._timestamp(self._current)
        tick = self._stream.time_base or Fraction(1, av.time_base)
        for back in (Fraction(0), self._longest_gap, 4 * self._longest_gap):
            wanted = self.origin + target - back
            if wanted <= before:
                break
            try:
                self._container.seek(int(wanted / tick), stream=self._stream)
                self._start_decoding(at_keyframe=True)
            except (av.FFmpegError, UserError):
                break
            if self.time(self._current) <= target:
                return
        self._failure = None
        self._restart()

    def _timestamp(self, frame: VideoFrame) -> Fraction:
        """Presentation time in seconds on the stream's clock."""
        assert frame.pts is not None
        assert frame.time_base is not None
        return frame.pts * frame.time_base


def _to_upright_rgb(frame: VideoFrame, size: tuple[int, int]) -> Image.Image:
    """Convert a frame to RGB: transparency on white, square pixels, rotated according to the display matrix."""
    if any(component.is_alpha for component in frame.format.components):
        image = composite_on_white(Image.fromarray(frame.to_ndarray(format="rgba")))
    else:
        image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    if _filtered(frame, ["mode=select:type=DISPLAYMATRIX"]) is None:
        return image
    # PyAV's ``frame.side_data`` crashes the process on ICC profiles (double free of the profile's name, PyAV 14 to 19)
    # and raises on types of side data that PyAV does not list: FFmpeg's ``sidedata`` filter first removes all others.
    stripped = _filtered(frame, [f"mode=delete:type={kind}" for kind in _OTHER_SIDE_DATA])
    assert stripped is not None
    side_data = stripped.side_data.get("DISPLAYMATRIX")
    assert isinstance(side_data, SideData)
    matrix = np.frombuffer(bytes(side_data), np.int32)
    # ISO 14496-12, 8.5.2: (x, y, 1) times the matrix, 16.16 fixed point: x' = a x + c y, y' = b x + d y.
    a, b, _, c, d = (int(value) for value in matrix[:5])
    turn = Image.Transpose
    if abs(b) > abs(a):
        image = image.transpose(turn.TRANSPOSE)
        a, d = c, b
    if a < 0:
        image = image.transpose(turn.FLIP_LEFT_RIGHT)
    if d < 0:
        image = image.transpose(turn.FLIP_TOP_BOTTOM)
    return image


def _filtered(frame: VideoFrame, steps: list[str]) -> VideoFrame | None:
    """Apply FFmpeg's ``sidedata`` filter once per step; returns None if a step drops the frame."""
    graph = Graph()
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or Fraction(1)
    )
    graph.link_nodes(source, *(graph.add("sidedata", step) for step in steps), graph.add("buffersink")).configure()
    graph.push(frame)
    try:
        filtered = graph.pull()
    except av.BlockingIOError:
        return None
    assert isinstance(filtered, VideoFrame)
    return filtered


def import_decord() -> Any:
    """Import decord. Raises ``UserError``: decord is not installed."""
    try:
        return importlib.import_module("decord")
    except ImportError:
        raise missing("video backend decord", "decord", "decord") from None


def sample_with_decord(media: MediaSource, choose_times: ChooseTimes) -> tuple[TimedFrames, Fraction, Fraction]:
    """Sample the frames displayed at the times that ``choose_times`` returns; see ``sample_with_pyav``. Raises
    ``UserError``: decord is not installed, cannot read the source to the end, finds no timestamps in it, or returns
    frames that are not RGB images (some narrow videos)."""
    decord = import_decord()
    with ExitStack() as stack:
        _, stream = open_video(media, stack)  # raises if the source is not a video; decord would print to stderr
        width, tick, aspect, rate = stream.width, stream.time_base, stream.sample_aspect_ratio, average_rate(stream)
    decord.logging.set_level(decord.logging.QUIET)
    with ExitStack() as stack:
        # Absolute, because FFmpeg parses text before a colon as a protocol.
        path = None if media.path is None else readable_path(str(media.path.absolute()))
        source = path or stack.enter_context(media.open())
        try:
            reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1)
            spans = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)  # (frames, start/end)
            if tick and np.abs(spans).max() >= float(_NO_TIMESTAMP * tick):
                raise UserError(
                    f"{media.name}: expected a video with timestamps for decord, received one without; use backend pyav"
                )
            order = np.argsort(spans[:, 0], kind="stable")
            starts = spans[order, 0] - spans[:, 0].min()
            duration = Fraction(float(spans[:, 1].max() - spans[:, 0].min()))
            sampled: TimedFrames = []
            for target in choose_times(duration):
                # decord rounds times to float32: tolerate a target at the exact start of a frame
                rank = max(int(np.searchsorted(starts, float(target) + 1e-6, side="right")) - 1, 0)
                time = Fraction(float(starts[rank]))
                if sampled and sampled[-1][0] == time:
                    sampled.append(sampled[-1])
                else:
                    image = Image.fromarray(reader[int(order[rank])].asnumpy())
                    if image.mode != "RGB":  # it interprets row padding as channels
                        raise UserError(
                            f"{media.name}: expected frames whose width decord can read, received {image.width} pixels;"
                            " use backend pyav"
                        )
                    turned = image.width != width  # decord has applied a rotation by 90 degrees
                    size = display_size(*image.size, 1 / aspect if aspect and turned else aspect)
                    sampled.append((time, image.resize(size, Image.Resampling.BICUBIC)))
        except (decord.DECORDError, RuntimeError, IndexError) as error:
            reason = "decord cannot decode it" if isinstance(error, decord.DECORDError) else first_line(error)
            raise UserError(f"{media.name}: expected a readable video, received a broken one ({reason})") from None
    return sampled, duration, rate
