"""Download files from the public internet on behalf of clients."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from time import monotonic as clock
from typing import Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

import httpcore

from mmspec.errors import UserError
from mmspec.serving.addresses import is_public

SECONDS = 20.0
"""Time limit of a download, redirects included."""

REDIRECTS = 3

_REDIRECTED = (301, 302, 303, 307, 308)


class _PublicOnly(httpcore.SyncBackend):
    """Connects to public addresses only.

    A name is resolved once, and the connection goes to an address that was checked: a second look-up could have
    another outcome.
    """

    def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"cannot resolve {host!r}") from error
        addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
        if not all(map(is_public, addresses)):
            raise UserError(f"URLs must lead to public addresses: {host!r} does not")
        return super().connect_tcp(addresses[0], port, *args, **options)

    def connect_unix_socket(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        raise UserError("URLs must lead to public addresses: got a local socket")


def download(url: str, largest: int, seconds: float = SECONDS) -> bytes:
    """Download a file; redirects are followed, each checked like the first address.

    Args:
        url: http or https.
        largest: limit on the file's size, in bytes.
        seconds: time limit of the whole download.

    Raises:
        UserError: another scheme, an address that is not public, an error of the server, a file that is too large, or
            no answer in time.
    """
    end = clock() + seconds
    url = _ascii(url)
    with httpcore.ConnectionPool(network_backend=_PublicOnly()) as pool:
        for _ in range(REDIRECTS + 1):
            try:
                status, target, content = _get(pool, url, largest, end)
            except UserError:
                raise
            except (httpcore.TimeoutException, TimeoutError):
                raise UserError(f"downloads must end within {seconds:g} s: {_host(url)} took longer") from None
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, ValueError) as error:
                raise UserError(f"cannot download from {_host(url)}: {type(error).__name__}") from None
            if status in _REDIRECTED and target:
                url = _ascii(target)
            elif status == 200:
                return content
            else:
                raise UserError(f"expected a file at the URL, received status {status} from {_host(url)}")
    raise UserError(f"URLs must have at most {REDIRECTS} redirects: got more")


def _get(pool: httpcore.ConnectionPool, url: str, largest: int, end: float) -> tuple[int, str, bytes]:
    """Status, target of a redirect, and content."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"URLs must be http or https: got {urlsplit(url).scheme or 'none'}")
    host = urlsplit(url).netloc.rpartition("@")[2]
    headers = [("Host", host), ("User-Agent", "mmspec"), ("Accept-Encoding", "identity")]
    left = max(end - clock(), 0.01)
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), left)
    with pool.stream("GET", url, headers=headers, extensions={"timeout": timeout}) as response:
        named = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status != 200:
            target = named.get(b"location")
            return response.status, urljoin(url, target) if target else "", b""
        return 200, "", _limited(response.iter_stream(), largest, end)


def _ascii(url: str) -> str:
    """A URL with other characters than ASCII encoded as browsers do (RFC 3987, section 3.1)."""
    if url.isascii():
        return url
    try:
        parts = urlsplit(url)
        host = parts.netloc.encode("idna").decode()
    except ValueError:
        raise UserError(f"URLs must be valid: got {url[:200]!r}") from None
    path, query = (quote(part, safe="%/:=&?~+!$,;'@()*[]") for part in (parts.path, parts.query))
    return urlunsplit((parts.scheme, host, path, query, ""))


def _limited(chunks: Iterable[bytes], largest: int, end: float) -> bytes:
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > largest:
            raise UserError(f"a downloaded file must have at most {largest} bytes: received more")
        if clock() > end:
            raise TimeoutError
    return bytes(content)


def _host(url: str) -> str:
    try:
        return repr(urlsplit(url).hostname)
    except ValueError:
        return "an address that cannot be parsed"
