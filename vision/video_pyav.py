"""Frames of a video through PyAV (FFmpeg): streaming, exact in time, seeking over long gaps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from mmspec.errors import UserError
from vision.display_matrix import display_matrix
from vision.images import flatten
from vision.media import Media
from vision.video_container import SEEKABLE, PacketScan, open_video

Choose = Callable[[Fraction], list[Fraction]]
"""From the duration in seconds to the wanted times, ascending."""

Picked = list[tuple[Fraction, Image.Image]]
"""Presentation time from the first frame in seconds, and the RGB image."""

# How far a container may overstate its duration, in seconds and as a share, before it counts as cut short.
_SLACK_SECONDS = Fraction(1, 2)
_SLACK_SHARE = Fraction(1, 100)


def pick_with_pyav(media: Media, choose: Choose) -> tuple[Picked, Fraction]:
    """The frames on screen at the times that `choose` wants, and the duration in seconds.

    Raises:
        UserError: not a video, or broken before the last wanted frame.
    """
    with ExitStack() as stack:
        reader = _Reader(media)
        stack.callback(reader.close)
        duration = max(reader.end - reader.origin, Fraction(0))
        picked: Picked = []
        for target in choose(duration):
            frame = reader.frame_at(target)
            time = reader.time(frame)
            if picked and picked[-1][0] == time:
                picked.append(picked[-1])
            else:
                picked.append((time, _upright(frame)))
        return picked, duration


class _Reader:
    """One pass or several over the frames of a file, in order of presentation; owns the open container.

    Times are in seconds, from the first frame except where the stream's own clock is named.
    """

    def __init__(self, media: Media) -> None:
        self.name = media.name
        self._media = media
        self._stack = ExitStack()
        self._problem: str | None = None  # why decoding stopped early
        self._ends_early_at: Fraction | None = None  # the packets stop here though the container promised more
        self._container: InputContainer
        self._stream: VideoStream
        self._frames: Iterator[VideoFrame]
        self._shown: VideoFrame  # on screen
        self._ahead: VideoFrame | None  # the one after it
        self._longest_gap: Fraction  # longest distance between two keyframes, or the last one and the end
        self._interval: Fraction  # between frames, where they carry no times
        self.end: Fraction  # when the last frame leaves the screen, or should have, in the stream's own clock
        self._scan()  # before decoding begins: a file object has one position only
        try:
            self._restart()
        except UserError:
            self.close()
            raise
        self.origin = self._clock(self._shown)

    def close(self) -> None:
        self._stack.close()

    def time(self, frame: VideoFrame) -> Fraction:
        """Presentation time in seconds from the first frame."""
        return self._clock(frame) - self.origin

    def frame_at(self, target: Fraction) -> VideoFrame:
        """The frame on screen at `target` seconds: the last one not later, or else the first; targets must ascend.

        Raises:
            UserError: the file breaks before that frame is certain, or the frame is damaged.
        """
        if self._seekable and target - self.time(self._shown) > self._longest_gap:
            self._seek(target)
        while self._ahead is not None and self.time(self._ahead) <= target:
            self._shown, self._ahead = self._ahead, self._next()
        if self._ahead is None:
            if (
                self._problem is None
                and self._ends_early_at is not None
                and target >= self._ends_early_at - self.origin
            ):
                self._problem = "the file is cut short"
            if self._problem is not None:
                raise self._broken(target)
        if self._shown.is_corrupt:
            self._problem = "a damaged frame"
            raise self._broken(target)
        return self._shown

    def _scan(self) -> None:
        """Read every packet's time stamps, decoding none; memory does not depend on the file's length."""
        with ExitStack() as stack:
            container, stream = open_video(self._media, stack)
            scan = PacketScan(stream)
            failed = False
            try:
                for packet in container.demux(*container.streams.video, *container.streams.audio):
                    scan.add(packet)
            except av.FFmpegError:
                failed = True
            promised = scan.promised_end(container)
        self._interval = scan.interval
        self._longest_gap = max(scan.longest_gap, scan.end - scan.keyframe)
        self.end = scan.end
        if failed or promised - scan.any_end > max(_SLACK_SECONDS, promised * _SLACK_SHARE):
            self._ends_early_at = scan.end
            self.end = max(scan.end, promised)

    @property
    def _seekable(self) -> bool:
        return self._container.format.name.startswith(SEEKABLE)

    def _restart(self) -> None:
        self._stack.close()
        self._container, self._stream = open_video(self._media, self._stack)
        self._count = 0
        self._begin()

    def _begin(self, *, at_keyframe: bool = False) -> None:
        """Decode from where the container stands; frames before the first keyframe may lack what they refer to."""
        self._frames = self._container.decode(self._stream)
        first = self._next()
        while at_keyframe and first is not None and not first.key_frame:
            first = self._next()
        if first is None:
            raise self._broken(None)
        self._shown, self._ahead = first, self._next()

    def _next(self) -> VideoFrame | None:
        if self._problem is not None:
            return None
        try:
            frame = next(self._frames, None)
        except av.FFmpegError as error:
            self._problem = error.strerror or "unreadable data"
            return None
        if frame is not None and frame.pts is None:  # raw streams carry no times
            frame.pts, frame.time_base = self._count, self._interval
        self._count += 1
        return frame

    def _seek(self, target: Fraction) -> None:
        """Go to the last keyframe not later than `target`, or else back to the start.

        Indices go by decoding time, which may lie before presentation: where the keyframe found is shown too late,
        look further back.
        """
        before = self._clock(self._shown)
        tick = self._stream.time_base or Fraction(1, av.time_base)
        for back in (Fraction(0), self._longest_gap, 4 * self._longest_gap):
            wanted = self.origin + target - back
            if wanted <= before:
                break
            try:
                self._container.seek(int(wanted / tick), stream=self._stream)
                self._begin(at_keyframe=True)
            except (av.FFmpegError, UserError):
                break
            if self.time(self._shown) <= target:
                return
        self._problem = None
        self._restart()

    def _clock(self, frame: VideoFrame) -> Fraction:
        assert frame.pts is not None
        assert frame.time_base is not None
        return frame.pts * frame.time_base

    def _broken(self, target: Fraction | None) -> UserError:
        reason = self._problem or "no frame can be decoded"
        if target is None:
            return UserError(f"{self.name}: expected a readable video, received a broken one ({reason})")
        last = float(self.time(self._shown))
        return UserError(
            f"{self.name}: expected a frame at {float(target):.2f} s, received a video that breaks after {last:.2f} s"
            f" ({reason})"
        )


def _upright(frame: VideoFrame) -> Image.Image:
    """RGB, transparency on white, turned and mirrored as the display matrix says."""
    if any(component.is_alpha for component in frame.format.components):
        image = flatten(Image.fromarray(frame.to_ndarray(format="rgba")))
    else:
        image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    matrix = display_matrix(frame)
    if matrix is None:
        return image
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
