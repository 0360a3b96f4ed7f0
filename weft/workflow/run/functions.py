"""Calls of the user's own Python: functions of nodes, and what gives the values of `external` nodes.

Owns how such a call ends: with a JSON value, or with an error that fails its row and nothing else. An event loop takes
some exceptions as signals to itself: an interrupt ends the loop, a cancellation its task, `StopIteration` a coroutine.
None of them leaves this module as it was raised.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from weft.abi.errors import Unsupported
from weft.workflow.frontend.json_values import NotJson, as_json
from weft.workflow.function_args import call_args, name_of
from weft.workflow.graph.schema_check import schema_mistake
from weft.workflow.graph.values import TOO_DEEP, RowError, is_too_deep
from weft.workflow.run.instructions import AwaitExternal
from weft.workflow.run.refusals import no_function
from weft.workflow.run.value_errors import kind_of, message_of

FUNCTION_TIMEOUT_S = 300.0
MAX_VALUE_BYTES = 16 << 20
"""Of a value from a function, a program or outside, as JSON."""
External = Callable[[AwaitExternal], Any]
"""Gives the values of `external` nodes: a plain function, which runs on a thread, or a coroutine function."""


async def called_function(
    functions: Mapping[str, Callable[..., Any]], name: str, args: Mapping[str, Any], seconds: float
) -> Any:
    """The JSON value that a Python function returns; plain functions run on a thread. Raises `Unsupported` for one that
    is not there, `RowError` after so many seconds and for a value that is not JSON, and what the function raises."""
    called = functions.get(name)
    if called is None:
        raise Unsupported(no_function(name))
    async with time_limit(seconds, f"{name} did not return within {seconds:g} s"):
        by_position, by_name = call_args(called, args)
        return await _result(name, partial(called, *by_position, **by_name))


async def value_from(external: External, asked: AwaitExternal) -> Any:
    """The JSON value that `external` gives a node, without a limit of time. Raises `RowError` for a value that is not
    JSON or does not follow the schema of the node, and what `external` raises."""
    value = await _result(name_of(external), partial(external, asked))
    schema = asked.node.schema
    # On a thread: the check of a large value against its schema may take seconds.
    mistake = None if schema is None else await asyncio.to_thread(schema_mistake, schema, value)
    if mistake is not None:
        raise RowError(f"the value does not follow its schema: {mistake}", asked.node.id)
    return value


async def _result(name: str, call: partial[Any]) -> Any:
    """The JSON value of a call. Raises the exceptions of the call, signals to the event loop as a `RowError` that names
    them."""
    if inspect.iscoroutinefunction(call.func):
        return checked_value(await _awaited(name, call()))
    value, error = await asyncio.to_thread(_outcome, call)
    if error is not None:
        raise error if _is_plain(error) else _named(name, error)
    # Of an object that calls a coroutine function, such as a native function.
    return checked_value(await _awaited(name, value)) if inspect.iscoroutine(value) else value


async def _awaited(name: str, work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except BaseException as error:
        task = asyncio.current_task()
        is_ended = isinstance(error, GeneratorExit) or (task is not None and task.cancelling())
        if is_ended or _is_plain(error):  # ended: the task that calls, not the function
            raise
        raise _named(name, error) from error


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The JSON value or the exception of a call: futures cannot carry every exception. A coroutine is left as it is."""
    try:
        value = call()
        return value if inspect.iscoroutine(value) else checked_value(value), None
    except BaseException as error:
        return None, error


def _is_plain(error: BaseException) -> bool:
    """Whether an exception means nothing to an event loop."""
    return isinstance(error, Exception) and not isinstance(error, StopIteration)


def _named(name: str, error: BaseException) -> RowError:
    said = message_of(error)
    return RowError(f"{name} raised {kind_of(error)}{': ' if said else ''}{said}")


@asynccontextmanager
async def time_limit(seconds: float | None, message: str) -> AsyncIterator[None]:
    """Raise `RowError` with a message where the block takes longer. A `TimeoutError` of the block's own is raised as it
    is."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise RowError(message) from None
        raise


def no_value_within(seconds: float | None) -> str:
    """Why a row fails whose value from outside did not come in time."""
    return f"no value came within {seconds or 0:g} s"


def checked_value(value: Any) -> Any:
    """A value as plain JSON. Raises `RowError` for what is none, or is too large."""
    try:
        value = as_json(value)
        size = len(msgspec.json.encode(value))
    except NotJson as error:
        raise RowError(str(error)) from None
    if size > MAX_VALUE_BYTES:
        raise RowError(f"a value may have {MAX_VALUE_BYTES >> 20} MiB as JSON; this one has {size >> 20}")
    if is_too_deep(value):
        raise RowError(TOO_DEEP)
    return value
