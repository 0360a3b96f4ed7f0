"""A program's end of the wire: it numbers calls, queues commands, and delivers each event to its call or resource.

Owns the calls in flight between a program and its host. It does not know what operations mean, nor how bytes travel:
the runner of the program passes a `flush`, takes commands with `take`, and hands events to `dispatch`. Used from one
event loop only.

A command without an answer (`post`) carries the number of its resource as its call number, so that an ERROR finds the
resource without a table of all commands sent. The resource keeps the error; its next use raises it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

from weft.abi.errors import NoProgram, UnknownHandle, WeftError
from weft.abi.frames import EventKind, events, pack
from weft.abi.operations import Op
from weft.sdk.calls import Call, FailureKeeper, Stream, error_of

MANY_BYTES = 64 << 10
"""Bytes of queued commands above which `hurry` is called."""


class Resource(FailureKeeper):
    """An object of the host that a program holds by its number: a sequence, a queue, a child, ...

    `noun` names its kind in error messages.
    """

    noun = "resource"

    def __init__(self, channel: Channel):
        self.channel = channel
        self.number = channel.number()
        self._is_open = True
        channel.adopt(self)

    @property
    def is_open(self) -> bool:
        """Whether the resource has not been released."""
        return self._is_open

    def check(self) -> None:
        """Raise `UnknownHandle` if the resource was released, or the error of an earlier command on it."""
        if not self._is_open:
            raise UnknownHandle(f"{self.noun} {self.number} was released; open another one")
        if self._failure is not None:
            self.raise_failure()

    def close(self) -> None:
        """Mark the resource as released: `check` raises from now on."""
        self._is_open = False
        self.channel.forget(self)


class Scoped:
    """What a program uses in an `async with` block and gives up at its end, however the block ends."""

    def _give_up(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up()


class OwnedResource(Resource, Scoped):
    """A resource that its program releases, by `release` or at the end of `async with`. The end of the program releases
    what is left."""

    release_op: Op
    """The command that releases it on the host."""

    def release(self) -> None:
        """Release the resource on the host; what was made of it stays. Idempotent."""
        if self.is_open:
            self.channel.post(self.release_op, self.number, owner=self)
            self.close()

    def _give_up(self) -> None:
        self.release()


class Channel(FailureKeeper):
    """The channel of one running program. It keeps the error of a command that has neither a call nor a resource.

    `flush` is called when a command is queued and the queue was empty: it arranges a call of `take` soon. `hurry` is
    called when more than `MANY_BYTES` are queued, by a program that posts command after command and never awaits: it
    calls `take` before it returns.
    """

    def __init__(self, flush: Callable[[], None], hurry: Callable[[], None] | None = None):
        self._flush = flush
        self._hurry = hurry
        self._queued_bytes = 0
        # Calls and handles share one counter, so that a post may use its resource's number as its call.
        self._last = 0
        self._outbox: list[bytes] = []
        self._calls: dict[int, Call] = {}
        self._has_posted = False
        """Whether a command without an owner came after the last call without one."""
        self._follower: Call | None = None
        """The call that came first after the last command without an owner, and raises its error."""
        self._resources: dict[int, Resource] = {}
        self.values: dict[str, Any] = {}
        """State that modules of the library keep for this program: models, the arguments, ..."""

    # For the library

    def number(self, count: int = 1) -> int:
        """A fresh number for a call or a handle; the first of `count` consecutive ones."""
        first = self._last + 1
        self._last += count
        return first

    def unused(self, first: int) -> None:
        """Return the numbers from `first` on. Valid only right after they were handed out."""
        self._last = first - 1

    @property
    def last_number(self) -> int:
        """The last number handed out."""
        return self._last

    def post(self, op: Op, *values: float | bytes, owner: Resource | None = None) -> int:
        """Send a command that has no answer. Returns its call number: the owner's, or 0.

        If it fails, the next use of the owner raises the error; without an owner, the next call without one does.
        """
        number = 0
        if owner is None:
            self._has_posted, self._follower = True, None
        else:
            number = owner.number
        outbox = self._outbox
        command = pack(op, number, *values)
        outbox.append(command)
        self._queued_bytes += len(command)
        if len(outbox) == 1:
            self._flush()
        if self._queued_bytes > MANY_BYTES and self._hurry is not None:
            self._hurry()
        return number

    def ask(self, op: Op, *values: float | bytes, owner: Resource | None = None) -> Call:
        """Send a command and get an awaitable for its answer."""
        call = Call(self.number(), owner, self.cancel)
        self._begin(call, op, values)
        if owner is None and self._has_posted:
            self._has_posted, self._follower = False, call
        return call

    def stream(self, op: Op, *values: float | bytes, owner: Resource | None = None) -> Stream:
        """Send a command that is answered in parts."""
        stream = Stream(self.number(), owner, self.cancel)
        self._begin(stream, op, values)
        return stream

    def cancel(self, number: int) -> None:
        """Tell the host that the program gives up a call."""
        self.post(Op.CANCEL, number)

    def adopt(self, resource: Resource) -> None:
        """Route errors that carry its number to the resource."""
        self._resources[resource.number] = resource

    def forget(self, resource: Resource) -> None:
        """Drop errors that carry its number."""
        self._resources.pop(resource.number, None)

    # For the runner of the program

    def take(self) -> bytes:
        """All commands since the last call, as one message."""
        data = b"".join(self._outbox)
        self._outbox.clear()
        self._queued_bytes = 0
        return data

    def dispatch(self, data: bytes) -> None:
        """Hand each event of a message to its call or resource. Raises `WireError` for bytes that are not events."""
        calls = self._calls
        for kind, number, blobs in events(data):
            call = calls.get(number)
            if call is not None:
                if call.receive(kind, blobs):
                    del calls[number]
            elif kind == EventKind.ERROR:
                self._fail(number, error_of(blobs))

    def close(self, error: WeftError) -> None:
        """End all calls in flight with this error, when the connection has ended."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end([], error)

    # Inside

    def _begin(self, call: Call, op: Op, values: tuple[float | bytes, ...]) -> None:
        if self._failure is not None:
            self.raise_failure()
        outbox = self._outbox
        outbox.append(pack(op, call.number, *values))
        self._calls[call.number] = call
        if len(outbox) == 1:
            self._flush()

    def _fail(self, number: int, error: WeftError) -> None:
        resource = self._resources.get(number)
        if resource is not None:
            resource.fail(error)
        elif number == 0 and self._follower is not None and self._follower.is_awaited:
            self._follower.interrupt(error)
        elif number == 0:
            self.fail(error)


_CURRENT: ContextVar[Channel] = ContextVar("weft_channel")


def install(channel: Channel) -> Token[Channel]:
    """Make this the channel of the program that runs in this `contextvars` context."""
    return _CURRENT.set(channel)


def uninstall(token: Token[Channel]) -> None:
    """Restore the channel that was current before `install`."""
    _CURRENT.reset(token)


def current() -> Channel:
    """The channel of the calling program. Raises `NoProgram` outside a program."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise NoProgram(
            "no program runs here: weft.sdk works inside the `main` of a program; run it with `weft run program.py`"
        ) from None
