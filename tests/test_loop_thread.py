"""An event loop in a thread: it outlives what its tasks do, and says what would wait for it forever."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from weft.loop_thread import LoopThread, shared_loop_thread, streamed, windowed

TIMEOUT_S = 60.0
"""Guards against a thread that never ends."""


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    if made.is_alive:
        made.stop()


async def one() -> int:
    return 1


async def ones() -> AsyncGenerator[int, None]:
    yield 1


BLOCKING: list[Callable[[LoopThread], Any]] = [
    lambda thread: thread.run(one()),
    lambda thread: list(streamed(thread, ones)),
    lambda thread: list(windowed(thread, [1], lambda index, item: one(), 1)),
]


@pytest.mark.parametrize("call", BLOCKING)
def test_what_waits_for_its_own_loop_is_refused(call: Callable[[LoopThread], Any], thread: LoopThread) -> None:
    async def within() -> None:
        with pytest.raises(RuntimeError, match="make it in a plain def"):
            call(thread)

    thread.submit(within()).result(TIMEOUT_S)
    assert call(thread) in (1, [1])


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_ends_the_interpreter_does_not_end_the_loop(error: type[BaseException], thread: LoopThread) -> None:
    async def inner() -> None:
        raise error

    async def outer() -> str:
        with pytest.raises(error):
            await asyncio.create_task(inner())
        return "there"

    assert thread.submit(outer()).result(TIMEOUT_S) == "there"
    assert thread.run(one()) == 1


@pytest.mark.parametrize("kind", ["run", "streamed", "windowed"])
def test_stop_says_why_calls_in_progress_end(kind: str, thread: LoopThread) -> None:
    has_begun = threading.Event()

    async def endless() -> int:
        has_begun.set()
        await asyncio.Event().wait()
        return 1

    async def items() -> AsyncGenerator[int, None]:
        yield await endless()

    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: thread.run(endless()),
        "streamed": lambda: list(streamed(thread, items)),
        "windowed": lambda: list(windowed(thread, [1], lambda index, item: endless(), 1)),
    }
    raised: list[BaseException] = []

    def call() -> None:
        try:
            calls[kind]()
        except BaseException as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert has_begun.wait(TIMEOUT_S)
    thread.stop()
    caller.join(TIMEOUT_S)
    assert [str(error) for error in raised] == ["this LLM was closed before the call ended"]


def test_the_shared_one_stays_the_same() -> None:
    assert shared_loop_thread() is shared_loop_thread()
    assert shared_loop_thread().run(one()) == 1


def test_stop_ends_a_loop_whose_task_exits_meanwhile(thread: LoopThread) -> None:
    async def exits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            sys.exit(1)

    future = thread.submit(exits())
    thread.run(one())
    thread.stop()
    assert not thread.is_alive
    assert future.done()
