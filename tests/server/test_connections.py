"""Crowds of connections: that never read, never ask, ask slowly, or ask for more than there is room for."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import resource
import socket
import threading
from collections import Counter
from contextlib import ExitStack, suppress

import httpx
import pytest

from tests.server.conftest import ManualTimer, RunningServer, running
from tests.server.test_disconnect import BODIES, connect, head_of, read_to_end, read_until
from tests.server.test_requests import error_of
from weft.abi.errors import ConfigError, Overloaded
from weft.config import ServerConfig
from weft.core.place_forecast import MAX_RETRY_S, REMEMBERED
from weft.server import connections
from weft.server.connections import RESERVED_FILES, StalledConnections, allowed_connections, max_connections
from weft.server.places import Places

PATH, BODY = BODIES["chat"]
NUM_CHOICES = 4
LONG = BODY | {"stream": True, "n": NUM_CHOICES, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}


def open_files() -> Counter[str]:
    """The open files of this process by name. Every socket and pipe has a name of its own."""
    names: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            names[os.readlink(f"/proc/self/fd/{number}")] += 1
    return names


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def shrink(transport: asyncio.Transport) -> None:
    """The system's buffer, which would take megabytes."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def never_read(server: RunningServer, count: int) -> list[socket.socket]:
    """Clients of streams of which they take nothing, once the server cannot write to any of them."""
    clients = []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", server.port))
        data = json.dumps(LONG).encode()
        client.sendall(head_of(PATH, len(data)) + data)
        clients.append(client)
    server.wait_until(lambda: len(server.engine.sequences) == NUM_CHOICES * count)
    server.on_loop(lambda: [shrink(c.transport) for c in server.server.server_state.connections])
    while not server.on_loop(lambda: all(c.flow.write_paused for c in server.server.server_state.connections)):
        server.on_loop(lambda: server.engine.step(20))
    return clients


def check_readers(count: int) -> None:
    with running(auto=False) as server:
        first = connect(server, PATH, BODY | {"max_tokens": 1})
        server.wait_until(lambda: len(server.engine.sequences) == 1)
        server.on_loop(server.engine.step)
        read_until(first, b'"choices"')
        first.close()
        server.wait_until(lambda: not server.server.server_state.connections)
        before = open_files()
        clients = never_read(server, count)
        # What is unsent of each is bounded, however much the engine goes on to compute.
        server.on_loop(lambda: server.engine.step(20))
        sizes = server.on_loop(
            lambda: [c.transport.get_write_buffer_size() for c in server.server.server_state.connections]
        )
        assert max(sizes) < 1 << 20

        look = server.server.give_up_stalled
        server.on_loop(lambda: look(1000.0))
        other = connect(server, PATH, BODY | {"stream": True, "max_tokens": 5})
        server.wait_until(lambda: len(server.engine.sequences) == NUM_CHOICES * count + 1)
        server.on_loop(lambda: look(1059.0))
        assert server.service.num_active == count + 1
        # The system may still have taken some bytes between two looks.
        for now in range(1060, 1000 + 60 * count, 15):
            server.on_loop(functools.partial(look, float(now)))
            if server.service.num_active == 1:
                break
        server.wait_until(lambda: server.service.num_active == 1)
        server.wait_until(lambda: len(server.engine.sequences) == 1)
        server.on_loop(lambda: server.engine.step(5))
        assert b"data: [DONE]" in read_to_end(other)
        server.assert_nothing_left()
        assert server.service.metrics.http_requests.get("POST", PATH, "499") == count
        server.wait_until(lambda: len(server.server.server_state.connections) <= 1)
        for client in (*clients, other):
            client.close()
        server.wait_until(lambda: not server.server.server_state.connections)
        assert not server.on_loop(lambda: server.server.server_state.tasks)
        # Only new files count: a server of an earlier test may close some of its own at any time.
        server.wait_until(lambda: not open_files() - before)


