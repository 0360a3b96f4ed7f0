"""Sizes, counts and draining."""

from __future__ import annotations

import gc
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.server.conftest import ManualTimer, RunningServer, running
from tests.server.test_disconnect import BODIES, connect, head_of, read_to_end, read_until
from tests.server.test_requests import error_of
from weft.abi.errors import InvalidRequest
from weft.server import limits
from weft.server.protocol import MAX_HEAD_BYTES, MAX_PIPELINED
from weft.server.run import REPEATED_SIGNAL_S

JSON = {"content-type": "application/json"}
PATH, BODY = BODIES["chat"]
STREAM = BODY | {"stream": True}


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with running(max_body_bytes=1000) as server:
        yield server


def exchange(server: RunningServer, parts: Iterator[bytes]) -> bytes:
    """Send parts until the server stops taking them; what it answered."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    return answer


def test_announced_bodies(small: RunningServer) -> None:
    with small.http() as client:
        answer = client.post("/v1/completions", content=b" " * 1001, headers=JSON)
        assert "1000 bytes" in error_of(answer, 413)["message"]
        assert answer.headers["connection"] == "close"
        assert client.post("/v1/completions", content=b" " * 1000, headers=JSON).status_code == 400


def test_chunked_bodies_are_counted_as_they_come(small: RunningServer) -> None:
    def endless() -> Iterator[bytes]:
        yield (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        while True:
            yield b"400\r\n" + b"x" * 1024 + b"\r\n"

    answer = exchange(small, endless())
    # The connection may be reset before the answer is read; what counts is that it ended.
    assert not answer or answer.startswith(b"HTTP/1.1 413")
    with small.http() as client:
        parts = iter([b'{"prompt": ', b'"ab", "max_', b'tokens": 1}'])
        assert client.post("/v1/completions", content=parts, headers=JSON).status_code == 200


def test_small_chunks_become_one_part(small: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client sends at once is handed over at once; each chunk alone would cost a copy of those before it."""
    handed_over: list[bytes] = []
    take = HttpToolsProtocol.on_body

    def counted(self: HttpToolsProtocol, body: bytes) -> None:
        handed_over.append(body)
        take(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    body = b'{"prompt": "ab", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    trailers = b"Content-Type: text/plain\r\n"
    request = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"
    last = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    answer = exchange(small, iter([request + last]))
    assert answer.count(b"HTTP/1.1 200 OK") == 2  # trailers change nothing
    assert handed_over == [body, body]


def test_requests_that_come_at_once_are_bounded(small: RunningServer) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    few = exchange(small, iter([request * (MAX_PIPELINED - 1) + last]))
    assert few.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED
    many = exchange(small, iter([request * (100 * MAX_PIPELINED) + last]))
    assert many.count(b"HTTP/1.1 200 OK") < 100 * MAX_PIPELINED


def test_headers_are_bounded(small: RunningServer) -> None:
    def one_long() -> Iterator[bytes]:
        yield b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "
        for _ in range(64):
            yield b"x" * 65536

    def many() -> Iterator[bytes]:
        yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        for number in range(100_000):
            yield b"X-%d: y\r\n" % number

    def long_target() -> Iterator[bytes]:
        yield b"GET /" + b"x" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"

    for head in (one_long, many, long_target):
        answer = exchange(small, head())
        assert not answer or answer.startswith(b"HTTP/1.1 431"), head
    assert small.http().get("/health", headers={"x-fits": "x" * 60_000}).status_code == 200


def test_what_is_not_http(small: RunningServer) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
        answer = exchange(small, iter([data]))
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"error"' in answer
    both = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    assert exchange(small, iter([both])).startswith(b"HTTP/1.1 4")


def test_pipelined_and_kept_connections(small: RunningServer) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(small, iter([ask * 3 + last]))
    assert answer.count(b"HTTP/1.1 200") == 4


def test_requests_at_once() -> None:
    with running(auto=False, max_concurrent_requests=2) as server:
        open_requests = [connect(server, *BODIES["chat"]) for _ in range(2)]
        server.wait_until(lambda: server.service.num_active == 2)
        refused = server.chat()
        assert error_of(refused, 429)["code"] == "overloaded"
        assert "retry-after" in refused.headers
        # What operators ask is answered all the same.
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert server.http().get(path).status_code == 200
        for connection in open_requests:
            connection.close()
        server.assert_nothing_left()


def test_draining() -> None:
    with running(auto=False, drain_s=60.0) as server:
        connection = connect(server, PATH, STREAM)
        server.wait_until(lambda: bool(server.engine.sequences))
        server.on_loop(server.engine.step)
        text = read_until(connection, b"content")
        server.on_loop(server.server.begin_drain)
        server.wait_until(lambda: server.service.draining)
        ready = server.http().get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert server.http().get("/health").status_code == 200
        refused = server.chat()
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        # The request that was running gets its end.
        server.on_loop(lambda: server.engine.step(200))
        text += read_to_end(connection)
        assert b"data: [DONE]" in text
        connection.close()
        server.join()
        assert server.engine.closed


def test_what_outlasts_the_drain_is_told_so() -> None:
    with running(auto=False, drain_s=0.0) as server:
        streaming = connect(server, PATH, STREAM)
        server.wait_until(lambda: bool(server.engine.sequences))
        server.on_loop(server.engine.step)
        text = read_until(streaming, b"content")
        waiting = connect(server, PATH, BODY)
        server.wait_until(lambda: len(server.engine.sequences) == 2)
        server.on_loop(server.server.begin_drain)
        text += read_to_end(streaming)
        assert b'"code":"shutting_down"' in text
        assert b"[DONE]" not in text
        # Of the other nothing was sent yet, so it gets a status of its own.
        answer = read_until(waiting, b"shutting_down")
        assert answer.startswith(b"HTTP/1.1 503")
        server.join()
        assert not server.engine.sequences
        assert server.engine.closed


def test_signals_in_quick_succession_count_once() -> None:
    timer = ManualTimer()
    with running(auto=False, drain_s=3600.0, timer=timer) as server:
        connection = connect(server, *BODIES["chat"])
        server.wait_until(lambda: bool(server.engine.sequences))

        def signalled() -> tuple[bool, bool]:
            server.on_loop(lambda: server.server.handle_exit(signal.SIGTERM, None))
            return server.on_loop(lambda: (server.service.draining, server.server.should_exit))

        server.on_loop(lambda: timer.advance(REPEATED_SIGNAL_S))
        signalled()
        assert signalled() == (True, False)
        server.on_loop(lambda: timer.advance(REPEATED_SIGNAL_S / 2))
        assert signalled() == (True, False)
        server.on_loop(lambda: timer.advance(REPEATED_SIGNAL_S / 2))
        assert signalled() == (True, True)
        server.join()
        connection.close()


def test_a_second_signal_does_not_wait() -> None:
    with running(auto=False, drain_s=3600.0) as server:
        connection = connect(server, *BODIES["chat"])
        server.wait_until(lambda: bool(server.engine.sequences))
        server.on_loop(server.server.begin_drain)
        server.wait_until(lambda: server.service.draining)
        server.on_loop(server.server.begin_drain)
        server.join()
        connection.close()


def test_a_third_signal_cuts_connections(caplog: pytest.LogCaptureFixture) -> None:
    with running(auto=False, drain_s=3600.0, max_response_logprobs=10**7) as server:
        connection = connect(server, PATH, STREAM | {"n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000})
        server.wait_until(lambda: bool(server.engine.sequences))
        [protocol] = server.server.server_state.connections
        while not server.on_loop(lambda: protocol.flow.write_paused):
            server.on_loop(lambda: server.engine.step(50))
        for _ in range(2):
            server.on_loop(server.server.begin_drain)
        server.wait_until(lambda: not server.server.servers[0].is_serving())
        server.on_loop(server.server.begin_drain)
        server.join()
        assert server.engine.closed
        assert not server.service.num_active
        connection.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_texts_are_bounded_before_they_are_tokenized() -> None:
    long = "x" * 1001
    chat = [{"role": "user", "content": long}]
    with running(max_text_chars=1000) as server:
        for path, body, param in (
            ("/tokenize", {"prompt": long}, "prompt"),
            ("/tokenize", {"messages": chat}, "messages"),
            ("/v1/completions", {"prompt": long}, "prompt"),
            ("/v1/completions", {"prompt": ["a", long], "truncate_prompt_tokens": 5}, "prompt[1]"),
            ("/v1/chat/completions", {"messages": chat, "truncate_prompt_tokens": 5}, "messages"),
            ("/v1/embeddings", {"input": long}, "input"),
        ):
            error = error_of(server.post(path, body))
            assert error["param"] == param
            assert "max_text_chars" in error["message"]
            assert "1000" in error["message"]
        assert server.post("/tokenize", {"prompt": long[:1000]}).json()["count"] == 1000
    with running() as server:  # as much as the context may need, and no more
        most = server.service.models[0].max_text_chars
        refused = error_of(server.post("/tokenize", {"prompt": "x" * (most + 1)}))
        assert str(most + 1) in refused["message"]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "count", "param"),
    [
        (CHAT, {"n": 8, "max_tokens": 25, "logprobs": True, "top_logprobs": 5}, 1200, "logprobs"),
        (CHAT, {"n": 8, "max_completion_tokens": 250, "logprobs": True}, 2000, "logprobs"),
        (COMPLETIONS, {"prompt": [97] * 10, "n": 8, "max_tokens": 25, "logprobs": 5}, 1200, "logprobs"),
        (COMPLETIONS, {"prompt": [[97], [98]], "n": 4, "max_tokens": 25, "logprobs": 5}, 1200, "logprobs"),
        (
            COMPLETIONS,
            {"prompt": [[97] * 150] * 2, "n": 2, "max_tokens": 0, "echo": True, "logprobs": 1},
            1200,
            "logprobs",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "use_beam_search": True, "best_of": 8, "n": 1, "max_tokens": 25, "logprobs": 5},
            1200,
            "logprobs",
        ),
    ],
)
def test_log_probabilities_of_a_response_are_bounded(
    path: str, body: dict, count: int, param: str, stream: bool
) -> None:
    given = {"messages": MESSAGES} if path == CHAT else {}
    with running(max_response_logprobs=count - 1) as server:
        error = error_of(server.post(path, given | body | {"stream": stream}))
        assert error["param"] == param
        for part in (str(count), str(count - 1), "max_response_logprobs", "max_tokens"):
            assert part in error["message"]
        assert not server.engine.sequences
    with running(max_response_logprobs=count) as server:
        assert server.post(path, given | body | {"stream": stream}).status_code == 200


