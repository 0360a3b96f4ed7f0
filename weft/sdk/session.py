"""The program's talk with whoever launched it, or is attached to its run: the talking part of the Core trait.

from weft.sdk import session

await session.receive()                 # the next message from there
session.send({"progress": 0.5})         # a message to there
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Any

from weft.sdk.answers import Answer, json_of, nothing
from weft.sdk.calls import Call
from weft.sdk.channel import current
from weft.sdk.main import encode
from weft.sdk.wire import Op

_PENDING = "receive"
_ARGS = "args"


class Level(IntEnum):
    """Of a line of the log."""

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


def args() -> Any:
    """What the run was launched with: the same as the argument of `main`."""
    return current().values.get(_ARGS)


def set_args(value: object) -> None:
    """For whoever runs the program: what `args` is to return."""
    current().values[_ARGS] = value


def send(message: object) -> None:
    """Send a JSON value to whoever listens to the run. Returns at once; messages arrive in order.

    Raises `InvalidRequest` for what is no JSON; a limit that it breaks is raised by the next call.
    """
    current().post(Op.SEND, encode(message, "the message"))


async def receive() -> Any:
    """The next message of whoever is attached to the run. Waits for one.

    With `asyncio.timeout` around it, a message that comes too late is the next `receive`'s: none is lost.
    """
    values = current().values
    call: Call | None = values.get(_PENDING)
    if call is None:
        call = current().ask(Op.RECEIVE)
        call.keep = True
        values[_PENDING] = call
    try:
        blobs = await call
    finally:
        if call.ended:
            values.pop(_PENDING, None)
    return json_of(blobs)


async def messages() -> AsyncIterator[Any]:
    """All messages, one after the other, without an end."""
    while True:
        yield await receive()


def log(text: object, level: Level = Level.INFO) -> None:
    """A line of the run's log."""
    current().post(Op.LOG, int(level), str(text).encode("utf-8", "replace"))


def sleep(seconds: float) -> Answer[None]:
    """Wait. What the program holds meanwhile may be swapped out; `asyncio.sleep` waits without telling the server."""
    return Answer(current().ask(Op.SLEEP, float(seconds)), nothing)


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
