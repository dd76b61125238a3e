"""Sample frames of a video with decord, an optional dependency imported on first use.

decord applies rotation, but ignores mirroring, transparency and edit lists (it returns frames that edit lists remove)
and does not detect truncated files. It cannot read animated GIF or raw streams.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from fractions import Fraction
from types import ModuleType

import numpy as np
from PIL import Image

from mmspec.errors import UserError, first_line, missing
from mmspec.files import readable_path
from mmspec.vision.media import MediaSource
from mmspec.vision.video_pyav import ChooseTimes, TimedFrames, average_rate, display_size, open_video

_NO_TIMESTAMP = 2**62  # ticks; FFmpeg marks a packet without a timestamp by -2**63


def import_decord() -> ModuleType:
    """Import decord.

    Raises:
        UserError: decord is not installed.
    """
    try:
        return importlib.import_module("decord")
    except ImportError:
        raise missing("video backend decord", "decord", "decord") from None


def sample_with_decord(media: MediaSource, choose_times: ChooseTimes) -> tuple[TimedFrames, Fraction, Fraction]:
    """Sample the frames displayed at the times that ``choose_times`` returns; see ``sample_with_pyav``.

    Raises:
        UserError: decord is not installed, cannot read the source to the end, finds no timestamps in it, or returns
            frames that are not RGB images (some narrow videos).
    """
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
            reason = first_line(error)
            if isinstance(error, decord.DECORDError):
                reason = "decord cannot decode it"
            raise UserError(f"{media.name}: expected a readable video, received a broken one ({reason})") from None
    return sampled, duration, rate