def test_streams_that_nobody_reads_are_given_up() -> None:
    check_readers(20)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_five_hundred_streams_that_nobody_reads_are_given_up() -> None:
    before = resident_bytes()
    check_readers(500)
    assert resident_bytes() - before < 1 << 30


def test_who_takes_a_little_is_not_given_up() -> None:
    stalled: StalledConnections[str] = StalledConnections(60.0)
    assert stalled.overdue({"a": 100, "b": 100, "c": 0}, 0.0) == []
    assert stalled.overdue({"a": 100, "b": 99, "c": 0}, 40.0) == []
    assert stalled.overdue({"a": 100, "b": 99, "c": 50}, 60.0) == ["a"]
    assert stalled.overdue({"b": 99, "c": 50}, 100.0) == ["b"]
    assert stalled.overdue({"b": 99, "c": 0}, 110.0) == ["b"]
    assert stalled.overdue({"c": 50}, 130.0) == []
    # Nothing is unsent: an idle connection, not a stalled one.
    assert [stalled.overdue({"d": 0}, now) for now in (200.0, 300.0)] == [[], []]


def check_idle(count: int, most: int) -> None:
    """`count` connections that ask for nothing, of which `most` may be open with one more that does."""
    with running(max_connections=most, header_timeout_s=3600.0, keep_alive_s=3600) as server, ExitStack() as stack:
        busy = [stack.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(2)]
        for client in busy:
            assert client.get("/health").status_code == 200
        idle = []
        for number in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            if number % 2:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            idle.append(connection)
        newest = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        assert newest.get("/health").status_code == 200
        server.wait_until(lambda: len(server.server.server_state.connections) <= most)
        # The first to come are the first to go, kept ones without a word, and the others are told.
        for connection in idle[: max(0, count + 3 - most - len(busy))]:
            assert b"HTTP/1.1 503" in read_until(connection, b"try again shortly")
            assert connection.recv(100) == b""
        idle[-1].sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" if (count - 1) % 2 == 0 else b"alhost\r\n\r\n"
        )
        assert read_until(idle[-1], b'"ok"').startswith(b"HTTP/1.1 200")
        assert server.chat().status_code == 200
        server.assert_nothing_left()


def test_connections_make_room_for_new_ones() -> None:
    check_idle(40, 20)


def test_a_kept_connection_is_closed_without_a_word_and_only_it() -> None:
    def ask(connection: socket.socket) -> None:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_until(connection, b'"ok"').startswith(b"HTTP/1.1 200")

    with running(max_connections=3, header_timeout_s=3600.0, keep_alive_s=3600) as server, ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))

        connect().close()
        server.wait_until(lambda: not server.server.server_state.connections)
        kept = connect()
        ask(kept)
        others = [connect() for _ in range(3)]
        # Of those that wait, it has waited longest; the one that its client closed waits no more.
        assert kept.recv(100) == b""
        for other in others:
            ask(other)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_five_thousand_idle_connections() -> None:
    check_idle(5000, 5010)
    check_idle(5000, 1000)


def test_a_request_under_way_makes_no_room() -> None:
    with running(auto=False, max_connections=3) as server:
        asking = [connect(server, PATH, BODY | {"stream": True, "max_tokens": 3}) for _ in range(3)]
        server.wait_until(lambda: server.service.num_active == 3)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as refused:
            assert b"HTTP/1.1 503" in read_until(refused, b"try again shortly")
        server.on_loop(lambda: server.engine.step(3))
        for connection in asking:
            assert b"[DONE]" in read_to_end(connection)
            connection.close()
        server.assert_nothing_left()


def test_slow_heads_end() -> None:
    with running(header_timeout_s=0.2) as server:
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        ended = threading.Event()

        def dribble() -> None:
            try:
                while not ended.wait(0.01):
                    slow.sendall(b"G")
            except OSError:
                pass

        slow.sendall(b"GET /")
        thread = threading.Thread(target=dribble)
        thread.start()
        with suppress(ConnectionResetError):
            assert slow.recv(100) == b""
        ended.set()
        thread.join()
        slow.close()
        server.assert_nothing_left()


