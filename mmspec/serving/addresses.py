"""Loopback and public network addresses."""

from __future__ import annotations

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# What IANA's registries of special-purpose addresses do not call globally reachable. Python's own tables differ between
# its versions.
_SPECIAL = [
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
        *("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
]


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
    """Whether an IP address is globally reachable unicast, according to IANA's registries.

    IPv4-mapped addresses and those of NAT64 are judged by the IPv4 address in them; 6to4 and Teredo are refused.
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
    return not any(found in network for network in _SPECIAL if network.version == found.version)
