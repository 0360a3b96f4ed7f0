"""The asynchronous forms of a workflow's methods, on everything that a workflow runs on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import assert_nothing_left
from weft import ops
from weft.client import AsyncClient, Client
from weft.llm import LLM
from weft.workflow.run.feed import TextDelta

ROWS = [{"topic": f"topic {number}"} for number in range(4)]
KINDS = ("llm", "address", "client", "asynchronous client")


@weft.flow
def tell(topic: Any) -> Any:
    return ops.llm(f"Tell me about {topic}.", max_tokens=3, temperature=0)


@weft.flow
def asked(topic: Any) -> Any:
    return {"text": ops.llm(f"Tell me about {topic}.", max_tokens=3, temperature=0), "given": ops.external()}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    with LLM("weft-tiny", num_pages=96, threads=1, dtype="float64", max_context=512) as made:
        yield made


@asynccontextmanager
async def opened(kind: str, server: RunningServer, model: LLM) -> AsyncIterator[Any]:
    if kind == "client":
        with Client(server.url) as client:
            yield client
    elif kind == "asynchronous client":
        async with AsyncClient(server.url) as asynchronous:
            yield asynchronous
    else:
        yield model if kind == "llm" else server.url


@pytest.mark.parametrize("kind", KINDS)
def test_the_asynchronous_forms_do_the_same(kind: str, server: RunningServer, model: LLM) -> None:
    async def compare() -> None:
        async with opened(kind, server, model) as on:
            expected = await asyncio.to_thread(tell.run, ROWS, on=on)
            assert [row.outputs for row in expected] == [row.outputs for row in await tell.run_async(ROWS, on=on)]
            events = [event async for event in tell.stream_async(ROWS, on=on, stream=["value"])]
            rows = {event.row: event.outputs for event in events if not isinstance(event, TextDelta)}
            assert rows == {row.row: row.outputs for row in expected}
            texts = dict.fromkeys(rows, "")
            for event in events:
                if isinstance(event, TextDelta):
                    texts[event.row] += event.text
            assert texts == {row: outputs["value"] for row, outputs in rows.items()}
            explained = await asyncio.to_thread(tell.explain, ROWS, on=on)
            assert str(await tell.explain_async(ROWS, on=on)) == str(explained)

    asyncio.run(compare())


@pytest.mark.parametrize("kind", KINDS)
def test_the_event_loop_goes_on_during_a_run(kind: str, server: RunningServer, model: LLM) -> None:
    heard: list[int] = []

    async def run() -> None:
        loop, told = asyncio.get_running_loop(), threading.Event()

        def from_loop(_: Any) -> str:
            loop.call_soon_threadsafe(told.set)
            told.wait()
            return "from the loop"

        async with opened(kind, server, model) as on:
            results = await asked.run_async(
                ROWS,
                on=on,
                external=from_loop,
                starts=True,
                cache=False,
                listen=lambda news: heard.append(threading.get_ident()),
            )
        assert [row.outputs["given"] for row in results] == ["from the loop"] * len(ROWS)
        assert heard == [threading.get_ident()] * len(ROWS)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["run", "stream"])
def test_cancelling_the_caller_cancels_the_run(
    kind: str, method: str, server: RunningServer, model: LLM, tmp_path: Path
) -> None:
    ended = threading.Event()
    is_answering = False

    async def run() -> None:
        nonlocal is_answering
        loop, waits = asyncio.get_running_loop(), asyncio.Event()

        async def given(request: Any) -> str:
            if is_answering:
                return "given"
            try:
                loop.call_soon_threadsafe(waits.set)
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        async def streamed(on: Any) -> None:
            async with aclosing(asked.stream_async(ROWS, on=on, external=given)) as events:
                async for _ in events:
                    pass

        out = tmp_path / "out.jsonl"
        async with opened(kind, server, model) as on:
            running = asked.run_async(ROWS, on=on, external=given, out=out) if method == "run" else streamed(on)
            task = asyncio.ensure_future(running)
            await waits.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(ended.wait)
            if method == "run":
                assert not out.read_text()
                is_answering = True
                results = await asked.run_async(ROWS, on=on, external=given, out=out)
                assert [row.outputs["given"] for row in results] == ["given"] * len(ROWS)
                assert not out.with_name("out.jsonl.run").exists()

    asyncio.run(run())
    if kind != "llm":
        assert_nothing_left(server)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_stream_cancels_the_run(kind: str, server: RunningServer, model: LLM) -> None:
    async def first() -> int:
        async with opened(kind, server, model) as on, aclosing(tell.stream_async(ROWS, on=on)) as events:
            async for event in events:
                return event.row
        raise AssertionError

    assert asyncio.run(first()) in range(len(ROWS))
    if kind != "llm":
        assert_nothing_left(server)