def test_log_probabilities_of_prompts_are_bounded() -> None:
    body = {"prompt": [[97] * 200] * 2, "max_tokens": 1, "prompt_logprobs": 2}
    with running(max_response_logprobs=1199) as server:
        error = error_of(server.post(COMPLETIONS, body))
        assert error["param"] == "prompt_logprobs"
        assert "400 prompt tokens with 3 each" in error["message"]
    with running(max_response_logprobs=1200) as server:
        assert server.post(COMPLETIONS, body).status_code == 200


def test_without_max_tokens_a_response_ends_at_the_limit_on_log_probabilities() -> None:
    with running(max_response_logprobs=60) as server:
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "ignore_eos": True, "n": 2}
        response = server.post(CHAT, body).json()
        assert [choice["finish_reason"] for choice in response["choices"]] == ["length"] * 2
        assert [len(choice["logprobs"]["content"]) for choice in response["choices"]] == [10, 10]
        assert "66 log-prob" in error_of(server.post(CHAT, body | {"n": 22, "top_logprobs": 2}))["message"]
        # The range of a field is named first, and a text without log-probabilities is not counted.
        assert error_of(server.post(CHAT, body | {"top_logprobs": 10**9}))["param"] == "top_logprobs"
        assert server.post(CHAT, {"messages": MESSAGES, "n": 8}).status_code == 200


