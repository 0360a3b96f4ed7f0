"""What programs may reach over HTTP, against a real server on this machine and name servers that lie."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

import pytest

from tests.programs.help import settle
from tests.programs.sessions import Host, obj
from weft.abi.errors import InvalidRequest, NetworkDenied, NetworkFailed
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.programs.network import client as module
from weft.programs.network.allow_list import covered, parse
from weft.programs.network.client import Network, is_public
from weft.programs.network.requests import METHODS, HttpRequest, HttpResponse
from weft.programs.quota.limits import Limits
from weft.testing.fake_engine import FakeEngine

Answer = Callable[[list[bytes], bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers requests as a test says, and remembers them."""

    def __init__(self, answer: bytes | Answer = OK):
        self.answer = answer
        self.requests: list[bytes] = []
        self.port = 0

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            self.requests.append(head + body)
            if callable(self.answer):
                await self.answer(lines, body, writer)
            else:
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def names(**addresses: str | Sequence[str]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """A name server; an address that is a list is a new answer each time."""
    lists = {name.replace("_", "."): iter(found) for name, found in addresses.items() if not isinstance(found, str)}

    async def resolve(host: str, port: int) -> Sequence[str]:
        if host in lists:
            return [next(lists[host])]
        found = addresses.get(host.replace(".", "_"))
        if found is None:
            raise OSError(f"no such host {host}")
        return str(found).split()

    return resolve


async def fetch(network: Network, url: str, allow: Sequence[str] = ("*",), **changes: object) -> HttpResponse:
    entries = [*allow] if "*" not in allow else [*allow, f"*:{url.rpartition(':')[2].partition('/')[0]}"]
    entries = [entry for entry in entries if entry == "*" or not entry.startswith("*:") or entry[2:].isdecimal()]
    return await network.fetch(HttpRequest(url=url, **changes), entries)


def with_server(
    test: Callable[[Server, Network], Awaitable[None]], answer: bytes | Answer = OK, *allow: str, **resolve: object
) -> None:
    async def body() -> None:
        async with Server(answer) as server:
            network = Network(
                [f"127.0.0.1:{server.port}", *(entry.replace("PORT", str(server.port)) for entry in allow)],
                resolve=names(**resolve),
            )
            try:
                await test(server, network)
            finally:
                await network.close()

    asyncio.run(body())


def test_a_request_goes_out_and_comes_back() -> None:
    async def test(server: Server, network: Network) -> None:
        answer = await fetch(
            network, f"{server.origin}/a/b?c=d#e", method="POST", body=b"hello", headers={"X-One": "1"}
        )
        assert (answer.status, answer.body) == (200, b"ok")
        assert answer.headers["content-length"] == "2"
        [request] = server.requests
        assert request.startswith(b"POST /a/b?c=d HTTP/1.1\r\n")
        assert b"x-one: 1\r\n" in request
        assert f"host: 127.0.0.1:{server.port}\r\n".encode() in request
        assert request.endswith(b"\r\n\r\nhello")

    with_server(test)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods(method: str) -> None:
    async def test(server: Server, network: Network) -> None:
        answer = await fetch(network, server.origin, method=method)
        assert answer.body == (b"" if method == "HEAD" else b"ok")
        assert server.requests[0].startswith(method.encode() + b" / ")

    with_server(test)


def test_both_lists_must_have_it() -> None:
    async def test(server: Server, network: Network) -> None:
        for allow in (
            [],
            ["example.com"],
            ["127.0.0.1"],
            [f"127.0.0.1:{server.port + 1}"],
            [f"https://127.0.0.1:{server.port}"],
        ):
            with pytest.raises(NetworkDenied, match="this program"):
                await network.fetch(HttpRequest(url=server.origin), allow)
        none = Network()
        with pytest.raises(NetworkDenied, match="this server"):
            await none.fetch(HttpRequest(url=server.origin), [f"127.0.0.1:{server.port}"])
        assert server.requests == []
        assert (await network.fetch(HttpRequest(url=server.origin), [f"http://127.0.0.1:{server.port}"])).status == 200

    with_server(test)


def test_a_name_at_a_private_address_is_refused_whatever_is_allowed() -> None:
    async def test(server: Server, network: Network) -> None:
        for address in (
            "127.0.0.1",
            "10.0.0.1",
            "169.254.169.254",
            "::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::1",
            "fd00:ec2::254",
            "fe80::1%eth0",
        ):
            own = Network([f"*:{server.port}", f"127.0.0.1:{server.port}"], resolve=names(evil_com=address))
            with pytest.raises(NetworkDenied, match="public internet"):
                await fetch(own, f"http://evil.com:{server.port}/")
            await own.close()
        assert server.requests == []

    with_server(test)


def test_written_addresses_need_the_operator_s_own_entry() -> None:
    async def test(server: Server, network: Network) -> None:
        wide = Network([f"*:{server.port}"])
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::1]", "0.0.0.0", "169.254.169.254", "10.0.0.1"):
            with pytest.raises(NetworkDenied, match="public internet"):
                await fetch(wide, f"http://{host}:{server.port}/")
        # Other ways to write the same address are names to us, and resolved like names.
        for host in ("2130706433", "0x7f000001", "127.1", "localhost"):
            with pytest.raises((NetworkDenied, NetworkFailed)):
                await fetch(wide, f"http://{host}:{server.port}/")
        await wide.close()
        assert server.requests == []
        assert (await fetch(network, server.origin)).status == 200

    with_server(test)


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server whose second answer is private finds nobody who asks a second time."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["93.184.216.34"] if len(asked) == 1 else ["127.0.0.1"]

    class Recorder(module.httpcore.AnyIOBackend):
        connected: list[tuple[str, int]] = []  # noqa: RUF012

        async def connect_tcp(self, host: str, port: int, *rest: object, **options: object) -> object:
            self.connected.append((host, port))
            raise module.httpcore.ConnectError("nobody there")

    monkeypatch.setattr(module.httpcore, "AnyIOBackend", Recorder)

    async def test() -> None:
        network = Network(["rebind.com"], resolve=rebinding)
        with pytest.raises(NetworkFailed, match="nobody there"):
            await network.fetch(HttpRequest(url="http://rebind.com/"), ["*"])
        assert asked == ["rebind.com"]
        assert Recorder.connected == [("93.184.216.34", 80)]
        with pytest.raises(NetworkDenied):
            await network.fetch(HttpRequest(url="http://rebind.com/"), ["*"])
        assert len(Recorder.connected) == 1
        await network.close()

    asyncio.run(test())


