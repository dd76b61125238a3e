"""Images and videos of requests: data URIs and downloads from public addresses, decoded by worker processes."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from time import monotonic as clock
from typing import Any, Literal

import httpx

from mmspec.errors import UserError
from mmspec.serving.errors import APIError
from mmspec.serving.settings import Limits
from mmspec.targets.processor import Processor
from mmspec.validation import data_of, is_data_uri

_SECONDS, _MEMORY = 20, 2 << 30  # limits of a decoding worker, per file


@dataclass(frozen=True)
class Medium:
    """An image or a video of a request. ``param``: path of the URL's field in the request."""

    kind: Literal["image", "video"]
    url: str
    param: str


class MediaReader:
    """Reads images and videos of untrusted requests."""

    def __init__(self, processor: Processor, limits: Limits, *, allow_urls: bool = False) -> None:
        self._limits, self._allow_urls = limits, allow_urls
        self._decoder = processor.media_decoder(seconds=_SECONDS, memory=_MEMORY)
        # Downloads may take long and must not occupy the decoding threads.
        self._threads = ThreadPoolExecutor(limits.max_running, thread_name_prefix="media")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._decoder is not None:
            self._decoder.close()

    def check(self, media: Sequence[Medium]) -> None:
        """Check the number of files and their URL schemes before reading any file. Raises ``APIError``: a limit is
        exceeded, the model reads text only, or a URL is not supported."""
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
        """Decode files: ``images`` and ``videos`` in their order. Raises ``APIError``: a file cannot be read, or
        exceeds a limit."""
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


SECONDS = 20.0
"""Time limit of a download, redirects included."""

REDIRECTS = 3
_HEADERS = {"User-Agent": "mmspec", "Accept-Encoding": "identity"}


class _PublicOnly(httpx.HTTPTransport):
    """Connects to public addresses only.

    The name is resolved only once, and the checked address is connected to: a second lookup could return another
    address (DNS rebinding).
    """

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url, host = request.url, request.url.raw_host.decode()
        if url.scheme not in ("http", "https"):
            raise UserError(f"URLs must be http or https: got {url.scheme or 'none'}")
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"cannot resolve {host!r}") from error
        addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
        if not all(map(is_public, addresses)):
            raise UserError(f"URLs must lead to public addresses: {host!r} does not")
        # The Host header and the name in the certificate remain the URL's.
        extensions = {**request.extensions, "sni_hostname": host}
        target = url.copy_with(host=addresses[0])
        return super().handle_request(httpx.Request("GET", target, headers=request.headers, extensions=extensions))


def download(url: str, largest: int, seconds: float = SECONDS) -> bytes:
    """Download a file of at most ``largest`` bytes within a time limit. Follows redirects, whose addresses are checked,
    too. Raises ``UserError``: another scheme, an address that is not public, a server error, a file above the size
    limit, or a timeout."""
    end = clock() + seconds
    transport = _PublicOnly(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
    with httpx.Client(transport=transport, trust_env=False, headers=_HEADERS) as client:
        try:
            request = client.build_request("GET", url)
        except (httpx.InvalidURL, UnicodeError):
            raise UserError(f"URLs must be valid: got {url[:200]!r}") from None
        host = request.url.host
        try:
            for _ in range(REDIRECTS + 1):
                request.extensions["timeout"] = httpx.Timeout(max(end - clock(), 0.01)).as_dict()
                with closing(client.send(request, stream=True)) as response:
                    if response.next_request is None:
                        return _content(response, largest, end)
                    request = response.next_request
                    host = request.url.host
        except httpx.TimeoutException:
            raise UserError(f"downloads must end within {seconds:g} s: {host!r} took longer") from None
        except httpx.HTTPError as error:
            raise UserError(f"cannot download from {host!r}: {type(error).__name__}") from None
    raise UserError(f"URLs must have at most {REDIRECTS} redirects: got more")


def _content(response: httpx.Response, largest: int, end: float) -> bytes:
    if response.status_code != 200:
        raise UserError(
            f"expected a file at the URL, received status {response.status_code} from {response.url.host!r}"
        )
    content = bytearray()
    for chunk in response.iter_raw():
        content += chunk
        if len(content) > largest:
            raise UserError(f"a downloaded file must have at most {largest} bytes: received more")
        if clock() > end:
            raise httpx.ReadTimeout("")
    return bytes(content)


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# Not globally reachable according to IANA's registries, but global in some Python versions.
_OTHERS = [
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")
]


def is_public(address: str) -> bool:
    """Whether an IP address is globally reachable unicast.

    IPv4-mapped and NAT64 addresses are judged by their embedded IPv4 address; 6to4 and Teredo are refused.
    """
    found = ipaddress.ip_address(address.partition("%")[0])  # without a scope such as %eth0
    if isinstance(found, ipaddress.IPv6Address):
        embedded = found.ipv4_mapped
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
        if found not in _GLOBAL_UNICAST:
            return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _OTHERS)
