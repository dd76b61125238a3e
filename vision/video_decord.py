"""Sample frames of a video with decord, an optional dependency imported on first use.

decord applies rotation, but ignores edit lists (it returns frames that the file cuts) and does not detect truncated
files. It reads neither animated GIF nor raw streams.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from fractions import Fraction
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from mmspec.errors import UserError, first_line
from mmspec.extras import missing
from mmspec.vision.media import MediaSource

if TYPE_CHECKING:
    from mmspec.vision.video_pyav import ChooseTimes, TimedFrames


def import_decord() -> ModuleType:
    """Import decord.

    Raises:
        UserError: decord is not installed.
    """
    try:
        return importlib.import_module("decord")
    except ImportError:
        raise missing("video backend decord", "decord", "decord") from None


def sample_with_decord(media: MediaSource, choose_times: ChooseTimes) -> tuple[TimedFrames, Fraction]:
    """Sample the frames displayed at the times that `choose_times` returns; see `sample_with_pyav`.

    Raises:
        UserError: decord is not installed, or cannot read the source to the end.
    """
    decord = import_decord()
    if find_spec("av") is not None:
        from mmspec.vision.video_container import open_video

        with ExitStack() as stack:
            open_video(media, stack)  # raises for sources that are no video, on which decord prints to stderr
    decord.logging.set_level(decord.logging.QUIET)
    with ExitStack() as stack:
        source = str(media.path) if media.path is not None else stack.enter_context(media.open())
        try:
            reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1)
            spans = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)  # (frames, start/end)
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
                    sampled.append((time, Image.fromarray(reader[int(order[rank])].asnumpy())))
        except (decord.DECORDError, RuntimeError, IndexError) as error:
            reason = first_line(error)
            if isinstance(error, decord.DECORDError):
                reason = "decord cannot decode it"
            raise UserError(f"{media.name}: expected a readable video, received a broken one ({reason})") from None
    return sampled, duration
