"""`PendingCalls`: the calls of one run that are under way, and the events on their way to its program.

Owns the promise of the wire: a call that answers ends with exactly one RESULT or ERROR. Events of one turn of the event
loop are one wake-up. It does not know what answers a call (`call_kinds.py`) nor what calls mean: the traits beside it
do.

What a program does not read is bounded: `MAX_UNREAD_BYTES` of events, `MAX_PENDING` calls. Messages that wait for a
subscription or `receive` are not events yet; they wait in bounded queues of their own and become events as the program
takes them (`sources`), at most `MAX_TAKEN_MESSAGES` in one exchange: the loop has other work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weft.abi.errors import Cancelled, InvalidRequest, LimitExceeded, Overloaded, WeftError
from weft.abi.frames import EventKind, pack_event
from weft.core.waits import WaitKind
from weft.core.wire import ErrorRecord

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 64 << 20
"""Of events that a program has not taken. One that goes on asking without reading is ended."""
MAX_PENDING = 16384
"""Calls of one program under way at once; further ones are refused until some have ended."""
MAX_TAKEN_MESSAGES = 1024
"""Messages of subscriptions that a program takes in one exchange; more come with the next one."""
MAX_HELD_BYTES = 64 << 20
"""Of what those calls were given, and may bring back; further ones are refused likewise."""


class PendingCall(Protocol):
    """A call that has not ended. The program gives it up with `cancel`, its run with `drop`."""

    def cancel(self) -> None:
        """The program gives it up: it ends now, or when the engine has said where it stopped."""

    def drop(self) -> None:
        """The run is over: give back what it holds. Nothing may be said any more."""


class EventSource(Protocol):
    """A queue whose messages wait until the program takes its events."""

    def turn_into_events(self, most: int) -> int:
        """Make events of at most so many messages that wait, and return their number. A source with more that wait is
        added again."""


class NewWait(NamedTuple):
    """What a program has begun to wait for."""

    kind: WaitKind
    expected_in_s: float | None


class PendingCalls:
    """The pending calls of one run. `end` is called with the error that breaks the run outside of its own calls."""

    def __init__(self, end: Callable[[WeftError], None], charge: Callable[[float], None]):
        """`charge` gets the processor time of coroutines that answer calls."""
        self.charge = charge
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self.broken: WeftError | None = None
        """Why the run has to end, where it has to."""
        self.num_takes = 0
        """How often the program has taken its events."""
        self.waited_s = 0.0
        """Summed time of calls that waited for something other than the device, such as tools."""
        self.new_wait: NewWait | None = None
        """What the program has begun to wait for and the engine does not know of."""
        self._end = end
        self._events: list[bytes] = []
        self._unread = 0
        self._held = 0
        self._pending: dict[int, PendingCall] = {}
        self._sources: dict[EventSource, None] = {}
        self._wake: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._notified = False
        """Whether the program knows, or is about to, that there is something to take."""
        self._scheduled = False

    # ---- calls

    def begin(self, call: int, pending: PendingCall, held: int = 0) -> None:
        """Remember a call that will answer, and the bytes that it keeps until `let_go`. Raises as `check_free`."""
        self.check_free(call, held)
        self._held += held
        self._pending[call] = pending

    def check_free(self, call: int, held: int = 0) -> None:
        """Raise `InvalidRequest` for a number in use, `Overloaded` past `MAX_PENDING` or `MAX_HELD_BYTES`: asked before
        something is begun that could not be remembered."""
        if call in self._pending:
            raise InvalidRequest(f"call {call} is still under way; give every call a number of its own", "call")
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} calls of this program are under way; wait for some of them")
        if held and self._held + held > MAX_HELD_BYTES:
            raise Overloaded("calls of this program that are under way hold too much; wait for some of them")

    def waits(self, kind: WaitKind, expected_in_s: float | None = None) -> None:
        """The program has begun to wait for something other than the device. Of several waits that begin together the
        last counts, and a sleep after any other: it is a time limit on them."""
        if self.new_wait is None or kind is not WaitKind.SLEEP:
            self.new_wait = NewWait(kind, expected_in_s)

    def is_pending(self, call: int, pending: PendingCall) -> bool:
        """Whether this very call has not ended."""
        return self._pending.get(call) is pending

    def cancel(self, call: int) -> None:
        """The program gives a call up. Does nothing for one that has ended."""
        pending = self._pending.get(call)
        if pending is not None:
            pending.cancel()

    def result(self, call: int, *blobs: bytes) -> None:
        """End a call with its RESULT event."""
        self._pending.pop(call, None)
        self._put(EventKind.RESULT, call, *blobs)

    def error(self, call: int, error: WeftError) -> None:
        """End a call with an ERROR event."""
        self._pending.pop(call, None)
        self.refuse(call, error)

    def refuse(self, call: int, error: WeftError) -> None:
        """A command could not be carried out, or one that does not answer failed. Should a call of the same number be
        under way, then that one goes on: each command ends for itself."""
        record = ErrorRecord.of(error)
        self._put(EventKind.ERROR, call, record.kind.encode(), record.message.encode(), (record.param or "").encode())

    def cancelled(self, call: int) -> None:
        """The program gave it up."""
        self.error(call, Cancelled("the program gave this call up"))

    def part(self, call: int, *blobs: bytes) -> None:
        """A piece of what a call answers."""
        self._put(EventKind.PART, call, *blobs)

    def let_go(self, held: int) -> None:
        """A call that held so many bytes is over, though it may have been given up long before."""
        self._held -= held

    def break_run(self, error: WeftError) -> None:
        """A limit was gone beyond outside of the program's own calls."""
        if self.broken is None and not self.closed:
            self.broken = error
            self._end(error)

    @staticmethod
    def as_reported(error: BaseException) -> WeftError:
        """What a program hears of an error: of one in our own code or a library's, that it was one."""
        if isinstance(error, WeftError):
            return error
        logger.error("a call of a program failed: %s", error, exc_info=error)
        return WeftError(f"the host failed to carry this call out: {type(error).__name__}: {error}")

    # ---- events

    def add_source(self, source: EventSource) -> None:
        """Messages wait there; they become events when the program takes them."""
        if source not in self._sources:
            self._sources[source] = None
            self._notify()

    def remove_source(self, source: EventSource) -> None:
        """Nothing of it is wanted any more."""
        self._sources.pop(source, None)

    def take(self) -> bytes:
        """All events so far, packed; `b""` if there are none. Messages that wait become events now, as many as
        `MAX_TAKEN_MESSAGES`."""
        self.num_takes += 1
        num_left = MAX_TAKEN_MESSAGES
        for source in list(self._sources):
            if num_left <= 0:
                break
            del self._sources[source]
            num_left -= source.turn_into_events(num_left)
        self._notified = False
        if self._sources:
            self._notify()
        if not self._events:
            return b""
        data = b"".join(self._events)
        self._events.clear()
        self._unread = 0
        return data

    async def wait(self, timeout_s: float | None) -> bytes:
        """All events so far, waiting for the first. `b""` where the time is over, or the run."""
        if not self._events and not self._sources and not self.closed:
            if self._waiter is not None:
                raise RuntimeError("two tasks wait for the events of one program; let one of them wait")
            self._waiter = self.loop.create_future()
            timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._wake_waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return self.take()

    def on_events(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there are events after there were none."""
        self._wake = wake
        self._notified = False
        if self._events or self._sources:
            self._notify()

    def close(self) -> None:
        """Give up everything that is under way. Idempotent."""
        if self.closed:
            return
        self.closed = True
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.drop()
        self._sources.clear()
        self._events.clear()
        self._wake_waiter()

    # ---- inside

    def _put(self, kind: EventKind, call: int, *blobs: bytes) -> None:
        if self.closed:
            return
        event = pack_event(kind, call, *blobs)
        self._unread += len(event)
        if self._unread > MAX_UNREAD_BYTES:
            self.break_run(
                LimitExceeded(f"the program left {MAX_UNREAD_BYTES >> 20} MiB of events unread; read them", "events")
            )
            return
        self._events.append(event)
        if not self._notified:
            self._notify()

    def _notify(self) -> None:
        if self._notified or self.closed:
            return
        self._notified = True
        # The waiting task runs in a later turn, and takes the events until then as well.
        self._wake_waiter()
        if self._wake is not None and not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._signal)

    def _signal(self) -> None:
        self._scheduled = False
        if self._wake is not None and not self.closed and (self._events or self._sources):
            self._wake()

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
