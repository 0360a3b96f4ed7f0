"""What the host costs, with the least of everything: that every command is answered, and that a whole stream is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench import host_cost, streaming
from weft.core import wire


@pytest.mark.parametrize("kind", list(host_cost.KINDS))
def test_every_token_of_a_program_is_answered(kind: str) -> None:
    assert host_cost.command_us(kind, 3, turns=20) > 0


def test_what_is_not_answered_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(host_cost.Pages):
        def turn(self, program: int, position: int) -> list[wire.Command]:
            return [wire.NextDist(space=program, queue=1, op=next(self.ops), k=0, embeds=b"")]

    monkeypatch.setitem(host_cost.KINDS, "pages", Wrong)
    with pytest.raises(RuntimeError, match="Failed"):
        host_cost.command_us("pages", 1, turns=2)


def test_all_sequences_decode() -> None:
    engine = host_cost.decoding_engine(5, 10)
    before = engine.stats().generated_tokens
    for _ in range(10):
        engine.step()
    assert engine.stats().generated_tokens - before == 50
    assert engine.stats().num_running == 5


@pytest.mark.parametrize(("row", "policy", "options"), host_cost.WAITED)
def test_sequences_that_wait_give_up_pages_where_none_are_to_spare(
    row: str, policy: str, options: dict[str, Any]
) -> None:
    assert host_cost.waited_step_us(policy, 20, **options, waiting=100) > 0


def test_each_step_of_the_simulated_sessions_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "ARRIVALS", (10, 5.0, (0.0, 1.0)))
    found = host_cost.deciding_us("min_waste")
    assert found["mean"] > 0
    assert found["90 %"] > 0


def test_a_step_that_takes_no_pages_is_not_reported_as_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "PAGE_SIZE", 64)  # few pages fill within two steps
    with pytest.raises(RuntimeError, match="0 pages were given up"):
        host_cost.waited_step_us("lru", 1, is_short=True, waiting=100)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([b'data: {"content":"a"}\n\n', b'data: {"usage":{"completion_tokens":1}}\n\n', b"data: [DONE]\n\n"], ""),
        ([b'data: {"content":"a"}\n\n', b'data: {"usage":{"completion_tokens":1}}\n\n'], "whole"),
        ([b'data: {"usage":{"completion_tokens":2}}\n\n', b"data: [DONE]\n\n"], "whole"),
    ],
)
def test_a_stream_counts_when_it_came_whole(answer: list[bytes], complaint: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for part in answer:
            writer.write(part)
            await writer.drain()
        writer.close()

    async def read() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await streaming.one_stream(server.sockets[0].getsockname()[1], b"{}", 1)
        finally:
            server.close()

    if complaint:
        with pytest.raises(RuntimeError, match=complaint):
            asyncio.run(read())
    else:
        assert asyncio.run(read()) == 1
