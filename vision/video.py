"""Load videos: sample frames by timestamp from a file of any length.

Conventions: times are in seconds from the first frame of the video stream. The duration includes the display time of
the last frame. N frames are sampled at the centres of N equal segments of the duration; ``fps`` gives N = max(1,
round(duration * fps)). The frame at time t is the last frame with a presentation time <= t. If more frames are sampled
than the video has, frames are repeated and share one image.

The file is read twice: once for packet timestamps only (containers may have no duration or a wrong duration) and once
for decoding. Only sampled frames are kept in memory; gaps longer than the longest keyframe interval are skipped by
seeking. The display matrix (rotation, mirroring) is applied; frames whose pixels are not square grow along the longer
side of a pixel; transparency is composited on white. Animated GIF and PNG are videos. Animated WebP and AVIF are
images, because FFmpeg does not read their frames.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Annotated, Literal, get_args

from annotated_types import Interval
from PIL import Image
from pydantic import PositiveFloat

from mmspec.errors import UserError, missing
from mmspec.validation import check
from mmspec.vision.images import image_format
from mmspec.vision.media import MediaSource, resolve

Backend = Literal["pyav", "decord"]

DEFAULT_FRAMES = 8
MAX_FRAMES = 512
"""Maximum number of frames sampled from one video; one 1080p frame takes 6 MB."""

Frames = Annotated[int, Interval(ge=1, le=MAX_FRAMES)] | None
FPS = PositiveFloat | None

_VIDEO_FORMATS = frozenset({"GIF", "PNG"})  # if animated; Pillow's names


@dataclass(frozen=True)
class Video:
    """Sampled frames of one video.

    Attributes:
        frames: RGB images in order of time.
        times: presentation time of each frame, in seconds from the first frame of the stream.
        duration: seconds from the start of the first frame to the end of the last frame.
        name: the source in error messages.
        fps: average frames per second of the source; None if it is unknown.
    """

    frames: list[Image.Image]
    times: list[float]
    duration: float
    name: str
    fps: float | None = None


def load_video(
    source: object,
    *,
    name: str | None = None,
    frames: int | None = None,
    fps: float | None = None,
    backend: Backend = "pyav",
    max_duration: float | None = None,
) -> Video:
    """Sample frames of a video by timestamp.

    Args:
        source: path (str or path-like), bytes, or binary file object (not closed).
        name: name of the source in error messages.
        frames: number of frames; 8 if neither ``frames`` nor ``fps`` is given. With ``fps``, the maximum: if the rate
            gives more, ``frames`` frames are spread evenly over the whole duration.
        fps: frames per second of video time.
        backend: "pyav", or "decord", an optional dependency that ignores mirroring and edit lists (it returns frames
            that edit lists remove).
        max_duration: longest accepted video, in seconds.

    Raises:
        UserError: an option is out of range, or the source is missing, empty, not a video, audio only, a still image,
            too long, or broken before the last sampled frame; or the backend's package is not installed.

    Warns:
        CutWarning: the file is truncated; frames and duration cover the available part (not with decord).
    """
    if backend not in get_args(Backend):
        raise UserError(f"backend must be one of {', '.join(get_args(Backend))}: received {backend!r}")
    frames, fps = check("frames", Frames, frames), check("fps", FPS, fps)
    media = resolve(source, expected="a video", name=name)
    kind = _kind(media)
    if kind == "image":
        description = media.description if media.description.endswith("image") else "an image"
        raise UserError(f"{media.name}: expected a video, received {description}; pass it as an image")
    if kind is None:
        raise media.refusal("a video")

    def choose_times(duration: Fraction) -> list[Fraction]:
        if max_duration is not None and duration > max_duration:
            raise UserError(
                f"{media.name}: expected a video of at most {max_duration:g} s, received one of {float(duration):.1f} s"
            )
        return _sample_times(duration, frames, fps, media.name)

    # Imported here: FFmpeg is not needed for a `Video` made of frames in memory.
    if not _has_pyav():
        raise missing(f"{media.name}: reading a video", "av")
    from mmspec.vision.video_readers import sample_with_decord, sample_with_pyav

    sample = sample_with_decord if backend == "decord" else sample_with_pyav
    sampled, duration, rate = sample(media, choose_times)
    images, times = [image for _, image in sampled], [float(time) for time, _ in sampled]
    return Video(images, times, float(duration), media.name, float(rate))


def kind_of(source: object, *, name: str | None = None) -> Literal["image", "video"]:
    """Detect from the content whether a source is an image or a video; accepts the same sources as ``load_video``.

    Without PyAV, which recognises videos, every file that may be a video counts as a video. Raises ``UserError``: the
    source is missing, empty, or neither.
    """
    media = resolve(source, expected="an image or a video", name=name)
    kind = _kind(media)
    if kind is None:
        raise media.refusal("an image or a video")
    if kind == "video" and _has_pyav():
        from mmspec.vision.video_readers import open_video

        with ExitStack() as stack:
            open_video(media, stack, expected="an image or a video")
    return kind


def _has_pyav() -> bool:
    return find_spec("av") is not None


def _kind(media: MediaSource) -> Literal["image", "video"] | None:
    """Detect the kind from the first bytes and with Pillow; None for other formats and unreadable images.

    Text is never passed to FFmpeg, which would open the files listed in a playlist or concat script.
    """
    image = image_format(media)
    if image is not None:
        name, animated = image
        return "video" if animated and name in _VIDEO_FORMATS else "image"
    return None if media.is_neither or media.description.endswith("image") else "video"


def _sample_times(duration: Fraction, frames: int | None, fps: float | None, name: str) -> list[Fraction]:
    """The centres of equal segments of the duration, in seconds."""
    count = frames or DEFAULT_FRAMES
    if fps is not None:
        wanted = max(1, round(duration * Fraction(fps)))
        if frames is None and wanted > MAX_FRAMES:
            raise UserError(
                f"{name}: fps {fps:g} over {float(duration):.1f} s is {wanted} frames: expected at most {MAX_FRAMES};"
                " lower fps or set frames"
            )
        count = wanted if frames is None else min(frames, wanted)
    return [duration * (2 * index + 1) / (2 * count) for index in range(count)]
