"""Limits on requests to the server."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import Checked, option, whole


@dataclass(frozen=True)
class Limits(Checked):
    """Limits on requests; the options of ``mmspec serve`` have the same names.

    Attributes:
        max_running: choices that decode at the same time.
        max_waiting: choices that wait for one that has ended; further requests are refused with status 429.
        max_body: size of a request's body, in MiB, and of a downloaded file.
        max_characters: characters of a request's prompts: tokenising megabytes takes minutes.
        max_tokens: generated tokens of a choice, and how many are generated at most if the request does not say.
        max_model_len: tokens of prompt and output together; 0 is the model's own limit.
        max_images, max_videos: images and videos of a request.
        max_pixels: pixels of an image or video frame.
        frames: frames that are sampled from a video.
        max_video_seconds: duration of a video.
    """

    max_running: int = option(8, whole(1))
    max_waiting: int = option(32, whole(0))
    max_body: int = option(32, whole(1))
    max_characters: int = option(500_000, whole(1))
    max_tokens: int = option(2048, whole(1))
    max_model_len: int = option(0, whole(0))
    max_images: int = option(8, whole(0))
    max_videos: int = option(2, whole(0))
    max_pixels: int = option(1 << 24, whole(1))
    frames: int = option(8, whole(1, 512))
    max_video_seconds: int = option(300, whole(1))

    @property
    def body_bytes(self) -> int:
        """Bytes of a body or a downloaded file."""
        return self.max_body << 20
