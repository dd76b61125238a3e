"""Frames of a video through decord, an optional dependency imported on first use.

decord applies rotation, but it is silently wrong on edit lists (it shows frames that a file says to cut) and does not
notice a file that is cut short. It reads neither animated GIF nor raw streams.
"""

import importlib
from contextlib import ExitStack
from fractions import Fraction
from types import ModuleType

import numpy as np
from PIL import Image

from mmspec.errors import UserError
from mmspec.extras import missing
from vision.media import Media
from vision.video_container import open_video
from vision.video_pyav import Choose, Picked


def import_decord() -> ModuleType:
    """The optional dependency.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("decord")
    except ImportError:
        raise missing("video backend decord", "decord", "decord") from None


def pick_with_decord(media: Media, choose: Choose) -> tuple[Picked, Fraction]:
    """The frames on screen at the times that `choose` wants, and the duration in seconds.

    Raises:
        UserError: decord is not installed; not a video, or one that decord cannot read to the end.
    """
    decord = import_decord()
    with ExitStack() as stack:
        open_video(media, stack)  # decord writes to stderr about what is no video; say it our way instead
    decord.logging.set_level(decord.logging.QUIET)
    with ExitStack() as stack:
        source = str(media.path) if media.path is not None else stack.enter_context(media.open())
        try:
            reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1)
            spans = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)  # (frames, start/end)
            order = np.argsort(spans[:, 0], kind="stable")
            starts = spans[order, 0] - spans[:, 0].min()
            duration = Fraction(float(spans[:, 1].max() - spans[:, 0].min()))
            picked: Picked = []
            for target in choose(duration):
                # decord's times are rounded to float32: a target on a frame's very start must still find it
                rank = max(int(np.searchsorted(starts, float(target) + 1e-6, side="right")) - 1, 0)
                time = Fraction(float(starts[rank]))
                if picked and picked[-1][0] == time:
                    picked.append(picked[-1])
                else:
                    picked.append((time, Image.fromarray(reader[int(order[rank])].asnumpy())))
        except (decord.DECORDError, RuntimeError, IndexError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if isinstance(error, decord.DECORDError):
                reason = "decord cannot decode it"
            raise UserError(f"{media.name}: expected a readable video, received a broken one ({reason})") from None
    return picked, duration