def test_a_request_that_the_queue_of_an_engine_can_never_hold_is_refused_for_good() -> None:
    with running(max_waiting=4) as server:
        for body, count, param in (
            ({"prompt": ["a"] * 5}, 5, "prompt"),
            ({"prompt": ["a"] * 3, "n": 2}, 6, "prompt"),
            ({"prompt": "a", "n": 5}, 5, "n"),
            ({"prompt": ["a"] * 100}, 64, "prompt"),
        ):
            error = error_of(server.post(COMPLETIONS, body | {"max_tokens": 1}))
            assert error["param"] == param
            assert f"{count} generations" in error["message"]
            assert "4 wait (engine.max_waiting)" in error["message"]
        assert error_of(server.post(CHAT, {"messages": MESSAGES, "n": 5}))["param"] == "n"
        assert server.post(COMPLETIONS, {"prompt": ["a"] * 2, "n": 2, "max_tokens": 1}).status_code == 200
        server.assert_nothing_left()


def test_bodies_in_memory_are_bounded() -> None:
    with running(max_bodies_bytes=300_000) as server:
        half = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(2)]
        for connection in half:
            connection.sendall(head_of("/tokenize", 1_000_000) + b" " * 140_000)
        server.wait_until(lambda: server.service.bodies.held == 280_000)
        refused = server.post("/tokenize", {"prompt": "x" * 50_000})
        assert error_of(refused, 429)["code"] == "overloaded"
        assert "max_bodies_bytes" in refused.text
        assert "retry-after" in refused.headers
        assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
        for connection in half:
            connection.close()
        server.wait_until(lambda: server.service.bodies.held == 0)
        assert server.post("/tokenize", {"prompt": "x" * 10_000}).status_code == 200
        server.assert_nothing_left()


