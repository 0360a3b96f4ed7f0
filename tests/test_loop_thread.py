"""An event loop in a thread: it outlives what its tasks do, and says what would wait for it forever."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from weft.loop_thread import STREAM_ITEMS, LoopThread, shared_loop_thread, streamed, streamed_on_thread, windowed

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


def test_a_call_that_is_submitted_while_stop_runs_is_refused(thread: LoopThread) -> None:
    stopping, end = threading.Event(), asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopping.set()
            await end.wait()

    thread.submit(slow())
    thread.run(one())
    stop = threading.Thread(target=thread.stop)
    stop.start()
    assert stopping.wait(TIMEOUT_S)
    assert not thread.is_alive
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        thread.submit(one())
    thread.notify(end.set)
    stop.join(TIMEOUT_S)
    assert not stop.is_alive()
    thread.stop()
    thread.notify(end.set)


def test_stop_ends_tasks_that_others_start_as_they_end(thread: LoopThread) -> None:
    ended: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def endless(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(name)
            if name == "first":
                tasks.append(asyncio.create_task(endless("second")))
            raise

    thread.submit(endless("first"))
    thread.run(one())
    thread.stop()
    assert ended == ["first", "second"]
    assert tasks[0].cancelled()


def test_a_stream_is_not_far_ahead_of_its_reader(thread: LoopThread) -> None:
    made: list[int] = []
    closed = threading.Event()

    async def items() -> AsyncGenerator[int, None]:
        try:
            for number in range(10 * STREAM_ITEMS):
                made.append(number)
                yield number
        finally:
            closed.set()

    with closing(cast(Generator[int, None, None], streamed(thread, items))) as stream:
        assert next(stream) == 0
        thread.run(one())  # By now the stream waits.
        assert len(made) <= STREAM_ITEMS + 2
        assert list(stream) == list(range(1, 10 * STREAM_ITEMS))
    closed.clear()
    with closing(cast(Generator[int, None, None], streamed(thread, items))) as stream:
        assert next(stream) == 0
    assert closed.wait(TIMEOUT_S), "also while it waits for its reader"


@pytest.mark.parametrize("leaves", [False, True], ids=["reads on", "leaves"])
def test_a_stream_of_a_thread_is_not_far_ahead_of_its_reader(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    calls: list[str] = []
    is_still = threading.Event()

    class Noted(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if super().acquire(blocking=False):
                return True
            is_still.set()
            return super().acquire(blocking, timeout)

    def items() -> Generator[int, None, None]:
        try:
            for number in range(10 * STREAM_ITEMS):
                made.append(number)
                yield number
        finally:
            calls.append("closed")
            is_still.set()

    async def body() -> None:
        stream = streamed_on_thread(items, lambda: calls.append("cancelled"))
        monkeypatch.setattr("weft.loop_thread.threading.Semaphore", Noted)
        assert await anext(stream) == 0
        monkeypatch.undo()
        assert await asyncio.get_running_loop().run_in_executor(None, is_still.wait, TIMEOUT_S)
        assert len(made) <= STREAM_ITEMS + 2
        if leaves:
            await stream.aclose()
            assert sorted(calls) == ["cancelled", "closed"]
        else:
            assert [number async for number in stream] == list(range(1, 10 * STREAM_ITEMS))
            assert calls == ["closed"]

    asyncio.run(body())
