"""A program's end of the wire: numbers of calls, commands on their way out, and the way of each event to its waiter.

Owns what is under way between a program and its host. It does not know what operations mean, nor how bytes travel:
whoever runs the program gives it a `flush`, takes commands with `take`, and hands events to `dispatch`. Used from one
event loop only.

A command that does not answer (`post`) names the resource it is about as its call, so that an ERROR finds the resource
without a table of all that was ever said: the error waits there and is raised by the next thing done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from weft.abi.errors import NoProgram, UnknownHandle, WeftError
from weft.abi.frames import EventKind, events, pack
from weft.abi.operations import Op
from weft.sdk.calls import Call, Stream, error_of

MANY_BYTES = 64 << 10
"""Of commands that are queued."""


class Resource:
    """Something of the host's that a program holds by a number: a sequence, a queue, a child, ...

    `noun` is what errors call it.
    """

    noun = "resource"

    def __init__(self, channel: Channel):
        self.channel = channel
        self.number = channel.number()
        self._failure: WeftError | None = None
        self._is_open = True
        channel.adopt(self)

    @property
    def is_open(self) -> bool:
        """Whether it was not given back yet."""
        return self._is_open

    def check(self) -> None:
        """Raise `UnknownHandle` if it was given back, or what went wrong with it since the last look."""
        if not self._is_open:
            raise UnknownHandle(f"{self.noun} {self.number} was given back; open another one")
        if self._failure is not None:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what went wrong since the last look, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def fail(self, error: WeftError) -> None:
        """Remember an error for whoever looks next. The first counts: later ones follow from it."""
        if self._failure is None:
            self._failure = error

    def close(self) -> None:
        """It is given back: from now on `check` raises."""
        self._is_open = False
        self.channel.forget(self)


class Channel:
    """Of one program that runs.

    `flush` is called when something is queued while nothing was: it makes sure that somebody calls `take` soon.
    `hurry` is called when much is queued, by a program that says one thing after the other and never awaits: it calls
    `take` before it returns.
    """

    def __init__(self, flush: Callable[[], None], hurry: Callable[[], None] | None = None):
        self._flush = flush
        self._hurry = hurry
        self._queued_bytes = 0
        # Calls and handles share one counter, so that a post may use its resource's number as its call.
        self._last = 0
        self._outbox: list[bytes] = []
        self._calls: dict[int, Call] = {}
        self._resources: dict[int, Resource] = {}
        self._failure: WeftError | None = None
        self.values: dict[str, Any] = {}
        """What modules of the library keep for this program: models, the arguments, ..."""

    # ---- for the library

    def number(self, count: int = 1) -> int:
        """A number for a call or a handle, never the same again; the first of `count` in a row."""
        first = self._last + 1
        self._last += count
        return first

    def unused(self, first: int) -> None:
        """Numbers from `first` on are free again. Only right after they were given out."""
        self._last = first - 1

    @property
    def last_number(self) -> int:
        """The last number that was given out."""
        return self._last

    def post(self, op: Op, *values: float | bytes, owner: Resource | None = None) -> int:
        """Say something that has no answer; its call's number: the owner's, or 0.

        Should it fail, then the next thing done with the owner raises the error; without one, the next call that has
        none either.
        """
        number = 0 if owner is None else owner.number
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
        """Say something and get an awaitable for the answer."""
        call = Call(self, self.number(), owner)
        self._begin(call, op, values)
        return call

    def stream(self, op: Op, *values: float | bytes, owner: Resource | None = None) -> Stream:
        """Say something that is answered in parts."""
        stream = Stream(self, self.number(), owner)
        self._begin(stream, op, values)
        return stream

    def adopt(self, resource: Resource) -> None:
        """Errors that carry its number are its own from now on."""
        self._resources[resource.number] = resource

    def forget(self, resource: Resource) -> None:
        """Errors that carry its number interest nobody any more."""
        self._resources.pop(resource.number, None)

    # ---- for whoever runs the program

    def take(self) -> bytes:
        """All commands since the last time, as one message."""
        data = b"".join(self._outbox)
        self._outbox.clear()
        self._queued_bytes = 0
        return data

    def dispatch(self, data: bytes) -> None:
        """Hand each event of a message to whoever waits for it. Raises `WireError` for bytes that are none."""
        calls = self._calls
        for kind, number, blobs in events(data):
            call = calls.get(number)
            if call is not None:
                if call.receive(kind, blobs):
                    del calls[number]
            elif kind == EventKind.ERROR:
                self._fail(number, error_of(blobs))

    def raise_failure(self) -> None:
        """Raise what went wrong with something that belongs to no call and no resource, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, error: WeftError) -> None:
        """Nothing comes any more: all calls that are under way end with this error."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end([], error)

    # ---- inside

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
        elif number == 0 and self._failure is None:
            self._failure = error


_CURRENT: ContextVar[Channel] = ContextVar("weft_channel")


def install(channel: Channel) -> Token[Channel]:
    """Make this the channel of the program that runs in this context."""
    return _CURRENT.set(channel)


def uninstall(token: Token[Channel]) -> None:
    """Undo an `install`."""
    _CURRENT.reset(token)


def current() -> Channel:
    """The channel of the program that calls. Raises `NoProgram` where none runs."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise NoProgram(
            "no program runs here: weft.sdk works inside the `main` of a program; run it with `weft run program.py`"
        ) from None
