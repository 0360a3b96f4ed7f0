"""A server that dies under a workflow and comes back: calls are made again, and the results are complete."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

import weft
from tests.cli.test_serve import SMALL, free_port, serving
from tests.programs.virtual_time import run_virtually
from tests.workflow.naive import fake_text
from weft import ops
from weft.workflow.api import stream_on_loop
from weft.workflow.backend.openai import OpenAIBackend

ROWS = [{"topic": f"island {number}"} for number in range(4)]
REFUSALS = 2
"""Requests that find no server after its death, or one that starts."""


@weft.flow
def flow(topic: Any) -> Any:
    """Chats that go on, parts by tokens and a map over them."""
    first = ops.llm(f"Tell me about {topic}.", max_tokens=12, temperature=0, retries=12)
    parts = ops.split(topic, max_tokens=6)
    notes = ops.map(lambda part: ops.llm(f"Say {part} {first}", max_tokens=4, temperature=0, retries=12), parts)
    second = ops.llm([first.chat, ops.user("Go on.")], max_tokens=8, temperature=0, retries=12)
    return {"notes": notes, "second": second}


class MortalServer(httpx.AsyncBaseTransport):
    """A server that dies at one of its moments: the arrival of a request, or an event of a stream."""

    def __init__(self, dies_at: int = 0):
        self.num_moments = 0
        self.num_answers = 0
        self._dies_at = dies_at
        self._num_deaths = 0
        self._refusals = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._pass()
        if self._refusals:
            self._refusals -= 1
            if self._refusals:
                raise httpx.ConnectError("nobody listens")
            return httpx.Response(503, headers={"retry-after": "1"}, json={"error": {"message": "starting"}})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "weft"}]})
        body = json.loads(await request.aread())
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(body["prompt"].encode())})
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"text": bytes(body["tokens"]).decode()})
        return httpx.Response(200, content=self._stream(fake_text(body["messages"])))

    def _pass(self) -> None:
        self.num_moments += 1
        if self.num_moments == self._dies_at:
            self._num_deaths += 1
            self._refusals = REFUSALS

    async def _stream(self, text: str) -> AsyncIterator[bytes]:
        born = self._num_deaths
        for delta, reason in [(text[:3], None), (text[3:], None), ("", "stop")]:
            await asyncio.sleep(0.01)
            self._pass()
            event = (
                b"data: " + json.dumps({"choices": [{"delta": {"content": delta}, "finish_reason": reason}]}).encode()
            )
            if self._num_deaths > born:
                if self._dies_at % 2:
                    raise httpx.ReadError("connection reset")
                yield event[:20]
                return
            yield event + b"\n\n"
        self.num_answers += 1


def outputs(server: MortalServer) -> list[Any]:
    found: dict[int, Any] = {}

    async def main() -> None:
        backend = OpenAIBackend("http://server/v1", transport=server)
        async for result in stream_on_loop(flow.graph, ROWS, backend):
            assert result.error is None, result.error
            found[result.row] = result.outputs
        await backend.close()

    run_virtually(main())
    return [found[row] for row in range(len(ROWS))]


def test_wherever_a_server_dies_the_results_are_complete() -> None:
    undisturbed = MortalServer()
    expected = outputs(undisturbed)
    assert undisturbed.num_moments > 60
    for moment in range(1, undisturbed.num_moments + 1):
        server = MortalServer(moment)
        assert outputs(server) == expected, moment
        assert server.num_answers == undisturbed.num_answers, "what was answered is not asked for again"


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again() -> None:
    port = free_port()
    arguments = (*SMALL, "--dtype", "float64", "--log-level", "error")
    with ExitStack() as stack:
        first, client = stack.enter_context(serving(*arguments, port=port, own_group=True, WEFT_PROGRAMS_START="off"))
        url = str(client.base_url)
        expected = {result.row: result.outputs for result in flow.stream(ROWS, url)}
        rows = [*ROWS, *({"topic": f"{row['topic']} again"} for row in ROWS * 2)]
        found = {}
        with closing(flow.stream(rows, url)) as results:
            for result in results:
                assert result.error is None, result.error
                if not found:
                    os.killpg(first.pid, signal.SIGKILL)
                    first.wait()
                    stack.enter_context(serving(*arguments, port=port, own_group=True, WEFT_PROGRAMS_START="off"))
                found[result.row] = result.outputs
    assert sorted(found) == list(range(len(rows)))
    assert {row: found[row] for row in expected} == expected
