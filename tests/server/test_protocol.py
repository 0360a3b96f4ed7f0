"""Heads that two readers could understand differently, upgrades that are not offered, handshakes that are refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState
from websockets.frames import Close, Frame, Opcode

from tests.server.conftest import RunningServer, running
from tests.server.test_disconnect import BODIES, connect, head_of, read_until
from tests.server.test_limits import exchange
from weft.server.connections import Connections
from weft.server.protocol import (
    MAX_FRAGMENTS,
    MAX_UNSENT_PONGS,
    WS_PART_BYTES,
    WS_TURN_FRAMES,
    BoundedWebSocketProtocol,
    HttpConfig,
)

UPGRADE = (
    "Host: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        server.assert_nothing_left()


def ask(server: RunningServer, head: str, body: str = "") -> tuple[int, dict]:
    """Status and JSON of the answer; the connection must end with it."""
    answer = exchange(server, iter([f"{head}\r\n{body}".encode("latin-1")]))
    first, _, rest = answer.partition(b"\r\n\r\n")
    return int(first.split(b" ")[1]), json.loads(rest)


def test_a_request_has_one_host(server: RunningServer) -> None:
    line, close = "GET /health HTTP/1.1\r\n", "Connection: close\r\n"
    for hosts, count in (("", 0), ("Host: localhost\r\nHost: localhost\r\n", 2), ("Host: localhost\r\nhost: b\r\n", 2)):
        status, answer = ask(server, line + hosts + close)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"].endswith(f"must have one Host header; this one has {count}.")
    assert ask(server, line + "Host: localhost\r\n" + close) == (200, {"status": "ok"})
    assert ask(server, "GET /health HTTP/1.0\r\n") == (200, {"status": "ok"})


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, chunked", "gzip", "identity", "xchunked"])
def test_no_transfer_coding_but_chunked(server: RunningServer, coding: str) -> None:
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: {}\r\n"
    status, answer = ask(server, head.format(coding), 'd\r\n{"prompt":""}\r\n0\r\n\r\n')
    assert status in (400, 501)
    if coding.startswith("gzip, "):
        assert (status, "chunked" in answer["error"]["message"]) == (501, True)
    fits = head.format("Chunked") + "Connection: close\r\n"
    assert ask(server, fits, 'd\r\n{"prompt":""}\r\n0\r\n\r\n')[0] == 200


def test_what_is_not_http_does_not_disturb_a_response() -> None:
    with running(auto=False) as server:
        path, body = BODIES["chat"]
        connection = connect(server, path, body | {"stream": True})
        server.wait_until(lambda: bool(server.engine.sequences))
        server.on_loop(server.engine.step)
        text = read_until(connection, b"content")
        connection.sendall(b"NONSENSE\r\n\r\n")
        while part := connection.recv(65536):
            text += part
        connection.close()
        assert text.count(b"HTTP/1.1") == 1
        server.assert_nothing_left()


def test_an_upgrade_that_is_not_offered_is_ignored(server: RunningServer) -> None:
    """Java's HTTP client begins every connection by asking for HTTP/2."""
    body = '{"prompt": "ab"}'
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIA\r\n"
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    first = f"POST /tokenize HTTP/1.1\r\n{upgrade}{fields}\r\n{body}"
    last = f"POST /tokenize HTTP/1.1\r\nConnection: close\r\n{fields}\r\n{body}"
    for sizes in ([len(first)], [10, 60, len(first)], [first.index("{") + 3, len(first)]):
        starts = [0, *sizes]
        parts = [first[start:end] for start, end in itertools.pairwise(starts)]
        answer = exchange(server, (part.encode() for part in [*parts, last]))
        assert answer.count(b'"count":2') == 2, answer


def test_a_handshake_that_is_no_get_is_a_request(server: RunningServer) -> None:
    closing = UPGRADE.replace("Connection: Upgrade", "Connection: Upgrade, close")
    assert ask(server, f"POST /v1/runs/x HTTP/1.1\r\n{closing}Content-Length: 2\r\n", "{}")[0] == 405


@pytest.mark.parametrize("head", ["GET /v1/runs/" + "x" * 10_000, "GET /v1/runs/x"])
def test_a_handshake_that_is_too_large_is_answered(server: RunningServer, head: str) -> None:
    more = "".join(f"X-{number}: y\r\n" for number in range(300))
    answer = exchange(server, iter([f"{head} HTTP/1.1\r\n{UPGRADE}{more}\r\n".encode()]))
    assert answer.startswith((b"HTTP/1.1 414", b"HTTP/1.1 431"))


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/runs/x", 404), ("/nothing", 404), ("/health", 404), ("/v1/runs/y", 403)]
)
def test_a_refused_handshake_is_a_line(
    server: RunningServer, caplog: pytest.LogCaptureFixture, path: str, status: int
) -> None:
    origin = "Origin: http://evil.example\r\n" if status == 403 else ""
    with caplog.at_level(logging.DEBUG):
        told, answer = ask(server, f"GET {path} HTTP/1.1\r\n{UPGRADE}{origin}")
        server.wait_until(lambda: any(line.name == "weft.access" for line in caplog.records))
        # What uvicorn says of the application's end comes a turn of the loop later.
        for _ in range(3):
            server.on_loop(lambda: None)
    assert (told, answer["error"]["type"]) == (status, "invalid_request_error")
    [line] = [line for line in caplog.records if line.name == "weft.access"]
    assert line.weft["status"] == status
    assert [line for line in caplog.records if line.levelno > logging.INFO or line.exc_info] == []


