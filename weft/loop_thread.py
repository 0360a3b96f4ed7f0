"""An event loop in a thread, calls from other threads to it, and calls that block from other event loops."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

STREAM_ITEMS = 64
"""Items of a stream that wait for its reader. A generator whose reader is slower waits, so that its items need not all
be computed and held."""


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPerCall())
        self._stopping = threading.Lock()
        """Held while work is submitted and while `_is_stopped` is set: all submitted work precedes `_end`."""
        self._is_stopped = self._has_ended = False
        self._thread = threading.Thread(target=self._turn, name="weft-llm", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether work can be started: not after `stop`, nor in a process that was forked."""
        return not self._is_stopped and self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work. Raises `RuntimeError` after `stop`."""
        with self._stopping:
            if self.is_alive:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise RuntimeError("this LLM is closed; create another one")

    def notify(self, callback: Callable[[], object]) -> None:
        """Call back on the loop soon. Does nothing once the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Raises as `check_elsewhere` and `result`."""
        try:
            self.check_elsewhere()
        except BaseException:
            work.close()
            raise
        future = self.submit(work)
        try:
            return self.result(future)
        except BaseException:
            future.cancel()
            raise

    def result(self, future: Future[T]) -> T:
        """Wait for the result of work. Raises `RuntimeError` where `stop` has cancelled it."""
        try:
            return future.result()
        except CancelledError:
            if self._is_stopped:
                raise RuntimeError("this LLM was closed before the call ended") from None
            raise

    def check_elsewhere(self) -> None:
        """Raise `RuntimeError` on the thread of the loop, where waiting for the loop would never end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "this call would block the event loop of Weft that it waits for: make it in a plain def, which runs "
                "on a thread, or await its asynchronous form, such as aget() of a variable"
            )

    def stop(self) -> None:
        """Cancel all tasks, wait for their end, and stop the thread. Idempotent."""
        with self._stopping:
            if self.is_alive:
                self._is_stopped = True
                asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        self._thread.join()

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._has_ended:
            # Of a task, which keeps it for those who await it. The loop goes on: it has other users.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        self.loop.close()

    async def _end(self) -> None:
        # A task that is cancelled may start others.
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        self._has_ended = True
        self.loop.stop()


_shared: list[LoopThread] = []
_sharing = threading.Lock()


def shared_loop_thread() -> LoopThread:
    """The event loop for what runs on no model of this process. It is the same as long as the process lasts, so that
    what coroutines keep, such as the connections of a client, can be used by later ones."""
    with _sharing:
        if not (_shared and _shared[0].is_alive):
            _shared[:] = [LoopThread()]
        return _shared[0]


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

    `items` is read in the caller's thread, where it may block. Raises the first error of any item, and as
    `LoopThread.run`. An error, or closing the generator, cancels the other items.
    """
    thread.check_elsewhere()
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
            yield thread.result(future)
    finally:
        for future in running:
            future.cancel()


def streamed(
    thread: LoopThread,
    items: Callable[[], AsyncGenerator[T, None]],
    on_start: Callable[[Future[None]], None] = lambda future: None,
) -> Iterator[T]:
    """Iterate over an asynchronous generator in the caller's thread. Closing this generator closes that one, which is
    at most `STREAM_ITEMS` ahead.

    `on_start` gets what another thread may cancel to end both. Raises as `LoopThread.run`, and `CancelledError` then.
    """
    thread.check_elsewhere()
    ready: queue.SimpleQueue[tuple[T] | Future[None]] = queue.SimpleQueue()
    room = asyncio.Semaphore(STREAM_ITEMS)

    async def pump() -> None:
        async with aclosing(items()) as stream:
            async for item in stream:
                await room.acquire()
                ready.put((item,))

    future = thread.submit(pump())
    future.add_done_callback(ready.put)
    on_start(future)
    try:
        while not isinstance(news := ready.get(), Future):
            thread.notify(room.release)
            yield news[0]
        thread.result(future)
    finally:
        future.cancel()


async def on_thread(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Return what a call that blocks returns; it runs on a daemon thread, in the caller's context. Where the caller is
    cancelled, `cancel`, on a thread too, has to make the call end soon, and the caller waits for that end."""
    loop, threads = asyncio.get_running_loop(), ThreadPerCall()
    ended = loop.run_in_executor(threads, contextvars.copy_context().run, work)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        if not ended.done():
            await loop.run_in_executor(threads, cancel)
            await asyncio.wait([ended])
        _note_error(ended)
        raise


async def streamed_on_thread(
    items: Callable[[], Generator[T, None, None]], cancel: Callable[[], None]
) -> AsyncGenerator[T, None]:
    """Iterate over a generator that blocks, on a daemon thread. Closing this one ends that one, as `on_thread`; it is
    at most `STREAM_ITEMS` ahead."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    room = threading.Semaphore(STREAM_ITEMS)
    is_cancelled = False

    def pump() -> None:
        with closing(items()) as stream:
            for item in stream:
                room.acquire()
                if is_cancelled:
                    return
                loop.call_soon_threadsafe(ready.put_nowait, (item,))

    def end() -> None:
        nonlocal is_cancelled
        is_cancelled = True
        room.release()  # The generator may wait for a reader that has left.
        cancel()

    pumping = asyncio.ensure_future(on_thread(pump, end))
    pumping.add_done_callback(lambda _: ready.put_nowait(None))
    try:
        while (news := await ready.get()) is not None:
            room.release()
            yield news[0]
        await pumping
    finally:
        pumping.cancel()
        await asyncio.wait([pumping])
        _note_error(pumping)


def _note_error(ended: asyncio.Future[Any]) -> None:
    """Nobody waits for this error, so asyncio need not log it."""
    if not ended.cancelled():
        ended.exception()