def test_slow_bodies_end() -> None:
    # Heads have their time, so that a slow machine cannot end one of them first.
    with running(header_timeout_s=3600.0, body_timeout_s=0.2) as server:
        for sent in (b"", b"{"):
            silent = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            silent.sendall(head_of("/v1/completions", 100) + sent)
            assert read_until(silent, b"body_timeout_s").startswith(b"HTTP/1.1 408")
            silent.close()
        # Parts that come in time, and yet too slowly.
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        slow.sendall(head_of("/v1/completions", 10_000))
        answer = b""
        slow.settimeout(0.05)
        while b"body_timeout_s" not in answer:
            with suppress(ConnectionError):  # the server may have closed the connection; its answer is still readable
                slow.sendall(b" ")
            with suppress(TimeoutError):
                part = slow.recv(1000)
                assert part, f"the connection ended after {answer!r}"
                answer += part
        assert answer.startswith(b"HTTP/1.1 408")
        slow.close()
        server.assert_nothing_left()


def test_connections_are_as_many_as_open_files_allow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert allowed_connections(1000, 1000 + RESERVED_FILES) == 1000
    assert allowed_connections(1000, resource.RLIM_INFINITY) == 1000
    assert not caplog.records
    assert allowed_connections(10_000, 1024) == 1024 - RESERVED_FILES
    assert allowed_connections(10_000, 100) == 50
    message = caplog.messages[0]
    assert "1024 files" in message
    assert "ulimit -n`, or LimitNOFILE" in message
    assert f"to {10_000 + RESERVED_FILES}" in message

    # The limit is raised as far as the process may.
    limits = [(1024, 4096)]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, both: limits.append(both))
    assert max_connections(1000) == 1000
    assert max_connections(10_000) == 4096 - RESERVED_FILES
    assert limits[1:] == [(1000 + RESERVED_FILES, 4096), (4096, 4096)]


