"""Calls in flight, which a program awaits, and errors of commands that no call waits for.

A channel (`weft.sdk.channel`) creates calls and delivers their events. One task may wait for a call at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from weft.abi.errors import WeftError, from_kind
from weft.abi.frames import EventKind

Blobs = list[bytes]
CancelCall = Callable[[int], None]
"""Tells the host that the program gives up the call of this number."""


class FailureKeeper:
    """Keeps the error of a command that has no call of its own, until a later use raises it.

    Only the first error is kept: later ones follow from it.
    """

    _failure: WeftError | None = None
    num_failures = 0
    """Errors so far."""

    def fail(self, error: WeftError) -> None:
        """Keep an error for the next use."""
        self.num_failures += 1
        if self._failure is None:
            self._failure = error

    def raise_failure(self) -> None:
        """Raise the error of an earlier command, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class Call:
    """A call in flight. Awaiting it returns the blobs of its result. One task may wait at a time.

    `owner`: the resource whose earlier error the call raises, before its own.
    """

    __slots__ = ("_blobs", "_cancel", "_earlier", "_ended", "_error", "_owner", "_waiter", "keep", "number", "spill")

    def __init__(self, number: int, owner: FailureKeeper | None, cancel: CancelCall):
        self.number = number
        self.keep = False
        """Whether the call outlives the cancellation of the task that awaits it, so that another task may await it."""
        self.spill = False
        """Whether an error goes to the owner when no task awaits the call."""
        self._cancel = cancel
        self._owner = owner
        self._ended = False
        self._blobs: Blobs = []
        self._error: WeftError | None = None
        self._earlier: WeftError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether its result or its error has arrived."""
        return self._ended

    @property
    def failed(self) -> bool:
        """Whether the call has ended with an error of its own."""
        return self._error is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for the next event of the call."""
        return self._waiter is not None

    def __await__(self) -> Generator[Any, None, Blobs]:
        if not self._ended:
            yield from self.wait()
        return self.outcome()

    def wait(self) -> Generator[Any, None, None]:
        """Wait for the next event. Cancelling the waiting task cancels the call too, unless `keep` is set."""
        if self._waiter is not None:
            raise RuntimeError("two tasks wait for the same call; let one of them wait")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            yield from self._waiter
        except asyncio.CancelledError:
            if not self.keep:
                self.cancel()
            raise
        finally:
            self._waiter = None

    def outcome(self) -> Blobs:
        """The blobs of the result, once the call has ended. Raises an error of an earlier command, or the call's own
        error."""
        if self._owner is not None:
            self._owner.raise_failure()
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            if not self.keep:
                self.cancel()
            raise earlier
        if self._error is not None:
            raise self._error
        return self._blobs

    def cancel(self) -> None:
        """Cancel the call. It then ends with `Cancelled`, unless it has ended."""
        if not self._ended:
            self._cancel(self.number)

    # ---- for Channel

    def receive(self, kind: int, blobs: Blobs) -> bool:
        """Take in an event. Returns whether it was the last one."""
        if kind == EventKind.PART:
            return False
        self.end(blobs, None if kind == EventKind.RESULT else error_of(blobs))
        return True

    def end(self, blobs: Blobs, error: WeftError | None) -> None:
        """End the call with its result or its error."""
        self._blobs, self._error, self._ended = blobs, error, True
        if error is not None and self.spill and self._waiter is None and self._owner is not None:
            self._owner.fail(error)
        self._wake()

    def interrupt(self, error: WeftError) -> None:
        """Raise the error of an earlier command in the task that awaits the call. The call itself goes on if `keep` is
        set, and is cancelled otherwise."""
        self._earlier = self._earlier or error
        self._wake()

    # ---- inside

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Stream(Call):
    """A call that answers in parts: iterate over it for the blobs of each part, then read `result`."""

    __slots__ = ("_parts",)

    def __init__(self, number: int, owner: FailureKeeper | None, cancel: CancelCall):
        super().__init__(number, owner, cancel)
        self._parts: deque[Blobs] = deque()

    @property
    def result(self) -> Blobs:
        """The blobs of the RESULT event. Raises `RuntimeError` before the last part was read."""
        if not self._ended or self._error is not None:
            raise RuntimeError("the stream has no result: iterate over it to its end first")
        return self._blobs

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Blobs:
        """The blobs of the next part."""
        while not self._parts:
            if self._ended:
                await self
                raise StopAsyncIteration
            await _NextEvent(self)
        if self._owner is not None:
            # Of an append that was refused: the parts do not follow what the program has put on the sequence.
            self._owner.raise_failure()
        return self._parts.popleft()

    def take(self) -> list[Blobs]:
        """All parts that have arrived and were not read yet. Never waits."""
        parts = list(self._parts)
        self._parts.clear()
        return parts

    async def aclose(self) -> None:
        """Cancel the call and drop the parts that were not read."""
        self.cancel()
        self._parts.clear()

    def receive(self, kind: int, blobs: Blobs) -> bool:
        """Take in an event. Returns whether it was the last one."""
        if kind == EventKind.PART:
            self._parts.append(blobs)
            self._wake()
            return False
        return super().receive(kind, blobs)


class _NextEvent:
    """Awaitable: the next event of a call, a part or its end."""

    __slots__ = ("_call",)

    def __init__(self, call: Call):
        self._call = call

    def __await__(self) -> Generator[Any, None, None]:
        return self._call.wait()


def error_of(blobs: Blobs) -> WeftError:
    """The error of an ERROR event. Its blobs: kind; message; the field or limit at fault, or an empty blob."""
    kind, message, param = (blob.decode("utf-8", "replace") for blob in (*blobs, b"", b"", b"")[:3])
    return from_kind(kind, message, param=param or None)
