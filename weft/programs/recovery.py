"""`Recovery`: carries requests over the death of their engine.

Owns how often a request is continued, how long it waits for the engine's restart, and which request may use a restarted
engine first. What a request computes is its *attempt*: an async generator that the caller makes again after each death,
and that goes on from the state that the caller keeps. Built-in programs call it; it raises only what they raise, and
the two errors named at `stream`.

A request that was on board at two deaths is a suspect: it may end every engine, by a bug or by the memory that it
needs. Suspects are tried one after another, each alone on the engine for its first items, while all other requests
wait. A suspect whose trial ends the engine fails, and no other request is affected. Suspects that pass, or whose trial
takes a large part of the time that others wait, continue when the last trial is over, and fail with a third death: no
request is continued more than twice.

Programs of users are not held back. They use the engine from the process of the program host, as a client of its own:
to stop them, every call of every run would have to ask this process first, and a suspect could then stop the runs of
all tenants for the length of its trial. So a program that ends the engine during a trial makes the suspect fail in its
place; `EngineCrashed` says with what the suspect was alone, and no request beside that one is affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from weft.abi.errors import EngineCrashed, EngineDead
from weft.engine.client import EngineClient

MAX_CONTINUATIONS = 2
"""How often a request is continued on a restarted engine."""
TRIAL_ITEMS = 16
"""Items of a suspect, or its end, that the engine must survive. Engines work at most two steps ahead of what they have
sent, so a request that ends every engine at the same token does so within its first items. An attempt that begins anew
has first to come as far again."""
TRIAL_PART = 0.5
"""Longest trial, as a part of the time that other requests wait for its end."""

T = TypeVar("T")
Attempt = Callable[[], AsyncGenerator[T, None]]

logger = logging.getLogger(__name__)


class Recovery:
    """Carries the requests of one client of one engine. Used from one event loop."""

    def __init__(self, engine: EngineClient, wait_s: float):
        """`wait_s`: how long a request waits for a restarted engine; 0: requests fail with their engine."""
        self._engine = engine
        self._wait_s = wait_s
        self._num_suspects = 0
        self._no_suspects = asyncio.Event()
        self._no_suspects.set()
        self._lock = asyncio.Lock()
        """Held by the suspect on trial."""

    async def stream(
        self, attempt: Attempt[T], request_id: str = "", *, resumes: bool = True
    ) -> AsyncGenerator[T, None]:
        """The items of an attempt; after the engine's death, those of further attempts on the restarted engine.
        `resumes`: an attempt goes on behind the items of the last one; else it begins anew and repeats them.

        Raises `EngineDead` when the engine is not back in time or has died too often, and `EngineCrashed` when this
        request ended it while it was alone there.
        """
        furthest = 0
        for num_continued in range(MAX_CONTINUATIONS + 1):
            if num_continued == MAX_CONTINUATIONS:
                trial = await self._try_alone(attempt, request_id, TRIAL_ITEMS + (0 if resumes else furthest))
                for item in trial.items:
                    yield item
                if trial.crashed is not None:
                    raise trial.crashed
                if trial.ended:
                    return
            await self._admitted()
            num_items = 0
            try:
                async with aclosing(attempt()) as items:
                    async for item in items:
                        num_items += 1
                        yield item
                return
            except EngineDead as error:
                furthest = max(furthest, num_items)
                if num_continued == MAX_CONTINUATIONS or not self._wait_s:
                    raise
                logger.warning("request %s is continued (%d): %s", request_id, num_continued + 1, error.message)
                if num_continued + 1 == MAX_CONTINUATIONS:
                    self._num_suspects += 1
                    self._no_suspects.clear()

    async def run(self, attempt: Callable[[], Awaitable[T]], request_id: str = "") -> T:
        """The result of an attempt that starts again from its beginning. Raises as `stream` does."""

        async def once() -> AsyncGenerator[T, None]:
            yield await attempt()

        async with aclosing(self.stream(once, request_id)) as results:
            return await anext(results)

    async def _admitted(self) -> None:
        """Wait until there is an engine and no suspect. Raises `EngineDead` after `wait_s` seconds."""
        if (self._engine.ready and not self._num_suspects) or not self._wait_s:
            return
        async with self._patience():
            while self._num_suspects or not self._engine.ready:
                await self._no_suspects.wait()
                await self._engine.wait_ready()

    async def _try_alone(self, attempt: Attempt[T], request_id: str, num_items: int) -> _Trial[T]:
        """Read a suspect's first items while no other request is admitted, then give its sequences up: the next suspect
        is alone, too. They are read before any is passed on, so that no client holds up others by reading slowly."""
        trial = _Trial[T]()
        try:
            async with self._patience():
                await self._lock.acquire()
            try:
                async with self._patience():
                    await self._engine.wait_ready()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_s * TRIAL_PART):
                        await _read(attempt, trial, request_id, num_items)
            finally:
                self._lock.release()
        finally:
            self._num_suspects -= 1
            if not self._num_suspects:
                self._no_suspects.set()
        return trial

    @asynccontextmanager
    async def _patience(self) -> AsyncGenerator[None, None]:
        """A time limit on waiting for an engine, or for the trials of suspects on it. Raises `EngineDead` when it is
        over."""
        try:
            async with asyncio.timeout(self._wait_s):
                yield
        except TimeoutError:
            if self._engine.ready:
                raise EngineDead(
                    "the engine is back, but requests that may have ended it are tried alone first, which took longer "
                    f"than {self._wait_s:g} s; try again later"
                ) from None
            raise EngineDead(f"the engine was not back within {self._wait_s:g} s; try again later") from None


@dataclass(slots=True)
class _Trial(Generic[T]):
    """What a suspect did while it was alone on the engine."""

    items: list[T] = field(default_factory=list)
    ended: bool = False
    """Whether these are all its items."""
    crashed: EngineCrashed | None = None


async def _read(attempt: Attempt[T], trial: _Trial[T], request_id: str, num_items: int) -> None:
    try:
        async with aclosing(attempt()) as items:
            async for item in items:
                trial.items.append(item)
                if len(trial.items) == num_items:
                    return
    except EngineDead as error:
        trial.crashed = _crashed(request_id, error)
    else:
        trial.ended = True


def _crashed(request_id: str, error: EngineDead) -> EngineCrashed:
    logger.error("request %s has ended three engines, the last one alone: %s", request_id, error.message)
    return EngineCrashed(
        f"The engine died three times while it computed request {request_id}, the last time with no other chat, "
        "completion or embedding beside it. It is not tried again; the server's log says how the engine ended."
    )
