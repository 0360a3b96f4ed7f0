"""An event loop in a thread, and calls from other threads to it, with bounded concurrency."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPerCall())
        self._thread = threading.Thread(target=self._turn, name="weft-llm", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work. Raises `RuntimeError` after `stop`."""
        if self.loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise RuntimeError("this LLM is closed; create another one")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel all tasks, wait for their end, and stop the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class ThreadPerCall(ThreadPoolExecutor):
    """A daemon thread for each call, so that neither a loop nor the interpreter waits at its end for calls that take
    long. Thread pools do, and refuse work during interpreter exit, when unclosed engines are closed."""

    def submit(self, work: Callable[..., R], /, *args: Any, **options: Any) -> Future[R]:
        """Start a call."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()  # the thread cannot be ended, and sets a result in the end

        def run() -> None:
            try:
                future.set_result(work(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="weft-call", daemon=True).start()
        return future


def windowed(
    thread: LoopThread, items: Iterable[T], work: Callable[[int, T], Coroutine[Any, Any, R]], window: int
) -> Iterator[R]:
    """Yield the results of `work(index, item)` as they complete, with at most `window` in progress.

    `items` is read in the caller's thread, where it may block. Raises the first error of any item. An error, or closing
    the generator, cancels the other items.
    """
    source = enumerate(items)
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    running: set[Future[R]] = set()
    try:
        while True:
            while len(running) < window and (next_one := next(source, None)) is not None:
                future = thread.submit(work(*next_one))
                running.add(future)
                future.add_done_callback(done.put)
            if not running:
                return
            future = done.get()
            running.discard(future)
            yield future.result()
    finally:
        for future in running:
            future.cancel()


def streamed(thread: LoopThread, items: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Iterate over an asynchronous generator in the caller's thread. Closing this generator closes that one."""
    ready: queue.SimpleQueue[tuple[T] | Future[None]] = queue.SimpleQueue()

    async def pump() -> None:
        async with aclosing(items()) as stream:
            async for item in stream:
                ready.put((item,))

    future = thread.submit(pump())
    future.add_done_callback(ready.put)
    try:
        while not isinstance(news := ready.get(), Future):
            yield news[0]
        future.result()
    finally:
        future.cancel()
