"""Loopback and public network addresses."""

from __future__ import annotations

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_loopback(host: str) -> bool:
    """Whether a host to listen on is reached from this machine only; False for names, which may resolve to any
    address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def names(host: str) -> set[str] | None:
    """Names by which requests may call a server that listens on ``host``, as in the Host header without its port; None
    for any, if it is not on a loopback address."""
    return {"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else None


def url(host: str, port: int) -> str:
    """Address of a server that listens on ``host``, without a path."""
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet: not loopback, private, link-local, multicast or reserved.

    IPv6 addresses that embed an IPv4 address are judged by it.
    """
    found = ipaddress.ip_address(address.partition("%")[0])  # without a scope such as %eth0
    if isinstance(found, ipaddress.IPv6Address):
        embedded = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
    return found.is_global and not found.is_multicast and not found.is_reserved
