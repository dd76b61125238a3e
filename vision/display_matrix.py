"""Read a video frame's display matrix (rotation and mirroring) without PyAV's `frame.side_data`."""

from fractions import Fraction

import av
import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import SideData
from av.video.frame import VideoFrame

_DISPLAY_MATRIX = 6  # AV_FRAME_DATA_DISPLAYMATRIX of libavutil/frame.h
_OTHER_SIDE_DATA = [kind for kind in range(64) if kind != _DISPLAY_MATRIX]


def display_matrix(frame: VideoFrame) -> np.ndarray | None:
    """Returns the 9 values of a frame's display matrix, or None if it has none.

    PyAV's `frame.side_data` crashes the process on ICC profiles (double free of the profile's name, PyAV 14 to 19) and
    raises on types of side data that PyAV does not list. FFmpeg's `sidedata` filter removes all other types first.
    """
    if _filtered(frame, ["mode=select:type=DISPLAYMATRIX"]) is None:
        return None
    stripped = _filtered(frame, [f"mode=delete:type={kind}" for kind in _OTHER_SIDE_DATA])
    assert stripped is not None
    matrix = stripped.side_data.get("DISPLAYMATRIX")
    assert isinstance(matrix, SideData)
    return np.frombuffer(bytes(matrix), np.int32)


def _filtered(frame: VideoFrame, steps: list[str]) -> VideoFrame | None:
    """Apply FFmpeg's `sidedata` filter once per step; returns None if a step drops the frame."""
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
