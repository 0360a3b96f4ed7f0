"""The program's own run: its arguments, its log, and messages to and from the clients attached to it.

from weft.sdk import run

await run.receive()                 # the next message from a client
run.send({"progress": 0.5})         # a message to all clients attached
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Any

from weft.abi.operations import Op
from weft.sdk.answers import Answer, json_of, nothing
from weft.sdk.calls import Call
from weft.sdk.channel import current
from weft.sdk.main import encode

_PENDING = "receive"
_ARGS = "args"


class LogLevel(IntEnum):
    """Severity of a line of the run's log."""

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


def args() -> Any:
    """The arguments of the run: the same value as the argument of `main`."""
    return current().values.get(_ARGS)


def set_args(value: object) -> None:
    """Set the value that `args` returns. The runner calls it before `main`."""
    current().values[_ARGS] = value


def send(message: object) -> None:
    """Send a JSON value to the clients attached to the run. Returns at once; messages arrive in order.

    Raises `InvalidRequest` for a value without a JSON form. If it exceeds a limit, the next call raises the error.
    """
    current().post(Op.SEND, encode(message, "the message"))


async def receive() -> Any:
    """Wait for the next message from a client attached to the run and return it.

    With `asyncio.timeout` around it no message is lost: the next `receive` returns a message that came too late.
    """
    values = current().values
    call: Call | None = values.get(_PENDING)
    if call is None:
        call = current().ask(Op.RECEIVE)
        call.keep = True
        values[_PENDING] = call
    try:
        blobs = await call
    except BaseException:
        # An error of an earlier command, or a cancelled task, leaves the call to the next `receive`.
        if call.failed:
            values.pop(_PENDING, None)
        raise
    values.pop(_PENDING, None)
    return json_of(blobs)


async def messages() -> AsyncIterator[Any]:
    """Iterate over all messages. The iteration never ends by itself."""
    while True:
        yield await receive()


def log(text: object, level: LogLevel = LogLevel.INFO) -> None:
    """Write a line to the run's log."""
    current().post(Op.LOG, int(level), str(text).encode("utf-8", "replace"))


def sleep(seconds: float) -> Answer[None]:
    """Sleep for `seconds`. KV that the program holds may be swapped out meanwhile.

    `asyncio.sleep` sleeps too, but the server cannot see it.
    """
    return Answer(current().ask(Op.SLEEP, float(seconds)), nothing)


def now() -> float:
    """The wall-clock time in seconds since the epoch."""
    return time.time()
