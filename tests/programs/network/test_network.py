"""HTTP requests of programs to a real server on this machine: answers, redirects, failures and bounds."""

import asyncio
import gzip
import json
import zlib

import pytest

from tests.programs.help import settle
from tests.programs.network.help import OK, Server, fetch, flood, names, with_server
from tests.programs.sessions import Host, obj
from weft.abi.errors import InvalidRequest, NetworkFailed
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.programs.network import client as module
from weft.programs.network.client import Network
from weft.programs.network.requests import METHODS, HttpRequest
from weft.programs.quota.limits import Limits
from weft.testing.fake_engine import FakeEngine


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
