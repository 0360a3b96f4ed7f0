"""Clients that speak HTTP badly, or mean harm: drawn sessions against a live server, after which nothing is left.

Owns the drawing of exchanges. Each session is one connection: some bytes, in parts, at whose ends the client may read,
shut its side down, leave, or reset the connection. Nothing here depends on time: the server's own timeouts are short,
and a session ends when the server closes, or when the client has read enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable

import pytest

from tests.server.conftest import RunningServer, running
from weft.server.protocol import MAX_HEAD_BYTES

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
BODIES: list[tuple[str, object]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stream": True}),
    ("/v1/completions", {"prompt": "x" * 3000, "max_tokens": 1, "echo": True, "logprobs": 5}),
    ("/v1/embeddings", {"input": ["ab"] * 20}),
    ("/tokenize", {"prompt": "z" * 20_000}),
    ("/detokenize", {"tokens": [97] * 100}),
    ("/v1/runs", {"source": "async def main():\n    return 1"}),
]
PATHS = ["/health", "/metrics", "/v1/models", "/", "/v1/runs/none", "/nowhere", "*", "//", "/%00", "/v1/completions"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI", "get", "", "G\x00T"]


def head(line: str, *headers: str, host: bool = True) -> bytes:
    lines = [line, *(["Host: localhost"] if host else []), *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(path: str, *headers: str) -> bytes:
    return head(f"POST {path} HTTP/1.1", "Content-Type: application/json", *headers)


class Draw:
    """One exchange after another, from a seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def body(self) -> tuple[str, bytes]:
        path, value = self.rng.choice(BODIES)
        return path, json.dumps(value).encode()

    def valid(self) -> bytes:
        path, data = self.body()
        return post(path, f"Content-Length: {len(data)}") + data

    def pipelined(self) -> bytes:
        parts = [self.valid() if self.rng.random() < 0.5 else head("GET /health HTTP/1.1") for _ in range(5)]
        return b"".join(parts)

    def chunked(self) -> bytes:
        """Now and then with a size that is none, or that is wrong."""
        path, data = self.body()
        sent = post(path, "Transfer-Encoding: chunked")
        while data:
            size = self.rng.randint(1, len(data))
            wrong = [f"{size + 1:x}", "-1", "0x10", "f" * 18, "g", "", f"{size:x};a=b"]
            said = self.rng.choice([f"{size:x}"] * 6 + wrong)
            sent += said.encode() + b"\r\n" + data[:size] + self.rng.choice([b"\r\n"] * 6 + [b"", b"\n"])
            data = data[size:]
        return sent + self.rng.choice([b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"0\r\n"])

    def wrong_length(self) -> bytes:
        path, data = self.body()
        length = self.rng.choice([len(data) + 10, len(data) - 1, -1, "1, 2", "abc", 2**70, "+5", "", 10**9])
        return post(path, f"Content-Length: {length}") + data

    def smuggled(self) -> bytes:
        path, data = self.body()
        both = post(path, f"Content-Length: {len(data)}", "Transfer-Encoding: chunked")
        twice = post(path, f"Content-Length: {len(data)}", "Content-Length: 3")
        return self.rng.choice([both, twice]) + data

    def wrong_body(self) -> bytes:
        texts = ["", "{", "\xff\xfe", "[" * 5000, '{"model": 1}', "null", '"\\ud800"', '{"prompt": 1e999}']
        data = self.rng.choice(texts).encode("latin-1")
        path, _ = self.rng.choice(BODIES)
        kind = self.rng.choice(["application/json", "text/plain", "multipart/form-data; boundary=x"])
        return head(f"POST {path} HTTP/1.1", f"Content-Type: {kind}", f"Content-Length: {len(data)}") + data

    def strange_line(self) -> bytes:
        version = self.rng.choice(["1.1", "1.0", "0.9", "2", "9.9", ""])
        line = f"{self.rng.choice(METHODS)} {self.rng.choice(PATHS)} HTTP/{version}"
        return head(line, host=self.rng.random() < 0.8)

    def strange_headers(self) -> bytes:
        names = ["X", "", "X Y", "X\x00", "Connection", "Expect", "Content-Encoding", "Authorization", "Cookie", "Host"]
        values = ["x", "", "close", "100-continue", "gzip", "\xff\x80", "a\x00b", "x" * 5000, "Bearer " + "k" * 300]
        drawn = [f"{self.rng.choice(names)}: {self.rng.choice(values)}" for _ in range(self.rng.randint(1, 8))]
        return head(f"GET {self.rng.choice(PATHS)} HTTP/1.1", *drawn)

    def huge_head(self) -> bytes:
        if self.rng.random() < 0.5:
            return head("GET /health HTTP/1.1", "X: " + "x" * (MAX_HEAD_BYTES + 1))
        return head("GET /health HTTP/1.1", *(f"X-{number}: y" for number in range(10_000)))

    def upgrade(self) -> bytes:
        """Handshakes of WebSockets, well and badly made, and of HTTP/2 in clear text."""
        key = self.rng.choice(["A" * 22 + "==", "short", ""])
        version = self.rng.choice(["13", "8", ""])
        asks = ("Upgrade: websocket", "Connection: Upgrade")
        socket_head = (*asks, f"Sec-WebSocket-Key: {key}", f"Sec-WebSocket-Version: {version}")
        path = self.rng.choice(["/v1/runs/none", "/health", "/v1/runs"])
        h2c = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
        path_of, data = self.body()
        return self.rng.choice(
            [
                head(f"GET {path} HTTP/1.1", *socket_head) + bytes(self.rng.randrange(256) for _ in range(20)),
                head("GET /health HTTP/1.1", *h2c),
                post(path_of, *h2c, f"Content-Length: {len(data)}") + data,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            ]
        )

    def noise(self) -> bytes:
        return self.rng.randbytes(self.rng.randint(1, 3000))

    def damaged(self) -> bytes:
        """A request of which some bytes are others, or missing."""
        data = bytearray(self.valid())
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(data))
            if self.rng.random() < 0.5:
                data[at] = self.rng.randrange(256)
            else:
                del data[at:]
            if not data:
                return b"\r\n"
        return bytes(data)

    def exchange(self) -> bytes:
        kinds: list[Callable[[], bytes]] = [
            self.valid, self.pipelined, self.chunked, self.wrong_length, self.smuggled, self.wrong_body,
            self.strange_line, self.strange_headers, self.huge_head, self.upgrade, self.noise, self.damaged,
        ]  # fmt: skip
        return self.rng.choice(kinds)()