def test_the_server_is_no_proxy(server: RunningServer) -> None:
    assert ask(server, "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n")[0] == 501


def test_every_request_of_a_connection_hears_of_its_end(caplog: pytest.LogCaptureFixture) -> None:
    path, body = BODIES["chat"]
    data = json.dumps(body | {"stream": True}).encode()
    with running(auto=False) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        connection.sendall((head_of(path, len(data)) + data) * 2)
        server.wait_until(lambda: bool(server.engine.sequences))
        [protocol] = server.server.server_state.connections
        server.wait_until(lambda: bool(protocol.pipeline))
        server.on_loop(protocol.transport.abort)
        # The engine never moves: the first request ends because it is told.
        server.assert_nothing_left()
        connection.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("rest", [b"x", b"\r\n"])
def test_what_follows_an_answer_and_begins_no_request_does_not_keep_a_connection(rest: bytes) -> None:
    with running(keep_alive_s=1) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        connection.sendall(head_of("/nowhere", 100 * len(rest.strip())))
        read_until(connection, b'"error"')
        connection.sendall(rest)
        assert connection.recv(100) == b""
        server.wait_until(lambda: not server.server.server_state.connections)
        connection.close()


def test_a_handshake_behind_a_request_is_a_request(caplog: pytest.LogCaptureFixture) -> None:
    path, body = BODIES["chat"]
    data = json.dumps(body | {"stream": True}).encode()
    with running(auto=False) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        connection.sendall(head_of(path, len(data)) + data + f"GET /health HTTP/1.1\r\n{UPGRADE}\r\n".encode())
        server.wait_until(lambda: bool(server.engine.sequences))
        server.on_loop(lambda: server.engine.step(200))
        assert b"HTTP/1.1 101" not in (text := read_until(connection, b'{"status":"ok"}'))
        assert text.index(b"[DONE]") < text.index(b'"ok"')
        connection.close()
        server.assert_nothing_left()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


MIN_FRAME_BYTES = 6
TURN_FRAMES = WS_TURN_FRAMES + WS_PART_BYTES // MIN_FRAME_BYTES
"""Frames that one turn of the loop may parse: those of the last part may exceed the bound."""
READ_BYTES = 256 * 1024
"""What a transport reads at once."""


class FakeTransport(asyncio.Transport):
    """A transport whose client sends what a test says, and reads what is written or not."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reading, self.closing = True, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


class OpenSocket:
    """A protocol whose handshake was accepted. Its application takes no messages; tests do, by `receive`."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.protocol: BoundedWebSocketProtocol

    async def open(self, *, accepts: bool = True) -> None:
        accepted = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert (await receive())["type"] == "websocket.connect"
            if accepts:
                await send({"type": "websocket.accept"})
            accepted.set()
            await asyncio.get_running_loop().create_future()

        config = HttpConfig(app, Connections(10, 30.0), ws_per_message_deflate=False, log_config=None)
        config.load()
        self.protocol = BoundedWebSocketProtocol(config, ServerState(), {})
        self.protocol.connection_made(self.transport)
        self.protocol.data_received(f"GET /x HTTP/1.1\r\n{UPGRADE}\r\n".encode())
        await accepted.wait()
        self.transport.written.clear()

    async def turns(self) -> None:
        """Let the loop turn until the protocol reads again or the transport closes."""
        while not (self.transport.reading or self.transport.closing):  # noqa: ASYNC110  each sleep is one turn
            await asyncio.sleep(0)


