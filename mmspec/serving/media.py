"""Images and videos of requests: data URIs and downloads, decoded by worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from mmspec.checks import data_of, is_data_uri
from mmspec.errors import UserError
from mmspec.serving.download import download
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.targets.processor import Processor

_SECONDS, _MEMORY = 20, 2 << 30  # of a decoding worker, per file


@dataclass(frozen=True)
class Medium:
    """An image or a video of a request.

    Attributes:
        kind: what the request says it is.
        url: data URI, or an http or https URL.
        param: path of the URL's field.
    """

    kind: Literal["image", "video"]
    url: str
    param: str


class MediaReader:
    """Reads images and videos of untrusted requests.

    Args:
        io: its decoder reads the files, if the model reads media.
        allow_urls: download files from public addresses.
    """

    def __init__(self, io: Processor, limits: Limits, *, allow_urls: bool = False) -> None:
        self._limits, self._allow_urls = limits, allow_urls
        self._decoder = io.media_decoder(seconds=_SECONDS, memory=_MEMORY)
        # Downloads may take long: they must not occupy the threads that decode.
        self._threads = ThreadPoolExecutor(limits.max_running, thread_name_prefix="media")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._decoder is not None:
            self._decoder.close()

    def check(self, media: Sequence[Medium]) -> None:
        """Check the number of files and their kinds of URL, before any is read.

        Raises:
            APIError: a limit is exceeded, the model reads text only, or a URL is none that the server reads.
        """
        for kind, most in (("image", self._limits.max_images), ("video", self._limits.max_videos)):
            found = [medium for medium in media if medium.kind == kind]
            if len(found) > most:
                message = f"a request may have at most {most} {kind}s: got {len(found)}"
                raise APIError(400, message, found[most].param)
        for medium in media:
            if self._decoder is None:
                raise APIError(400, f"the model reads text only: got {medium.kind}_url", medium.param)
            scheme = medium.url[:16].partition(":")[0].lower()
            if scheme != "data" and not (self._allow_urls and scheme in ("http", "https")):
                expected = "a data URI" + (" or an http(s) URL" if self._allow_urls else "")
                if scheme in ("http", "https"):
                    expected += " (the server downloads URLs with --allow-urls)"
                raise APIError(400, f"{medium.kind}_url must be {expected}: got {medium.url[:40]!r}", medium.param)

    async def read(self, media: Sequence[Medium]) -> dict[str, list[Any]]:
        """Decode files: ``images`` and ``videos`` in their order.

        Raises:
            APIError: a file cannot be read, or exceeds a limit.
        """
        loop = asyncio.get_running_loop()
        found: dict[str, list[Any]] = {"images": [], "videos": []}
        for medium in media:
            found[f"{medium.kind}s"].append(await loop.run_in_executor(self._threads, self._read, medium))
        return found

    def _read(self, medium: Medium) -> Any:
        limits = self._limits
        video = {"frames": limits.frames, "max_duration": limits.max_video_seconds} if medium.kind == "video" else {}
        try:
            content = data_of(medium.url) if is_data_uri(medium.url) else download(medium.url, limits.body_bytes)
            decoded = self._decoder.load(content, medium.kind, name=medium.param, **video)
        except UserError as error:
            raise APIError(400, str(error), medium.param) from error
        width, height = (decoded.frames[0] if video else decoded).size
        if width * height > limits.max_pixels:
            message = f"{medium.param}: expected at most {limits.max_pixels} pixels, received {width}x{height}"
            raise APIError(400, message, medium.param)
        return decoded