def session(server: RunningServer, draw: Draw) -> str:
    """One connection; how it ended."""
    rng = draw.rng
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        try:
            for _ in range(rng.randint(1, 3)):
                data = draw.exchange()
                for _ in range(rng.randint(0, 3)):
                    cut = rng.randint(0, len(data))
                    connection.sendall(data[:cut])
                    data = data[cut:]
                    server.on_loop(lambda: None)
                    if rng.random() < 0.1:
                        return leave(connection, rng)
                connection.sendall(data)
                server.on_loop(lambda: None)
                if rng.random() < 0.3:
                    connection.recv(rng.choice([1, 100, 65536]))
            return leave(connection, rng)
        except TimeoutError:
            pytest.fail("the server keeps a connection and says nothing")
        except ConnectionError:
            return "closed by the server"


def leave(connection: socket.socket, rng: random.Random) -> str:
    how = rng.choice(["close", "reset", "shut down"] * 3 + ["read"])
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "shut down":
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    elif how == "read":
        # Until the server closes, by its timeouts at the latest.
        while connection.recv(65536):
            pass
    return how


def attack(num_sessions: int, seed: int) -> Counter[str]:
    ends: Counter[str] = Counter()
    with running(header_timeout_s=0.3, body_timeout_s=0.3, keep_alive_s=1, max_body_bytes=1 << 20) as server:
        assert server.chat().status_code == 200
        tasks = server.on_loop(lambda: len(asyncio.all_tasks()))
        draw = Draw(seed)
        for _ in range(num_sessions):
            ends[session(server, draw)] += 1
        server.wait_until(lambda: not server.server.server_state.connections)
        server.assert_nothing_left()
        assert server.http().get("/health").json() == {"status": "ok"}
        assert server.chat().status_code == 200
        server.wait_until(lambda: not list(server.service.programs.history.active()))
        server.wait_until(lambda: not server.server.server_state.connections)
        server.assert_nothing_left()
        assert server.service.bodies.held == 0
        assert not server.service._interrupts
        assert server.service.metrics.http_in_flight == 0
        assert not server.server.server_state.tasks
        assert not server.server.config.limits._waiting
        server.wait_until(lambda: len(asyncio.all_tasks()) <= tasks + 1)
    return ends


def test_hostile_sessions_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ends = attack(25, seed=1)
    assert len(ends) >= 4
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_many_hostile_sessions_leave_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    attack(1500, seed=100 + seed)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
