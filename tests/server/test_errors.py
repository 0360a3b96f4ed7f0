"""Failures of engines and of ourselves, as clients see them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import httpx
import pytest

from tests.programs.sandbox.test_full_disk import CODE, full
from tests.server.conftest import RunningServer, ids, running, sse
from tests.server.test_disconnect import connect, read_to_end, read_until
from tests.server.test_requests import error_of
from weft.abi.errors import EngineCrashed, Overloaded, StorageFailed, WeftError
from weft.programs.registry import Registry
from weft.programs.sandbox.compiled import CompiledCode
from weft.server.errors import is_internal, problem_of
from weft.store.database import Database
from weft.store.values import DatabaseValueStore

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("invalid_request", 400, None),
        ("unsupported", 400, "unsupported_parameter"),
        ("context_too_long", 400, "context_length_exceeded"),
        ("overloaded", 429, "overloaded"),
        ("out_of_pages", 503, "out_of_kv_pages"),
        ("draining", 503, "shutting_down"),
        ("internal", 500, "internal_error"),
        ("something new", 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_says(server: RunningServer, kind: str, status: int, code: str, stream: bool) -> None:
    server.on_loop(lambda: server.engine.fail_next(kind, "told by /srv/engine.py", "prompt"))
    response = server.chat(stream=stream)
    error = error_of(response, status)
    assert error["code"] == code
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status == 500:
        assert "/srv" not in response.text
        assert response.headers["x-request-id"] in error["message"]


@pytest.mark.parametrize("what", ["upload", "list", "value", "machine code"])
def test_no_answer_has_a_path_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    compiled = CompiledCode(tmp_path / "cache")
    monkeypatch.setattr("tempfile.mkdtemp", full)
    work = {
        "upload": lambda: Registry(Database(file / "below")).upload("t", "p", b"def main(): pass"),
        "list": lambda: Registry(Database(file)).programs("t"),
        "value": lambda: asyncio.run(DatabaseValueStore(Database(file / "below")).put("t", "name", b"1")),
        "machine code": lambda: compiled.module(CODE),
    }
    with pytest.raises(StorageFailed) as raised:
        work[what]()
    told = problem_of(raised.value, "x")
    assert (told.status, told.body.code) == (507, "storage_failed")
    assert str(tmp_path) not in told.body.message
    assert str(tmp_path) in caplog.text


def test_retry_after_is_whole_seconds() -> None:
    headers = problem_of(Overloaded("full", retry_after_s=0.02), "x").headers
    assert headers == {"retry-after": "1", "retry-after-ms": "20"}
    assert problem_of(Overloaded("full", retry_after_s=2.1), "x").headers["retry-after"] == "3"


def test_retry_after_is_what_the_engine_says(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.fail_next("overloaded", "full", retry_after_s=7.5))
    response = server.chat()
    error_of(response, 429)
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("8", "7500")


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(impatient: RunningServer) -> None:
    connection = connect(impatient, "/v1/chat/completions", CHAT | {"stream": True})
    impatient.wait_until(lambda: bool(impatient.engine.sequences))
    impatient.on_loop(lambda: impatient.engine.step(2))
    text = read_until(connection, b"content")
    impatient.on_loop(impatient.engine.die)
    text += read_to_end(connection)
    assert b"engine_unavailable" in text.rpartition(b"data: ")[2]
    assert b"[DONE]" not in text
    connection.close()
    impatient.assert_nothing_left()


def test_an_engine_that_dies_before_the_first_token(impatient: RunningServer) -> None:
    for stream in (False, True):
        connection = connect(impatient, "/v1/chat/completions", CHAT | {"stream": stream})
        impatient.wait_until(lambda: bool(impatient.engine.sequences))
        impatient.on_loop(impatient.engine.die)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"engine_unavailable" in answer
        connection.close()
        impatient.on_loop(impatient.engine.restart)


def test_an_engine_that_comes_back(impatient: RunningServer) -> None:
    impatient.on_loop(impatient.engine.die)
    ready = impatient.http().get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "unavailable"})
    assert "retry-after" in ready.headers
    assert impatient.http().get("/health").status_code == 200
    refused = impatient.chat()
    assert error_of(refused, 503)["code"] == "engine_unavailable"
    assert "retry-after" in refused.headers
    assert "weft:engine_up" in impatient.http().get("/metrics").text
    assert impatient.http().get("/v1/models").json()["data"][0]["max_model_len"] is None
    impatient.on_loop(impatient.engine.restart)
    assert impatient.http().get("/ready").status_code == 200


def test_requests_wait_for_an_engine_that_comes_back(stepped: RunningServer) -> None:
    streaming = connect(stepped, "/v1/chat/completions", CHAT | {"stream": True})
    stepped.wait_until(lambda: bool(stepped.engine.sequences))
    stepped.on_loop(stepped.engine.step)
    text = read_until(streaming, b"content")
    stepped.on_loop(stepped.engine.die)
    whole = connect(stepped, "/v1/chat/completions", CHAT)
    vector = connect(stepped, "/v1/embeddings", {"input": "a"})
    stepped.wait_until(lambda: stepped.service.num_active == 3)
    stepped.on_loop(stepped.engine.restart)
    stepped.wait_until(lambda: len(stepped.engine.sequences) == 3)
    stepped.on_loop(lambda: stepped.engine.step(200))
    assert b"data: [DONE]" in text + read_to_end(streaming)
    for connection in (whole, vector):
        assert read_until(connection, b"usage").startswith(b"HTTP/1.1 200")
        connection.close()
    streaming.close()
    stepped.assert_nothing_left()


def test_a_request_that_ends_engines_is_named_and_not_repeated() -> None:
    problem = problem_of(EngineCrashed("request r7 did it"), "r7")
    assert (problem.status, problem.body.code, problem.body.message) == (500, "engine_crashed", "request r7 did it")
    assert problem.headers == {"x-should-retry": "false"}
    assert not is_internal(EngineCrashed("x"))


def test_our_own_faults_are_logged_and_not_told(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret detail at /srv/weft/x.py")

    monkeypatch.setattr("weft.endpoints.chat.chat_prompt_of", broken)
    with caplog.at_level(logging.ERROR, logger="weft.server"):
        response = server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "req-1"})
    error = error_of(response, 500)
    assert "secret" not in response.text
    assert "req-1" in error["message"]
    assert any("req-1" in record.getMessage() and record.exc_info for record in caplog.records)


def test_our_own_faults_in_the_middle_of_a_stream(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.endpoints.writers import ChatWriter

    def broken(self: ChatWriter) -> bytes:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(ChatWriter, "last_events", broken)
    events = sse(server.chat(stream=True).text)
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert "secret" not in events[-1]


def test_an_engine_that_cannot_start_stops_the_server() -> None:
    from weft.abi.errors import ModelLoadError
    from weft.testing.fake_engine import FakeEngine

    class Broken(FakeEngine):
        ready = False

        async def wait_ready(self):
            raise ModelLoadError("no such file")

    with running(engine=Broken()) as server:
        server.join()
    assert isinstance(server.service.failure, ModelLoadError)
    assert server.engine.closed


def test_request_ids(server: RunningServer) -> None:
    with server.http() as client:

        def echoed(sent: str) -> str:
            return client.get("/health", headers={"x-request-id": sent}).headers["x-request-id"]

        assert echoed("abc-123_X.y:z") == "abc-123_X.y:z"
        for odd in ("a b", "x" * 129, "a\tb", "<script>", ""):
            assert len(echoed(odd)) == 32
        first, second = (client.get("/health").headers["x-request-id"] for _ in range(2))
        assert first != second
        assert client.get("/nope").headers["x-request-id"]
    server.on_loop(lambda: server.engine.script(ids("x")))
    answer = server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "mine"})
    assert answer.json()["id"] == "chatcmpl-mine"


def test_unknown_errors_are_internal() -> None:
    assert problem_of(WeftError("at 0x7f"), "id").status == 500
    assert "0x7f" not in problem_of(ValueError("at 0x7f"), "id").body.message


def test_a_wrong_method_hears_of_all_that_there_are(server: RunningServer) -> None:
    for method, path, allowed in (
        ("DELETE", "/v1/runs", "GET, HEAD, POST"),
        ("PUT", "/v1/runs/run-1", "DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
    ):
        answer = httpx.request(method, server.url + path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert f"takes {allowed}, not {method}" in answer.json()["error"]["message"]
