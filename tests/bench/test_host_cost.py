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


@pytest.mark.parametrize("policy", ["lru", "min_waste"])
def test_a_decision_frees_what_was_asked_for(policy: str) -> None:
    assert host_cost.decision_us(policy, 100, needed=500, rounds=2) > 0
    with pytest.raises(RuntimeError, match=f"{policy} frees"):
        host_cost.decision_us(policy, 100, needed=10**6, rounds=1)


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
