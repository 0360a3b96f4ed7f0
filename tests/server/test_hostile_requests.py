"""Hostile requests and programs: they are refused with the field's name, do not affect others, and leave nothing."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_programs import FOREVER, assert_no_runs
from tests.server.test_run_socket import attach, launch
from weft.config import ServerConfig
from weft.server.logs import configure_logging

HUGE = 2**70
RAW = "from weft.sdk.channel import current\nfrom weft.abi.operations import Op\n"

JSON = {"content-type": "application/json"}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        assert_no_runs(server)


def run(server: RunningServer, source: str, **options: Any) -> dict[str, Any]:
    response = server.post("/v1/runs", {"source": textwrap.dedent(source), **options})
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", HUGE), ("top_k", 2**63), ("seed", HUGE), ("min_tokens", HUGE), ("max_tokens", HUGE)]
)
def test_numbers_that_no_message_can_carry_are_refused(server: RunningServer, field: str, value: int) -> None:
    body = {"prompt": "Hello", field: value}
    response = server.post("/v1/completions", {"max_tokens": 2, **body})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("text", "half"),
    [(rb"cut \ud83d", rb"\ud83d"), (rb"\uDE00 cut", rb"\uDE00"), (rb"\ud83d\ude00 \uD83D.", rb"\uD83D")],
)
def test_half_a_character_is_named_with_its_place(server: RunningServer, text: bytes, half: bytes) -> None:
    body = b'{"prompt": "%s"}' % text
    answer = server.http().post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert f"half a character, {half.decode()} at byte {body.rindex(half)}, a" in answer.json()["error"]["message"]


def test_a_body_that_is_cut_is_called_so(server: RunningServer) -> None:
    answer = server.http().post("/v1/completions", content=rb'{"prompt": "\ud83d\ude00', headers=JSON)
    assert "truncated" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "asked", [{"limits": {"tokens": HUGE}}, {"limits": {"host_calls": HUGE}}, {"reserve_pages": HUGE}]
)
def test_limits_that_no_message_can_carry_are_refused(server: RunningServer, asked: dict[str, Any]) -> None:
    response = server.post("/v1/runs", {"source": "def main(): pass", **asked})
    assert response.status_code == 400
    assert next(iter(asked)) in response.json()["error"]["param"]


def test_a_message_with_ends_of_lines_is_one_event(server: RunningServer) -> None:
    source = RAW + "async def main():\n    current().post(Op.SEND, b'{\"a\":\\n\\n[1,\\r2]}')\n"
    text = server.post("/v1/runs", {"source": source, "stream": True}).text
    told = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part.startswith("data: {")]
    assert "\r" not in text
    assert [event["type"] for event in told] == ["run", "message", "end"]
    assert told[1]["message"] == {"a": [1, 2]}


def test_first_messages_that_do_not_fit_are_told_at_once(server: RunningServer) -> None:
    body = {
        "source": FOREVER.replace("return await", "await session.sleep(1000)\n    return await"),
        "background": True,
    }
    response = server.post("/v1/runs", {**body, "messages": [1, 2, 3], "limits": {"pending_messages": 2}})
    assert response.status_code == 429
    server.wait_until(lambda: not list(server.service.programs.history.active()))


def test_frames_of_a_socket_that_cannot_be_read(server: RunningServer) -> None:
    run_id = launch(server, FOREVER)
    with attach(server, run_id) as socket:
        socket.recv()
        deep = '{"type": "message", "message": ' + "[" * 100_000 + "]" * 100_000 + "}"
        long = '{"type": "message", "message": ' + "9" * 5000 + "}"
        for frame in (b"\x00\xff", b"nonsense", deep, long):
            socket.send(frame)
            told = json.loads(socket.recv())
            assert (told["type"], told["error"]["kind"]) == ("error", "invalid_request")
        socket.send(b'{"type": "message", "message": {"a":\n1}}')  # binary, and fine
        assert json.loads(socket.recv())["run"]["result"] == {"a": 1}


def test_keys_in_addresses_of_sockets_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("weft", "uvicorn")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        configure_logging(ServerConfig())
        logger = logging.getLogger("uvicorn.error")
        logger.info('%s - "WebSocket %s" [accepted]', "127.0.0.1:1", "/v1/runs/run-1?api_key=secret")
        logger.info("Uvicorn running")
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    told = capsys.readouterr().err
    assert "Uvicorn running" in told
    assert "secret" not in told


def test_results_of_one_tenant_do_not_make_room_for_those_of_another() -> None:
    with running(api_keys=["alice=KA", "bob=KB"]) as server:
        alice, bob = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("KA", "KB"))
        small = {"source": "def main(): return 'kept'"}
        large = {
            "source": "def main(): return 'x' * (15 << 20)",
            "background": True,
            "limits": {"memory_bytes": 256 << 20},
        }
        mine = server.post("/v1/runs", small, **bob).json()["id"]
        with ThreadPoolExecutor(4) as threads:
            ids = list(threads.map(lambda _: server.post("/v1/runs", large, **alice).json()["id"], range(6)))
        server.wait_until(lambda: not list(server.service.programs.history.active()))
        with server.http() as client:
            assert client.get(f"/v1/runs/{mine}", **bob).json()["result"] == "kept"
            told = [client.get(f"/v1/runs/{one}", **alice).json() for one in ids]
        assert {run["status"] for run in told} == {"finished"}, [run["error"] for run in told]
        assert any(run["forgotten"] for run in told)
        assert all((run["result"] is None) == run["forgotten"] for run in told)
