"""Videos in: a few frames, picked by time stamp, of a file of any length.

Conventions. Times are seconds from the first frame of the video stream. The duration ends when the last frame leaves
the screen. N frames are taken at the centres of N equal segments of the duration; a rate of `fps` means
N = round(duration * fps), at least 1. At a given time the frame on screen is the last one whose presentation time is
not later; asked for more frames than there are, the same frame comes several times, sharing one image.

The file is read twice: once for its packets' time stamps alone (containers misstate durations, or state none), once
to decode. Only wanted frames are kept; gaps longer than the longest distance between two keyframes are skipped by
seeking. Rotation and mirroring from the display matrix are applied, transparency is composited on white. Animated GIF
and PNG are videos; animated WebP and AVIF count as images, because FFmpeg does not read their frames.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from PIL import Image

from mmspec.checks import number, optional, whole
from mmspec.errors import UserError
from vision.images import still_format
from vision.media import Media, resolve

Backend = Literal["pyav", "decord"]

DEFAULT_FRAMES = 8
MAX_FRAMES = 512
"""Most frames picked from one video; at 1080p each holds 6 MB."""

FRAMES = optional(whole(1, MAX_FRAMES))
FPS = optional(number("a number > 0", lambda rate: rate > 0))

_VIDEO_FORMATS = frozenset({"GIF", "PNG"})  # animated ones, as Pillow names them


@dataclass(frozen=True)
class Video:
    """Frames of one video.

    Attributes:
        frames: RGB images in order of time.
        times: presentation time of each frame, in seconds from the first frame of the stream.
        duration: seconds from the first frame until the last one leaves the screen.
        name: what the source is called in messages.
    """

    frames: list[Image.Image]
    times: list[float]
    duration: float
    name: str


def load_video(
    source: object,
    *,
    name: str | None = None,
    frames: int | None = None,
    fps: float | None = None,
    backend: Backend = "pyav",
    longest: float | None = None,
) -> Video:
    """Pick frames of a video by time stamp.

    Args:
        source: path (str or path-like), bytes, or binary file object (left open).
        name: what error messages call the source.
        frames: how many; 8 where neither `frames` nor `fps` is given. With `fps`, the most that may be picked: where
            the rate asks for more, that many are spread evenly over the whole duration instead.
        fps: frames per second of the video's own time.
        backend: "pyav", or "decord", which is an optional dependency, and silently ignores edit lists (it shows
            frames that the file says to cut).
        longest: seconds that the video may last.

    Raises:
        UserError: an option out of range; a source that is missing, empty, not a video, audio only, a still image, too
            long, or broken before the last wanted frame.
    """
    if backend not in get_args(Backend):
        raise UserError(f"backend must be one of {', '.join(get_args(Backend))}: received {backend!r}")
    frames, fps = FRAMES.check("frames", frames), FPS.check("fps", fps)
    media = resolve(source, expected="a video", name=name)
    kind = _kind(media)
    if kind == "image":
        found = media.description if media.description.endswith("image") else "an image"
        raise UserError(f"{media.name}: expected a video, received {found}; pass it as an image")
    if kind is None:
        raise UserError(f"{media.name}: expected a video, received {media.description}")

    def choose(duration: Fraction) -> list[Fraction]:
        if longest is not None and duration > longest:
            raise UserError(
                f"{media.name}: expected a video of at most {longest:g} s, received one of {float(duration):.1f} s"
            )
        return _targets(duration, frames, fps, media.name)

    # FFmpeg is loaded where a file is read: frames that are at hand need none of it.
    if backend == "decord":
        from vision.video_decord import pick_with_decord as pick
    else:
        from vision.video_pyav import pick_with_pyav as pick
    picked, duration = pick(media, choose)
    return Video([image for _, image in picked], [float(time) for time, _ in picked], float(duration), media.name)


def kind_of(source: object, *, name: str | None = None) -> Literal["image", "video"]:
    """Whether a source is an image or a video, by its content; takes what `load_video` takes.

    Raises:
        UserError: missing, empty, or neither of both.
    """
    media = resolve(source, expected="an image or a video", name=name)
    kind = _kind(media)
    if kind is None:
        raise UserError(f"{media.name}: expected an image or a video, received {media.description}")
    if kind == "video":
        from vision.video_container import open_video

        with ExitStack() as stack:
            open_video(media, stack, expected="an image or a video")
    return kind


def _kind(media: Media) -> Literal["image", "video"] | None:
    """By the first bytes and by Pillow; None for text, and for images that Pillow cannot open.

    Text never reaches FFmpeg: a playlist or concat script would make it open other files.
    """
    still = still_format(media)
    if still is not None:
        image_format, animated = still
        return "video" if animated and image_format in _VIDEO_FORMATS else "image"
    return None if media.description == "text" or media.description.endswith("image") else "video"


def _targets(duration: Fraction, frames: int | None, fps: float | None, name: str) -> list[Fraction]:
    """Centres of equal segments of the duration, in seconds."""
    count = frames or DEFAULT_FRAMES
    if fps is not None:
        wanted = max(1, round(duration * Fraction(fps)))
        if frames is None and wanted > MAX_FRAMES:
            raise UserError(
                f"{name}: fps {fps:g} over {float(duration):.1f} s is {wanted} frames: expected at most {MAX_FRAMES};"
                " lower fps or give frames"
            )
        count = wanted if frames is None else min(frames, wanted)
    return [duration * (2 * index + 1) / (2 * count) for index in range(count)]