@pytest.mark.parametrize(
    "setting",
    [{"max_connections": 0}, {"header_timeout_s": 0.0}, {"body_timeout_s": float("inf")}, {"send_timeout_s": -1.0}],
)
def test_settings_are_checked(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ServerConfig(**setting)


def test_a_place_is_promised_once() -> None:
    places = Places(10, num_tenants=2)
    for _ in range(5):
        places.take("a", 0.0)
    with pytest.raises(Overloaded, match="your share"):
        places.take("a", 0.0)
    for _ in range(5):
        places.take("b", 0.0)
    for now in (2.0, 4.0, 6.0):
        places.give_back("a", now)
        places.take("c", now)

    def told(now: float) -> float:
        with pytest.raises(Overloaded, match="its limit") as caught:
            places.take("d", now)
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    # A place has become free every two seconds since.
    assert [round(told(8.0), 1) for _ in range(3)] == [2.0, 4.0, 6.0]
    # No other place becomes free, which is seen too.
    assert told(1000.0) == MAX_RETRY_S
    assert places.num_taken == 10


def test_the_first_refused_request_is_told_the_least_time() -> None:
    places = Places(1, num_tenants=1)
    places.take("a", 0.0)
    with pytest.raises(Overloaded, match="try again in 1 s") as caught:
        places.take("a", 0.0)
    assert caught.value.retry_after_s == 1.0


def test_the_rate_is_that_of_the_latest_ends() -> None:
    places = Places(1, num_tenants=1)
    now = 0.0
    for pause_s in [50.0] * 100 + [3.0] * REMEMBERED:
        places.take("a", now)
        now += pause_s
        places.give_back("a", now)
    places.take("a", now)
    with pytest.raises(Overloaded, match="try again in 3 s"):
        places.take("a", now)


def check_crowd(count: int, most: int) -> None:
    """`count` requests at once, of which `most` have a place: those are answered, the others are told when to come."""
    timer = ManualTimer()
    with running(auto=False, max_concurrent_requests=most, timer=timer, stream_keep_alive_s=0.0) as server:
        first = connect(server, PATH, BODY | {"max_tokens": 1})
        server.wait_until(lambda: len(server.engine.sequences) == 1)
        server.on_loop(lambda: timer.advance(1.0))
        server.on_loop(server.engine.step)
        read_until(first, b'"choices"')
        first.close()
        server.on_loop(lambda: timer.advance(1.0))

        accepted = [connect(server, PATH, BODY | {"max_tokens": 3}) for _ in range(most)]
        server.wait_until(lambda: len(server.engine.sequences) == most)
        waits = []
        with server.http() as client:
            for _ in range(count - most):
                refused = client.post(PATH, json=BODY)
                error = error_of(refused, 429)
                assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
                waits.append(int(refused.headers["retry-after"]))
        assert waits[0] >= 1
        assert waits == sorted(waits)
        assert waits[-1] <= MAX_RETRY_S
        assert len(server.engine.sequences) == most
        server.on_loop(lambda: server.engine.step(3))
        answers = Counter(read_until(connection, b'"choices"')[:15] for connection in accepted)
        assert answers == {b"HTTP/1.1 200 OK": most}
        for connection in accepted:
            connection.close()
        server.assert_nothing_left()


def test_a_crowd_beyond_the_limit_is_told_when_to_come_back() -> None:
    check_crowd(100, 20)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_thousand_requests() -> None:
    before = resident_bytes()
    check_crowd(10_000, ServerConfig().max_concurrent_requests)
    assert resident_bytes() - before < 1 << 30


def test_a_tenant_leaves_places_for_others() -> None:
    with running(auto=False, max_concurrent_requests=4, api_keys=["alice=KA", "bob=KB"]) as server:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in ("KA", "KB"))
        data = json.dumps(BODY).encode()
        head = head_of(PATH, len(data)).replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer KA\r\n\r\n")
        taken = []
        for _ in range(2):
            taken.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            taken[-1].sendall(head + data)
        server.wait_until(lambda: len(server.engine.sequences) == 2)
        assert "your share" in error_of(server.post(PATH, BODY, headers=alice), 429)["message"]
        assert server.post("/tokenize", {"prompt": "x"}, headers=bob).status_code == 200
        for connection in taken:
            connection.close()
        server.assert_nothing_left()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_requests_that_wait_or_stream_leave_places_for_others(method: str) -> None:
    source = "from weft.sdk import run\nasync def main(args):\n    return await run.receive()\n"
    with running(auto=False, max_concurrent_requests=6, api_keys=["alice=KA", "bob=KB"]) as server:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in ("KA", "KB"))
        call = {"prompt": "Say {{said}}", "placeholders": [{"name": "said", "in_out": "out"}], "session_id": "s"}
        [variable] = server.post("/v1/calls", call, headers=alice).json()["variables"]
        run = server.post("/v1/runs", {"source": source, "background": True}, headers=alice).json()["id"]
        waits, streams = f"/v1/variables/{variable['id']}", f"/v1/runs/{run}/messages"
        taken = []
        for path in (waits, waits, streams):
            taken.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            taken[-1].sendall(
                f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer KA\r\n\r\n".encode()
            )
        server.wait_until(lambda: server.service.num_active == 3)
        for path in (waits, streams, f"/v1/runs/{run}/events"):
            refused = server.http().get(path, headers=alice)
            assert "your share" in error_of(refused, 429)["message"]
            assert "retry-after" in refused.headers
        assert server.http().get(f"/v1/runs/{run}", headers=alice).status_code == 200
        assert server.http().get(f"/v1/runs/{run}", headers=bob).status_code == 404
        assert server.post("/tokenize", {"prompt": "x"}, headers=bob).status_code == 200
        # A drain does not wait for them.
        assert server.on_loop(server.service._idle.is_set)
        for connection in taken:
            connection.close()
        server.wait_until(lambda: not server.service.num_active)
        assert server.post(f"/v1/runs/{run}/cancel", {}, headers=alice).status_code == 200
        assert server.http().delete("/v1/sessions/s", headers=alice).status_code == 200
