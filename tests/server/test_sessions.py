"""`GET /v1/sessions` over HTTP and its clients: the caller's own, bounded, from a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.server.conftest import RunningServer, running
from weft.client import AsyncClient, Client, ServerError
from weft.config import EngineConfig
from weft.engine.inline import InlineEngine
from weft.tokenizers.load import load_tokenizer

PROMPT = "Once upon a time a weaver went to the sea."


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    engine = InlineEngine.from_config(EngineConfig(num_pages=512, threads=1, dtype="float32"))
    with running(
        engine=engine,
        tokenizer=load_tokenizer("weft-tiny"),
        names=["weft-tiny", "second-name"],
        api_keys=["alice=a", "bob=b", "carol=c"],
    ) as server:
        server.wait_until(lambda: server.service.ready)
        yield server


def ask(server: RunningServer, key: str, query: str = "") -> tuple[int, dict]:
    answer = server.http().get(f"/v1/sessions{query}", headers={"authorization": f"Bearer {key}"})
    return answer.status_code, answer.json()


def complete(server: RunningServer, key: str, request_id: str, **fields) -> int:
    answer = server.http().post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "ignore_eos": True} | fields,
        headers={"authorization": f"Bearer {key}", "x-request-id": request_id},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["total_tokens"]


def test_a_tenant_sees_its_own_turns_and_no_others(served: RunningServer) -> None:
    assert ask(served, "b") == (200, {"object": "list", "data": [], "left_out": 0})
    total = complete(served, "a", "turn-1")
    status, answer = ask(served, "a")
    assert (status, answer["left_out"]) == (200, 0)
    [session] = answer["data"]
    assert session["request_id"] == "turn-1", "without the tenant, which the engine's name of it has"
    assert (session["model"], session["state"], session["waits_for"]) == ("weft-tiny", "finished", "chat")
    assert session["tokens"] == total
    assert session["device_tokens"] + session["host_tokens"] + session["gone_tokens"] in (total - 1, total)
    assert session["expected_by"] == "elapsed", "no wait has ended yet"
    assert session["until"] > session["since"]
    assert ask(served, "b")[1]["data"] == []
    calls_f = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    complete(served, "b", "turn-2", **calls_f, ignore_eos=False, max_tokens=60)
    [session] = ask(served, "b", "?model=second-name")[1]["data"]
    assert (session["request_id"], session["waits_for"]) == ("turn-2", "tools:f")
    assert len(ask(served, "a")[1]["data"]) == 1


def test_a_list_says_how_many_it_leaves_out(served: RunningServer) -> None:
    for number in range(4):
        complete(served, "c", f"many-{number}", messages=[{"role": "user", "content": f"{number} {PROMPT}"}])
    status, answer = ask(served, "c", "?limit=3")
    assert (status, len(answer["data"]), answer["left_out"]) == (200, 3, 1)
    assert [session["request_id"] for session in answer["data"]] == ["many-0", "many-1", "many-2"]
    with Client(served.url, api_key="c") as client:
        page = client.sessions(limit=3)
        assert ([session.request_id for session in page.data], page.left_out) == (["many-0", "many-1", "many-2"], 1)
        assert [session.expected_by for session in page.data] == ["elapsed"] * 3
        with pytest.raises(ServerError, match="limit must be an integer from 1 to 1000"):
            client.sessions(limit=0)

    async def same() -> None:
        async with AsyncClient(served.url, api_key="c") as client:
            found = await client.sessions(model="weft-tiny")
            assert (len(found.data), found.left_out) == (4, 0)

    asyncio.run(same())


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "ten", "1.5", "", "9" * 400, "٣"])
def test_a_limit_that_is_none_is_refused(served: RunningServer, limit: str) -> None:
    status, answer = ask(served, "a", f"?limit={limit}")
    assert (status, answer["error"]["param"]) == (400, "limit")


def test_unknown_models_keys_and_engines_that_are_down() -> None:
    with running(api_keys=["alice=a"]) as server:
        assert ask(server, "a") == (200, {"object": "list", "data": [], "left_out": 0})
        assert ask(server, "wrong")[0] == 401
        assert ask(server, "a", "?model=none")[0] == 404
        server.on_loop(server.engine.die)
        assert ask(server, "a")[0] == 503