def test_of_several_addresses_only_public_ones_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []

    class Recorder(module.httpcore.AnyIOBackend):
        async def connect_tcp(self, host: str, port: int, *rest: object, **options: object) -> object:
            connected.append(host)
            raise module.httpcore.ConnectError("nobody there")

    monkeypatch.setattr(module.httpcore, "AnyIOBackend", Recorder)

    async def test() -> None:
        network = Network(["many.com"], resolve=names(many_com="10.0.0.1 93.184.216.34 ::1 2606:2800:220::1"))
        with pytest.raises(NetworkFailed):
            await network.fetch(HttpRequest(url="http://many.com/"), ["many.com"])
        assert connected == ["93.184.216.34", "2606:2800:220::1"]
        await network.close()

    asyncio.run(test())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_as_browsers_do(status: int) -> None:
    async def answer(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
        if b" /there " in lines[0]:
            writer.write(OK)
        else:
            writer.write(b"HTTP/1.1 %d Go\r\nlocation: there\r\ncontent-length: 0\r\n\r\n" % status)

    async def test(server: Server, network: Network) -> None:
        answer = await fetch(network, f"{server.origin}/here", method="POST", body=b"x", headers={"cookie": "c"})
        assert answer.url == f"{server.origin}/there"
        again = server.requests[1]
        assert again.startswith(b"POST" if status in (307, 308) else b"GET")
        assert again.endswith(b"\r\n\r\nx" if status in (307, 308) else b"\r\n\r\n")
        assert b"cookie: c" in again

    with_server(test, answer)


@pytest.mark.parametrize(
    "target",
    [
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://localhost:{other}/",
        "http://127.0.0.1:{other}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "//other.com/",
    ],
)
def test_redirects_are_checked_like_requests(target: str) -> None:
    async def body() -> None:
        async with Server() as other:

            async def answer(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
                where = target.format(other=other.port, port=server.port)
                writer.write(f"HTTP/1.1 302 Go\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode())

            async with Server(answer) as server:
                network = Network([f"127.0.0.1:{server.port}", "*"], resolve=names(localhost="127.0.0.1"))
                with pytest.raises(NetworkDenied):
                    await fetch(network, server.origin, [f"127.0.0.1:{server.port}"])
                await network.close()
            assert other.requests == []

    asyncio.run(body())


def test_redirects_end_and_secrets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with Server() as other:

            async def loop(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
                away = b" /away " in lines[0]
                where = f"http://127.0.0.1:{other.port}/" if away else "/again"
                writer.write(f"HTTP/1.1 302 Go\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode())

            async with Server(loop) as server:
                allow = [f"127.0.0.1:{server.port}", f"127.0.0.1:{other.port}"]
                network = Network(allow)
                with pytest.raises(NetworkFailed, match="redirects"):
                    await network.fetch(HttpRequest(url=server.origin), allow)
                assert len(server.requests) == module.MAX_REDIRECTS + 1
                headers = {"Authorization": "secret", "X-Kept": "1"}
                await network.fetch(HttpRequest(url=f"{server.origin}/away", headers=headers), allow)
                assert b"authorization: secret" in server.requests[-1]
                assert b"secret" not in other.requests[0]
                assert b"x-kept: 1" in other.requests[0]
                await network.close()

    asyncio.run(body())


def test_long_answers_are_cut_off() -> None:
    async def endless(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
        if b" /declared " in lines[0]:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(1000))
            await writer.drain()

    async def test(server: Server, network: Network) -> None:
        for path in ("/declared", "/endless"):
            with pytest.raises(NetworkFailed, match="longer than the 1000 bytes"):
                await fetch(network, server.origin + path, max_bytes=1000)

    with_server(test, endless)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_decompression_bomb_does_not_go_off(encoding: str) -> None:
    def packed(data: bytes) -> bytes:
        return gzip.compress(data) if encoding == "gzip" else zlib.compress(data)

    async def answer(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
        data = packed(b"fine" if b" /fine " in lines[0] else bytes(50 << 20))
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def test(server: Server, network: Network) -> None:
        with pytest.raises(NetworkFailed, match="longer"):
            await fetch(network, f"{server.origin}/bomb", max_bytes=1 << 20)
        assert (await fetch(network, f"{server.origin}/fine")).body == b"fine"

    with_server(test, answer)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 2\r\n\r\nok", "br"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok", "decompressed"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000 + b"\r\n", "failed"),
        (b"nonsense\r\n\r\n", "failed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "failed"),
        (b"HTTP/1.1 302 Go\r\nlocation: http://[\r\ncontent-length: 0\r\n\r\n", "not a URL"),
        (b"", "failed"),
    ],
)
def test_bad_answers_are_failures(head: bytes, message: str) -> None:
    async def test(server: Server, network: Network) -> None:
        with pytest.raises(NetworkFailed, match=message):
            await fetch(network, server.origin)

    with_server(test, head)


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    async def silent(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
        await asyncio.Event().wait()

    async def test(server: Server, network: Network) -> None:
        with pytest.raises(NetworkFailed, match=r"within 0\.05 seconds"):
            await fetch(network, server.origin, timeout_s=0.05)

    with_server(test, silent)


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "ftp://example.com/"},
        {"url": "file:" + "///etc/passwd"},
        {"url": "http://user:word@example.com/"},
        {"url": "http:///"},
        {"url": "http://example.com:99999/"},
        {"url": "http://exa mple.com/"},
        {"url": "http://x/" + "y" * 9000},
        {"url": "nothing"},
        {"method": "CONNECT"},
        {"method": "get"},
        {"headers": {"Host": "other.com"}},
        {"headers": {"Transfer-Encoding": "chunked"}},
        {"headers": {"Proxy-Authorization": "x"}},
        {"headers": {"x": "a\r\ny: b"}},
        {"headers": {"x y": "a"}},
        {"headers": {"x": "€"}},
        {"headers": {f"x{i}": "" for i in range(200)}},
        {"headers": {"x": "y" * 20_000}},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"timeout_s": 1e9},
        {"max_bytes": -1},
        {"max_bytes": 1 << 30},
    ],
)
def test_what_is_no_request_is_refused(changes: dict[str, object]) -> None:
    async def test() -> None:
        network = Network(["*"], resolve=names())
        with pytest.raises(InvalidRequest):
            await network.fetch(HttpRequest(**{"url": "http://example.com/", **changes}), ["*"])

    asyncio.run(test())


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("64:ff9b::808:808", True),
        ("::ffff:8.8.8.8", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("100.100.100.200", False),
        ("127.0.0.53", False),
        ("168.63.129.16", False),
        ("169.254.169.254", False),
        ("172.16.0.1", False),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("192.168.1.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::1", False),
        ("2001::1", False),
        ("2001:db8::1", False),
        ("2002:808:808::1", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("fe80::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


def test_entries() -> None:
    allowed = {
        "example.com": ["http://example.com:80", "https://example.com:443"],
        "Example.COM.": ["http://example.com:80", "https://example.com:443"],
        "example.com:8443": ["http://example.com:8443", "https://example.com:8443"],
        "https://example.com": ["https://example.com:443"],
        "*.example.com": ["http://a.example.com:80", "https://a.example.com:443"],
        "*": [
            "http://example.com:80",
            "http://a.example.com:80",
            "https://a.example.com:443",
            "https://example.com:443",
        ],
        "[::1]:80": ["http://::1:80"],
        "[0:0::1]:80": ["http://::1:80"],
    }
    everything = {way for ways in allowed.values() for way in ways} | {"http://badexample.com:80", "http://com:80"}
    for entry, ways in allowed.items():
        found = set()
        for way in everything:
            scheme, rest = way.split("://")
            host, _, port = rest.rpartition(":")
            if parse(entry).allows(scheme, host, int(port)):
                found.add(way)
        assert found == set(ways) | (
            {"http://badexample.com:80", "http://com:80", "http://::1:80"} if entry == "*" else set()
        ) - ({"https://example.com:8443"} if entry == "*" else set())
    for wrong in (
        "",
        "a b",
        "ftp://x",
        "http://",
        "x/path",
        "*x.com",
        "x.*.com",
        "a@b",
        "x:0",
        "x:70000",
        "über.de",
        "x\n",
    ):
        with pytest.raises(InvalidRequest):
            parse(wrong)


def test_a_child_s_list_is_within_its_parent_s() -> None:
    assert covered("a.example.com", "*.example.com")
    assert covered("*.b.example.com", "*.example.com")
    assert covered("https://x.com", "x.com")
    assert covered("x.com", "*")
    assert not covered("x.com", "https://x.com")
    assert not covered("x.com:8080", "x.com")
    assert not covered("*.example.com", "a.example.com")
    assert not covered("*.com", "*.example.com")
    assert not covered("*", "*.com")
    parent = Limits(network=["*.example.com", "x.com"])
    assert Limits(network=["x.com", "y.com", "a.example.com"]).within(parent).network == ["x.com", "a.example.com"]


def test_programs_reach_the_web_through_their_session() -> None:
    async def body() -> None:
        async with Server() as server:

            async def test(host: Host) -> None:
                program = host.program(Limits(network=[f"127.0.0.1:{server.port}"]))
                about, answer = await program.result(Op.HTTP, obj({"method": "GET", "url": server.origin}), b"")
                assert answer == b"ok"
                assert json.loads(about)["status"] == 200
                assert json.loads(about)["headers"]["content-length"] == "2"
                deaf = host.program()
                assert (await deaf.error(Op.HTTP, obj({"url": server.origin}), b""))[0] == "network_denied"
                assert (await program.error(Op.HTTP, b"{}", b""))[0] == "invalid_request"
                assert program.session.usage().http_requests == 1
                for turns in range(8):
                    call = program.ask(Op.HTTP, obj({"url": server.origin}), b"")
                    await settle(turns)
                    program.say(Op.CANCEL, call)
                    event = await program.end_of(call)
                    assert event.blobs[0] == b"cancelled" or event.blobs[1] == b"ok"

            made = Host(_engine(), allow=[f"127.0.0.1:{server.port}"])
            try:
                await test(made)
            finally:
                await made.close()

    asyncio.run(body())


def _engine():  # type: ignore[no-untyped-def]
    from weft.testing.fake_engine import FakeEngine

    return FakeEngine()


async def flood(writer: asyncio.StreamWriter, piece: bytes, count: int) -> None:
    """Send pieces until the other side has had enough."""
    for _ in range(count):
        writer.write(piece * 1000)
        await writer.drain()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n", "sent more than"),
        (b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n", "sent more than"),
        (b"1\r\nx\r\n", "pieces"),
        (b"1;" + b"e" * 300 + b"\r\nx\r\n", "sent more than"),
    ],
    ids=["interim answers", "other interim answers", "single bytes", "extensions of pieces"],
)
def test_an_answer_without_end_is_given_up_and_others_have_their_turns(answer: bytes, says: str) -> None:
    """Bounded by what was sent, not by time, and the loop goes round meanwhile."""

    async def body() -> None:
        async def endless(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
            if answer.startswith(b"1"):
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            await flood(writer, answer, 10_000)

        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with Server(endless) as server:
            network = Network([f"127.0.0.1:{server.port}"])
            counting = asyncio.create_task(others())
            with pytest.raises(NetworkFailed, match=says):
                await fetch(network, f"{server.origin}/", allow=[f"127.0.0.1:{server.port}"], timeout_s=600)
            counting.cancel()
            await network.close()
        # At least one turn for every 8 KiB, and for every 32 pieces.
        assert turns >= min((1 << 20) // (8 << 10), 32768 // 32)

    asyncio.run(body())


def test_small_pieces_within_the_bounds_are_an_answer() -> None:
    async def body() -> None:
        async def pieces(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n")
            await writer.drain()

        async with Server(pieces) as server:
            network = Network([f"127.0.0.1:{server.port}"])
            answer = await fetch(network, f"{server.origin}/", allow=[f"127.0.0.1:{server.port}"])
            assert answer.body == b"x" * 2000
            await network.close()

    asyncio.run(body())


def test_requests_beyond_those_at_once_wait_in_order_and_are_charged() -> None:
    """300 of a megabyte each, as the guide gathers them."""

    async def body() -> None:
        waiting, most = 0, 0

        async def slow(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            await settle(10)
            waiting -= 1
            writer.write(OK)
            await writer.drain()

        async with Server(slow) as server:
            entry = f"127.0.0.1:{server.port}"
            host = Host(FakeEngine(), allow=[entry])
            program = host.program(Limits(network=[entry]))
            about = obj({"url": f"{server.origin}/", "timeout_s": 600})
            calls = [program.ask(Op.HTTP, about, b"") for _ in range(300)]
            for call in calls:
                assert (await program.end_of(call)).kind == EventKind.RESULT
            assert most <= 64
            assert program.outlet.cpu_s > 0
            await host.close()

    asyncio.run(body())
