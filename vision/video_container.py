"""Open video containers with FFmpeg and scan their packets' timestamps without decoding."""

from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from mmspec.errors import UserError
from mmspec.vision.media import MAX_PIXELS, MediaSource

# Demuxers with a timestamp index, which makes seeking exact. Other containers are decoded from the start.
SEEKABLE = ("mov", "matroska")

# Accept metadata that is not UTF-8; PyAV 19 and later always do.
_LENIENT: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}

# Demuxers that render text, or accept any file by its suffix.
_NOT_VIDEO = frozenset({"image2", "tty", "bin", "xbin", "adf", "idf", "rawvideo"})

# Demuxers that find their data anywhere in a file, such as a photograph within a document: the first bytes of a video.
_START_CODE = b"\x00\x00"  # and 0 or 1
_RAW = {"mjpeg": b"\xff\xd8"} | dict.fromkeys(
    ("h264", "hevc", "vvc", "m4v", "mpegvideo", "mpeg", "cavsvideo"), _START_CODE
)


def open_video(
    media: MediaSource, stack: ExitStack, *, expected: str = "a video"
) -> tuple[InputContainer, VideoStream]:
    """Open a video with FFmpeg; ``stack`` closes it. Cover art of audio files is not a video stream.

    Raises:
        UserError: the source is not a video, audio only, or has frames of more than ``MAX_PIXELS``.
    """
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
    """Width and height of a frame once its pixels are square: one side grows, the other stays.

    Args:
        pixel_aspect: width of a pixel by its height; None or 0 if it is unknown.
    """
    aspect = pixel_aspect or Fraction(1)
    return round(width * max(aspect, Fraction(1))), round(height / min(aspect, Fraction(1)))


def average_rate(stream: VideoStream) -> Fraction:
    """Frames per second, according to the container; 25 if it does not say."""
    return stream.average_rate or stream.guessed_rate or Fraction(25)


class PacketScan:
    """Timestamp statistics of a container's packets, in seconds on the stream's clock.

    Packets come in decoding order. Where that is not the order of presentation (B-frames), the duration of a packet may
    be the time until the next one is decoded: the last frame then lasts at most as long as the one before.

    Attributes:
        interval: nominal time between two frames.
        keyframe: time of the last keyframe.
        longest_gap: longest time between two keyframes.
    """

    def __init__(self, stream: VideoStream) -> None:
        self._stream = stream
        self.interval = 1 / (stream.guessed_rate or stream.average_rate or Fraction(25))
        self._count = 0
        self._starts: list[Fraction] = []  # of the last two frames displayed
        self._length = Fraction(0)  # of the last frame displayed
        self._reordered = False
        self._other_end = Fraction(0)
        self.keyframe = self.longest_gap = Fraction(0)
        self._first_keyframe = True

    @property
    def end(self) -> Fraction:
        """End of the last video frame."""
        if not self._starts:
            return Fraction(0)
        length = self._length
        if self._reordered and len(self._starts) == 2:
            length = min(length, self._starts[1] - self._starts[0])
        return self._starts[-1] + length

    @property
    def any_end(self) -> Fraction:
        """End of the last packet of any stream."""
        return max(self.end, self._other_end)

    def add(self, packet: "Packet[Any]") -> None:
        if packet.size == 0 or packet.is_discard:  # discarded: cut by an edit list
            return
        of_video = packet.stream is self._stream
        ticks = packet.dts if packet.pts is None else packet.pts
        start = self._count * self.interval if ticks is None else ticks * packet.time_base
        length = packet.duration * packet.time_base if packet.duration else self.interval if of_video else Fraction(0)
        if not of_video:
            self._other_end = max(self._other_end, start + length)
            return
        self._count += 1
        if not self._starts or start >= self._starts[-1]:
            self._length = length
        else:
            self._reordered = True
        self._starts = sorted({*self._starts, start})[-2:]
        if packet.is_keyframe:
            if not self._first_keyframe:
                self.longest_gap = max(self.longest_gap, start - self.keyframe)
            self._first_keyframe = False
            self.keyframe = start

    def declared_end(self, container: InputContainer) -> Fraction:
        """The end of the last stream according to the container; 0 if it states none or only an estimate."""
        name = container.format.name
        if name == "avi":
            return self._stream.frames * (self._stream.time_base or self.interval)  # one tick per frame
        if name.startswith(SEEKABLE) and container.duration:
            # Muxers disagree on whether the duration includes a start after 0: take the earlier end.
            return Fraction(min(container.start_time or 0, 0) + container.duration, av.time_base)
        return Fraction(0)
