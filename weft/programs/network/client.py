"""HTTP for programs: what they may reach, and how a request is kept from doing harm.

Owns the policy. A request is allowed by *both* the operator's list and the run's (`weft.programs.network.allow_list`);
without entries nothing is. A name is resolved here, once a connection, and the connection goes to exactly an address
that was checked: an answer of the name server that changes a moment later changes nothing. Addresses that are not of
the public internet (loopback, private, link-local, multicast, reserved, the metadata services of clouds, and IPv6 forms
that contain such a one) are refused, except for one that the operator has listed as a literal address and that the
request names literally. Redirects are checked like requests of their own.

A tenant has a share of the connections, and of the threads that resolve names (`weft.programs.network.resolver`): what
it asks beyond waits, and only for its own.

It knows nothing of programs or the wire. Called by sessions; used from one event loop. The environment's proxies are
not used: what they would reach cannot be checked here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from weakref import WeakValueDictionary

import httpcore

from weft.abi.errors import InvalidRequest, NetworkDenied, NetworkFailed
from weft.programs.network.allow_list import DEFAULT_PORTS, IpAddress, find, literal, parse
from weft.programs.network.meter import HttpMeter, MeteredStream, current_meter
from weft.programs.network.requests import REDIRECTS, Hop, HttpRequest, HttpResponse, first_hop, read_body
from weft.programs.network.resolver import Resolver

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 256
TENANT_CONNECTIONS = 64
"""Requests of one tenant's programs at once; more wait."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a host, in order of preference. Raises `OSError`."""

_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols' own, and a cloud's metadata service
            "192.88.99.0/24",  # relays of 6to4
            "168.63.129.16/32",  # a metadata service with an address of the public internet
            "2001::/23",  # Teredo and other protocols' own
            "2001:db8::/32",
            "2002::/16",  # 6to4: goes to the IPv4 address inside
            "3fff::/20",
        ),
    )
)
_TENANT = re.compile(r"([A-Za-z0-9._@-]{1,64})=(.*)", re.DOTALL)
_asking: ContextVar[str] = ContextVar("tenant")
"""On whose behalf a connection is made: the HTTP library makes it within the task that asks."""
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Network:
    """The operator's policy, and the connections of all programs."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        *,
        tenant_connections: Callable[[str], int] = lambda tenant: TENANT_CONNECTIONS,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        """An entry of `allow` is for all tenants, or for one: `NAME=ENTRY`. `tenant_connections`: how many requests a
        tenant may have under way. `tls`: which certificates are trusted, by default the system's. Raises as `by_tenant`
        does."""
        self._allow, self._allow_of = by_tenant(allow)
        self._resolver: Resolver | None = None
        self._backend = _CheckedBackend(resolve or self._resolve, self._is_listed)
        self._tls = tls
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._tenant_connections = tenant_connections
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant; there for as long as it has requests under way."""

    def of(self, tenant: str) -> TenantNetwork:
        """What programs of this tenant reach."""
        return TenantNetwork(self, tenant)

    async def fetch(self, request: HttpRequest, allow: Iterable[str], tenant: str = "") -> HttpResponse:
        """Send a request on behalf of a run with this list, of this tenant.

        Raises `InvalidRequest` for a request that cannot be sent, `NetworkDenied` for a target that is not allowed (of
        a redirect too), and `NetworkFailed` for a request that did not succeed.
        """
        hop = first_hop(request)
        allow = tuple(allow)
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = asyncio.Semaphore(self._tenant_connections(tenant))
        before, meter = _asking.set(tenant), HttpMeter(request.max_bytes)
        metered = current_meter.set(meter)
        try:
            self._check(hop, allow, tenant)
            async with asyncio.timeout(request.timeout_s), share:
                for _ in range(MAX_REDIRECTS + 1):
                    self._check(hop, allow, tenant)
                    answer = await self._send(hop, request.max_bytes, meter)
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
        finally:
            _asking.reset(before)
            current_meter.reset(metered)
        raise NetworkFailed(f"more than {MAX_REDIRECTS} redirects, the last one to {hop.origin}")

    async def close(self) -> None:
        """Close all pooled connections. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()
        if self._resolver is not None:
            self._resolver.close()
            self._resolver = None

    # ---- inside

    def _listed(self, tenant: str) -> tuple[str, ...]:
        return self._allow + self._allow_of.get(tenant, ())

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        if self._resolver is None:
            self._resolver = Resolver()
        return await self._resolver.resolve(_asking.get(""), host, port)

    def _check(self, hop: Hop, allow: tuple[str, ...], tenant: str) -> None:
        """Raise `NetworkDenied` unless both lists have it. Addresses are checked when it connects."""
        for whose, entries in (("this server", self._listed(tenant)), ("this program", allow)):
            if not find(entries, hop.scheme, hop.host, hop.port):
                way = "is redirected to" if hop.num_redirects else "goes to"
                raise NetworkDenied(
                    f"the request {way} {hop.origin}, which the allow-list of {whose} does not have; "
                    "it would have to name that host"
                )
        # Also where a connection is there already, which another tenant's list may have allowed.
        address = literal(hop.host)
        if address is not None and not is_public(address) and not self._is_listed(hop.host, hop.port):
            raise NetworkDenied(_not_public(hop.host))

    def _is_listed(self, host: str, port: int) -> bool:
        """Whether the operator has listed this literal address."""
        listed = self._listed(_asking.get(""))
        entries = [entry for scheme in DEFAULT_PORTS for entry in find(listed, scheme, host, port)]
        return any(entry.address is not None for entry in entries)

    async def _send(self, hop: Hop, max_bytes: int, meter: HttpMeter) -> HttpResponse | Hop:
        """The answer, or where it redirects to."""
        if self._pool is None:
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=self._tls,
                network_backend=self._backend,
                max_connections=MAX_CONNECTIONS,
                keepalive_expiry=5.0,
                retries=0,
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
            body = b"" if hop.method == "HEAD" else await read_body(response, headers, max_bytes, meter)
            return HttpResponse(status=response.status, headers=headers, url=str(hop.url), body=body)
        finally:
            await response.aclose()


class TenantNetwork:
    """`Network`, on behalf of one tenant."""

    def __init__(self, network: Network, tenant: str):
        self._network, self._tenant = network, tenant

    async def fetch(self, request: HttpRequest, allow: Iterable[str]) -> HttpResponse:
        """Send a request, as `Network.fetch` describes."""
        return await self._network.fetch(request, allow, self._tenant)


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
            raise NetworkDenied(_not_public(host))
        error: Exception = httpcore.ConnectError(f"{host} has no address")
        for ip in allowed:
            try:
                stream = await self._inner.connect_tcp(str(ip), port, timeout, local_address, socket_options)
                return MeteredStream(stream)
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


def _not_public(host: str) -> str:
    return (
        f"{host} is at an address that is not of the public internet; an operator who wants programs to reach it lists "
        "the address itself, with its port"
    )


def by_tenant(entries: Iterable[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """An operator's entries for all, and those for one tenant. Raises `InvalidRequest` for one that names no host, or
    `localhost`, which no request may reach by name."""
    shared: list[str] = []
    own: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        named = _TENANT.fullmatch(entry)
        host = entry if named is None else named[2]
        name = parse(host).host
        if name == "localhost" or name.endswith(".localhost"):
            raise InvalidRequest(f"{entry!r}: {_not_public(name)}", "network")
        if named is None:
            shared.append(host)
        else:
            own[named[1]] = (*own.get(named[1], ()), host)
    return tuple(shared), own