def frame(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    """A frame as clients send it."""
    return Frame(opcode, data, fin).serialize(mask=True)


def close_of(written: bytes) -> Close:
    """The close frame at the end of what was written."""
    start = written.rindex(b"\x88")
    return Close.parse(written[start + 2 :])


def test_frames_of_one_read_are_parsed_in_several_turns() -> None:
    """While one client's small frames are parsed, the other connections have their turns."""

    async def main() -> None:
        socket = OpenSocket()
        await socket.open()
        ping, pong = frame(Opcode.PING), Frame(Opcode.PONG, b"").serialize(mask=False)
        num_pings = READ_BYTES // len(ping)
        socket.protocol.data_received(ping * num_pings)
        answered = 0
        while answered < num_pings:
            before, answered = answered, len(socket.transport.written) // len(pong)
            assert 0 < answered - before <= TURN_FRAMES
            assert socket.transport.reading == (answered == num_pings)
            await asyncio.sleep(0)
        assert bytes(socket.transport.written) == pong * num_pings
        assert not socket.transport.closing

    asyncio.run(main())


def test_messages_of_several_turns_keep_their_order() -> None:
    async def main() -> None:
        socket = OpenSocket()
        await socket.open()
        texts = [str(number) for number in range(5 * TURN_FRAMES)]
        socket.protocol.data_received(b"".join(frame(Opcode.TEXT, text.encode()) for text in texts))
        received = []
        for _ in texts:
            received.append((await socket.protocol.receive())["text"])
            # Nothing further is read while there are bytes to parse, though the application has all messages.
            assert not (socket.transport.reading and socket.protocol._unparsed)
        assert received == texts
        await asyncio.sleep(0)
        assert socket.transport.reading

    asyncio.run(main())


def test_a_large_message_is_parsed_in_the_turn_that_reads_it() -> None:
    async def main() -> None:
        socket = OpenSocket()
        await socket.open()
        socket.protocol.data_received(frame(Opcode.BINARY, b"x" * READ_BYTES))
        assert (await socket.protocol.receive())["bytes"] == b"x" * READ_BYTES

    asyncio.run(main())


def test_fragments_of_a_message_are_bounded() -> None:
    async def main() -> None:
        first, more = frame(Opcode.TEXT, b"a", fin=False), frame(Opcode.CONT, fin=False)
        socket = OpenSocket()
        await socket.open()
        socket.protocol.data_received(first + more * (MAX_FRAGMENTS - 2) + frame(Opcode.CONT, b"b"))
        assert (await socket.protocol.receive())["text"] == "ab"
        await socket.turns()
        assert not socket.transport.closing
        socket.protocol.data_received(first + more * (READ_BYTES // len(more)))
        most = 0
        while not socket.transport.closing:
            most = max(most, len(socket.protocol.frames))
            await asyncio.sleep(0)
        assert most <= MAX_FRAGMENTS
        assert not socket.protocol._unparsed
        end = await socket.protocol.receive()
        assert (end["type"], end["code"]) == ("websocket.disconnect", 1008)
        assert "1000 fragments" in end["reason"]
        assert close_of(bytes(socket.transport.written)) == Close(1008, end["reason"])

    asyncio.run(main())


def test_pongs_that_the_client_does_not_read_are_bounded() -> None:
    async def main() -> None:
        ping = frame(Opcode.PING, b"x" * 100)
        socket = OpenSocket()
        await socket.open()
        for _ in range(2):
            socket.protocol.pause_writing()
            socket.protocol.data_received(ping * (MAX_UNSENT_PONGS - 1))
            await socket.turns()
            socket.protocol.resume_writing()
            socket.protocol.data_received(ping)
        assert not socket.transport.closing
        socket.protocol.pause_writing()
        socket.transport.written.clear()
        socket.protocol.data_received(ping * (2 * MAX_UNSENT_PONGS))
        await socket.turns()
        assert (await socket.protocol.receive())["code"] == 1008
        assert len(socket.transport.written) <= (MAX_UNSENT_PONGS + TURN_FRAMES) * len(ping)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close frame", "connection lost", "shutdown"])
def test_an_end_between_two_turns_is_the_last_message(how: str) -> None:
    async def main() -> None:
        text, num_texts = frame(Opcode.TEXT, b"a"), 4 * TURN_FRAMES
        last = frame(Opcode.CLOSE, Close(1000, "").serialize()) if how == "close frame" else b""
        socket = OpenSocket()
        await socket.open()
        socket.protocol.data_received(text * num_texts + last + text)
        await asyncio.sleep(0)
        assert socket.protocol._unparsed
        if how == "connection lost":
            socket.protocol.connection_lost(ConnectionResetError())
        elif how == "shutdown":
            socket.protocol.shutdown()
        messages = []
        while not messages or messages[-1]["type"] == "websocket.receive":
            messages.append(await socket.protocol.receive())
        assert (len(messages) == num_texts + 1) == (how == "close frame")
        await asyncio.sleep(0)
        assert not socket.protocol._unparsed
        assert socket.protocol._next_parse is None
        assert socket.protocol.queue.empty()

    asyncio.run(main())


def test_frames_before_the_response_of_the_handshake_end_the_connection() -> None:
    async def main() -> None:
        socket = OpenSocket()
        await socket.open(accepts=False)
        socket.protocol.data_received(frame(Opcode.PING))
        assert socket.transport.closing
        assert not socket.transport.written

    asyncio.run(main())
