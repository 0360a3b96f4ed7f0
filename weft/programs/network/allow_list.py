"""Entries of a network allow-list: which hosts, ports and schemes each allows, and whether one allows all of another.

    example.com                 that host, http on port 80 and https on 443
    example.com:8443            that host and port, http or https
    https://example.com:8443    only so
    *.example.com               every host below it, not itself; with a port or a scheme as above
    *                           every host; with a port or a scheme as above
    10.1.2.3:8000  [::1]:8000   an address

Owns how they are read. Pure; it resolves nothing. `weft.programs.network.client` asks, `weft.programs.quota.limits`
intersects.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from weft.abi.errors import InvalidRequest

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
DEFAULT_PORTS = {"http": 80, "https": 443}
_ENTRY = re.compile(r"(?:(https?)://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.*-]+)(?::(\d{1,5}))?", re.ASCII)
_MAX_ENTRY = 300


class HostPattern(NamedTuple):
    """One parsed entry of an allow-list."""

    host: str
    """Lower case, without brackets, a trailing dot, or the `*` of a wildcard."""
    below: bool
    """A wildcard: hosts below `host`, or every host where it is empty."""
    ways: frozenset[tuple[str, int]]
    """Schemes with ports."""

    @property
    def address(self) -> IpAddress | None:
        """Where the entry is a literal address."""
        return None if self.below else literal(self.host)

    def allows(self, scheme: str, host: str, port: int) -> bool:
        """Whether a request is what the entry names. `host` as `plain_host` gives it."""
        return (scheme, port) in self.ways and self._has(host)

    def _has(self, host: str) -> bool:
        if not self.below:
            return host == self.host
        return not self.host or host.endswith("." + self.host)


@functools.lru_cache(1024)
def parse(entry: str) -> HostPattern:
    """Read an entry. Raises `InvalidRequest`."""
    found = _ENTRY.fullmatch(entry) if len(entry) <= _MAX_ENTRY else None
    wildcard = found is not None and (found[2] == "*" or found[2].startswith("*."))
    if found is None or "*" in found[2][1 if wildcard else 0 :]:
        raise InvalidRequest(
            f"{entry[:_MAX_ENTRY]!r} names no host: write host, host:port, *.domain, https://host:port or an address "
            "(names with other than ASCII letters in their xn-- form)",
            "network",
        )
    scheme, port = found[1], None if found[3] is None else int(found[3])
    if port is not None and not 0 < port < 65536:
        raise InvalidRequest(f"{entry!r} has a port that cannot be", "network")
    schemes = DEFAULT_PORTS if scheme is None else {scheme: DEFAULT_PORTS[scheme]}
    ways = frozenset((name, default if port is None else port) for name, default in schemes.items())
    host = found[2][2:] if wildcard else found[2]
    return HostPattern(plain_host(host), wildcard, ways)


def covered(entry: str, by: str) -> bool:
    """Whether `by` allows everything that `entry` does."""
    inner, outer = parse(entry), parse(by)
    if not inner.ways <= outer.ways:
        return False
    if inner.below:
        # Below a domain's own subdomains is below the domain.
        return outer.below and (not outer.host or inner.host == outer.host or inner.host.endswith("." + outer.host))
    return outer._has(inner.host)


def find(entries: Iterable[str], scheme: str, host: str, port: int) -> list[HostPattern]:
    """The entries that allow a request."""
    return [entry for entry in map(parse, entries) if entry.allows(scheme, host, port)]


def plain_host(host: str) -> str:
    """Lower case, without brackets and one trailing dot; an address in its one canonical form."""
    host = host.strip("[]").lower().removesuffix(".")
    address = literal(host)
    return host if address is None else str(address)


def literal(host: str) -> IpAddress | None:
    """The address that a host is written as, where it is one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
