"""One request of a program to the web, hop by hop, and the body that comes back.

Owns what a request may say, how a redirect changes it, and that a body, compressed or not, is never larger than was
asked for. It resolves and connects nothing, and knows no policy: that is `weft.programs.network.client`, which calls
it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpcore
import httpx

from weft.abi.errors import InvalidRequest, NetworkFailed
from weft.programs.network.allow_list import DEFAULT_PORTS, literal, plain_host
from weft.programs.network.meter import HttpMeter

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
MAX_URL_CHARS = 8192
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
"""Of the names and values of a request together. Those of an answer are bounded by the HTTP library, to 100 KiB."""
MAX_BODY_BYTES = 8 << 20
"""Of an answer, at most; a program may ask for less."""
MAX_TIMEOUT_S = 600.0

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that say how the connection is used."""
_SECRET = frozenset({"authorization", "cookie"})
"""Headers that do not follow a redirect to another origin."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses that name another place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """What a program asks for."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    timeout_s: float = 30.0
    """For all of it, redirects included."""
    max_bytes: int = 1 << 20
    """Of the answer's body, as sent and as decompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """The response, of any status."""

    status: int
    headers: dict[str, str]
    """Names in lower case; values of a name that came several times are joined with commas."""
    url: str
    """Where it came from, after redirects."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Hop:
    """A request, to one place."""

    method: str
    url: httpx.URL
    headers: Mapping[str, str]
    body: bytes
    num_redirects: int = 0

    @property
    def scheme(self) -> str:
        """The scheme, `http` or `https`."""
        return self.url.scheme

    @property
    def host(self) -> str:
        """The host as allow-lists write it."""
        return plain_host(self.url.raw_host.decode("ascii"))

    @property
    def host_of_url(self) -> str:
        """The host as URLs write it, with an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def port(self) -> int:
        """Written, or the scheme's own."""
        return self.url.port or DEFAULT_PORTS[self.scheme]

    @property
    def origin(self) -> str:
        """For messages: paths may have secrets in them."""
        return f"{self.scheme}://{self.host_of_url}:{self.port}"

    def raw_url(self) -> httpcore.URL:
        """The URL in the form of the HTTP library."""
        # The host as it was checked: with a trailing dot it is the same name.
        return httpcore.URL(
            scheme=self.scheme.encode(), host=self.host.encode(), port=self.port, target=self.url.raw_path
        )

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The program's, and those that are ours to set."""
        host = self.host_of_url
        if self.port != DEFAULT_PORTS[self.scheme]:
            host = f"{host}:{self.port}"
        ours = {"host": host, "accept-encoding": "gzip, deflate"}
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            ours["content-length"] = str(len(self.body))
        return [(name.encode(), value.encode("latin-1")) for name, value in {**ours, **self.headers}.items()]

    def redirected(self, status: int, location: str) -> Hop:
        """As browsers do: a form that was posted is not posted again, except where the status says so."""
        try:
            url = _parse_url(str(self.url.join(location)))
        except (InvalidRequest, httpx.InvalidURL, ValueError) as error:
            raise NetworkFailed(
                f"{self.origin} redirects to an address that is not a URL for programs: {error}"
            ) from error
        method, body, headers = self.method, self.body, dict(self.headers)
        if (status == 303 and method != "HEAD") or (status in (301, 302) and method == "POST"):
            method, body = "GET", b""
            headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
        hop = Hop(method, url, headers, body, self.num_redirects + 1)
        if hop.origin == self.origin:
            return hop
        kept = {name: value for name, value in headers.items() if name not in _SECRET}
        return Hop(method, url, kept, body, self.num_redirects + 1)


def first_hop(request: HttpRequest) -> Hop:
    """The request, checked. Raises `InvalidRequest`."""
    if request.method not in METHODS:
        raise InvalidRequest(f"the method is one of {', '.join(sorted(METHODS))}, got {request.method!r}", "method")
    if not 0 < request.timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s is above 0, at most {MAX_TIMEOUT_S:g}, got {request.timeout_s}", "timeout_s")
    if not 0 <= request.max_bytes <= MAX_BODY_BYTES:
        raise InvalidRequest(f"max_bytes is from 0 to {MAX_BODY_BYTES}, got {request.max_bytes}", "max_bytes")
    headers = {name.lower(): value for name, value in request.headers.items()}
    if len(headers) > MAX_HEADERS or sum(len(n) + len(v) for n, v in headers.items()) > MAX_HEADER_BYTES:
        raise InvalidRequest(f"a request has at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes", "headers")
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidRequest(f"the header {name!r} has a name or a value that cannot be sent", "headers")
        if name in _OURS or name.startswith("proxy-"):
            raise InvalidRequest(f"the header {name} is not a program's to set", "headers")
    return Hop(request.method, _parse_url(request.url), headers, request.body)


def _parse_url(text: str) -> httpx.URL:
    if len(text) > MAX_URL_CHARS:
        raise InvalidRequest(f"a URL has at most {MAX_URL_CHARS} characters", "url")
    try:
        url = httpx.URL(text)
        host, port = url.raw_host, url.port
    except (httpx.InvalidURL, ValueError, UnicodeError) as error:
        raise InvalidRequest(f"the URL cannot be used: {error}", "url") from error
    plain = plain_host(host.decode("ascii"))
    if url.scheme not in DEFAULT_PORTS or not (_HOST.fullmatch(plain) or literal(plain)):
        raise InvalidRequest("a URL begins with http:// or https:// and names a host", "url")
    if url.userinfo:
        raise InvalidRequest("a URL has no user and password in it; send an authorization header instead", "url")
    if port is not None and not 0 < port < 65536:
        raise InvalidRequest(f"a URL has a port from 1 to 65535, got {port}", "url")
    return url


async def read_body(response: httpcore.Response, headers: Mapping[str, str], max_bytes: int, meter: HttpMeter) -> bytes:
    """The body, decompressed. Neither what comes nor what it becomes is ever larger than `max_bytes`."""
    too_long = f"the answer is longer than the {max_bytes} bytes asked for (max_bytes)"
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise NetworkFailed(too_long)
    inflate = _decompressor(headers.get("content-encoding", ""))
    body = bytearray()
    num_received = 0
    async for chunk in response.aiter_stream():
        await meter.piece()
        num_received += len(chunk)
        # One byte more than allowed is enough to know.
        room = max_bytes + 1 - len(body)
        body += chunk[:room] if inflate is None else inflate(chunk, room)
        if num_received > max_bytes or len(body) > max_bytes:
            raise NetworkFailed(too_long)
    return bytes(body)


def _decompressor(encoding: str) -> Callable[[bytes, int], bytes] | None:
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise NetworkFailed(f"the answer is compressed as {encoding[:40]!r}, which was not asked for")
    # gzip, or zlib, whichever its first bytes say.
    machine = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def inflate(chunk: bytes, room: int) -> bytes:
        return machine.decompress(machine.unconsumed_tail + chunk, room)

    return inflate
