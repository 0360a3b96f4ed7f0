"""Heads that two readers could understand differently, upgrades that are not offered, handshakes that are refused."""

from __future__ import annotations

import itertools
import json
import logging
import socket
from collections.abc import Iterator

import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_disconnect import BODIES, connect, head_of, read_until
from tests.server.test_limits import exchange

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