def test_a_tenant_leaves_room_for_the_bodies_of_others() -> None:
    with running(max_bodies_bytes=300_000, api_keys=["alice=KA", "bob=KB"]) as server:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in ("KA", "KB"))
        large = {"prompt": "x" * 151_000}
        assert error_of(server.post("/tokenize", large, headers=alice), 429)["code"] == "overloaded"
        assert server.post("/tokenize", {"prompt": "x" * 10_000}, headers=bob).status_code == 200
        assert server.service.bodies.held == 0


@pytest.mark.parametrize("unit", [b"[],", b"[[]],", b'{"a":[]},'])
def test_bodies_of_too_many_lists_are_refused_before_they_are_decoded(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(msgspec.json, "decode", lambda body: decoded.append(len(body)))
    most = (limits.MAX_CONTAINERS - 1) // (unit.count(b"[") + unit.count(b"{"))
    limits.decode(b"[" + unit * most + b"0]")
    assert len(decoded) == 1
    with pytest.raises(InvalidRequest, match=f"takes at most {limits.MAX_CONTAINERS:,}"):
        limits.decode(b"[" + unit * (most + 1) + b"0]")
    assert len(decoded) == 1


def test_the_garbage_collector_does_not_run_while_a_body_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = msgspec.json.decode
    enabled: list[bool] = []

    def watched(body: bytes) -> Any:
        enabled.append(gc.isenabled())
        return decode(body)

    monkeypatch.setattr(msgspec.json, "decode", watched)
    assert gc.isenabled()
    assert limits.decode(b"[1]") == [1]
    with pytest.raises(InvalidRequest):
        limits.decode(b"[1")
    assert enabled == [False, False]
    assert gc.isenabled()


def test_the_garbage_collector_runs_again_after_the_last_of_several_decodings() -> None:
    pause = limits._CollectorPause()
    with pause:
        with pause:  # as another thread does
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pause:
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
