"""Which addresses a program may reach: allow lists, names that lie about addresses, and redirects to others."""

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address

import pytest

from tests.programs.network.help import Server, fetch, names, with_server
from weft.abi.errors import InvalidRequest, NetworkDenied, NetworkFailed
from weft.programs.network import client as module
from weft.programs.network.allow_list import covered, parse
from weft.programs.network.client import Network, is_public
from weft.programs.network.requests import HttpRequest
from weft.programs.quota.limits import Limits


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
    """The name is resolved once, so a second answer of the name server, a private address, is not used."""
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
        ("192.0.0.192", False),
        ("192.0.0.8", False),
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


@pytest.mark.parametrize("entry", ["localhost", "http://localhost:9000", "*.localhost", "bob=LOCALHOST."])
def test_a_list_cannot_have_a_name_of_this_machine(entry: str) -> None:
    with pytest.raises(InvalidRequest, match="lists the address itself"):
        Network(["example.com", entry])
    Network(["localhost.example.com", "127.0.0.1:9000"])


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
