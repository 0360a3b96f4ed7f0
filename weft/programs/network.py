"""HTTP for programs: what they may reach, and how a request is kept from doing harm.

Owns the policy. A request is allowed by *both* the operator's list and the run's (`weft.programs.allowed`); without
entries nothing is. A name is resolved here, once a connection, and the connection goes to exactly an address that was
checked: an answer of the name server that changes a moment later changes nothing. Addresses that are not of the public
internet (loopback, private, link-local, multicast, reserved, the metadata services of clouds, and IPv6 forms that
contain such a one) are refused, except for one that the operator has listed as a literal address and that the request
names literally. Redirects are checked like requests of their own.

It knows nothing of programs or the wire. Called by sessions; used from one event loop. The environment's proxies are
not used: what they would reach cannot be checked here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpcore

from weft.core.errors import NetworkDenied, NetworkFailed
from weft.programs.allowed import DEFAULT_PORTS, IpAddress, find, literal, parse
from weft.programs.http import REDIRECTS, Hop, HttpRequest, HttpResponse, first_hop, read_body

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 256

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a host, in order of preference. Raises `OSError`."""

_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.88.99.0/24",  # relays of 6to4
            "168.63.129.16/32",  # a metadata service with an address of the public internet
            "2001::/23",  # Teredo and other protocols' own
            "2001:db8::/32",
            "2002::/16",  # 6to4: goes to the IPv4 address inside
            "3fff::/20",
        ),
    )
)
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Network:
    """The operator's policy, and the connections of all programs."""

    def __init__(self, allow: Iterable[str] = (), *, resolve: Resolve | None = None):
        """Raises `InvalidRequest` for an entry that names no host."""
        self._allow = tuple(allow)
        for entry in self._allow:
            parse(entry)
        self._backend = _CheckedBackend(resolve or _resolve, self._is_listed)
        self._pool: httpcore.AsyncConnectionPool | None = None

    async def fetch(self, request: HttpRequest, allow: Iterable[str]) -> HttpResponse:
        """Send a request on behalf of a run with this list.

        Raises `InvalidRequest` for what is no request, `NetworkDenied` for what is not allowed, on the way too, and
        `NetworkFailed` for what did not succeed.
        """
        hop = first_hop(request)
        allow = tuple(allow)
        try:
            async with asyncio.timeout(request.timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    self._check(hop, allow)
                    answer = await self._send(hop, request.max_bytes)
                    if isinstance(answer, HttpResponse):
                        return answer
                    hop = answer
        except TimeoutError as error:
            raise NetworkFailed(f"no complete answer from {hop.origin} within {request.timeout_s:g} seconds") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            detail = str(error) or type(error).__name__
            raise NetworkFailed(f"the request to {hop.origin} failed: {detail}") from error
        except zlib.error as error:
            raise NetworkFailed(f"the answer of {hop.origin} cannot be decompressed: {error}") from error
        raise NetworkFailed(f"more than {MAX_REDIRECTS} redirects, the last one to {hop.origin}")

    async def close(self) -> None:
        """Close idle connections. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    # ---- inside

    def _check(self, hop: Hop, allow: tuple[str, ...]) -> None:
        """Raise `NetworkDenied` unless both lists have it. Addresses are checked when it connects."""
        for whose, entries in (("this server", self._allow), ("this program", allow)):
            if not find(entries, hop.scheme, hop.host, hop.port):
                way = "is redirected to" if hop.num_redirects else "goes to"
                raise NetworkDenied(
                    f"the request {way} {hop.origin}, which the allow-list of {whose} does not have; "
                    "it would have to name that host"
                )

    def _is_listed(self, host: str, port: int) -> bool:
        """Whether the operator has listed this literal address."""
        entries = [entry for scheme in DEFAULT_PORTS for entry in find(self._allow, scheme, host, port)]
        return any(entry.address is not None for entry in entries)

    async def _send(self, hop: Hop, max_bytes: int) -> HttpResponse | Hop:
        """The answer, or where it redirects to."""
        if self._pool is None:
            self._pool = httpcore.AsyncConnectionPool(
                network_backend=self._backend, max_connections=MAX_CONNECTIONS, keepalive_expiry=5.0, retries=0
            )
        request = httpcore.Request(hop.method, hop.raw_url(), headers=hop.raw_headers(), content=hop.body)
        response = await self._pool.handle_async_request(request)
        try:
            headers: dict[str, str] = {}
            for raw_name, raw_value in response.headers:
                name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
                headers[name] = f"{headers[name]}, {value}" if name in headers else value
            if response.status in REDIRECTS and "location" in headers:
                return hop.redirected(response.status, headers["location"])
            body = b"" if hop.method == "HEAD" else await read_body(response, headers, max_bytes)
            return HttpResponse(status=response.status, headers=headers, url=str(hop.url), body=body)
        finally:
            await response.aclose()


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, and to nothing else."""

    def __init__(self, resolve: Resolve, is_listed: Callable[[str, int], bool]):
        self._resolve, self._is_listed = resolve, is_listed
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """To the first address of the host that may be reached and answers."""
        # httpcore gives the name on to TLS itself: the certificate and SNI are those of the name.
        address = literal(host)
        names = [host] if address is not None else await self._resolve(host, port)
        found = [ip for ip in map(literal, names) if ip is not None]
        allowed = [ip for ip in found if is_public(ip) or (ip == address and self._is_listed(host, port))]
        if found and not allowed:
            raise NetworkDenied(
                f"{host} is at an address that is not of the public internet; an operator who wants programs to reach "
                "it lists the address itself, with its port"
            )
        error: Exception = httpcore.ConnectError(f"{host} has no address")
        for ip in allowed:
            try:
                return await self._inner.connect_tcp(str(ip), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise NetworkDenied("programs reach no Unix sockets")

    async def sleep(self, seconds: float) -> None:
        """For the HTTP library's retries."""
        await asyncio.sleep(seconds)


def is_public(address: IpAddress) -> bool:
    """Whether an address is of the public internet, so that no machine of the operator's is meant by it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_V6:
            return False
    refused = any(address in network for network in _REFUSED if network.version == address.version)
    return address.is_global and not address.is_multicast and not address.is_reserved and not refused


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]
