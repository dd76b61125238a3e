"""The display matrix of a video frame, read without PyAV's `frame.side_data`."""

from fractions import Fraction

import av
import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import SideData
from av.video.frame import VideoFrame

_DISPLAY_MATRIX = 6  # AV_FRAME_DATA_DISPLAYMATRIX of libavutil/frame.h
_OTHER_SIDE_DATA = [kind for kind in range(64) if kind != _DISPLAY_MATRIX]


def display_matrix(frame: VideoFrame) -> np.ndarray | None:
    """The 9 values of a frame's display matrix; None without one.

    `frame.side_data` frees metadata that FFmpeg frees again (the name of an ICC profile, PyAV 14 to 19), which ends the
    process, and raises for types of side data that PyAV does not list. FFmpeg's own filter removes the other types.
    """
    if _filtered(frame, ["mode=select:type=DISPLAYMATRIX"]) is None:
        return None
    bare = _filtered(frame, [f"mode=delete:type={kind}" for kind in _OTHER_SIDE_DATA])
    assert bare is not None
    matrix = bare.side_data.get("DISPLAYMATRIX")
    assert isinstance(matrix, SideData)
    return np.frombuffer(bytes(matrix), np.int32)


def _filtered(frame: VideoFrame, steps: list[str]) -> VideoFrame | None:
    """A frame after FFmpeg's `sidedata` filter, once per step; None if a step drops it."""
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
