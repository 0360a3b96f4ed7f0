from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import pytest

from weft.abi.frames import EventKind, WireError, commands, pack_event
from weft.abi.operations import Op
from weft.sdk import channel as channels
from weft.sdk import errors, run
from weft.sdk.channel import MANY_BYTES, Channel, Resource

P = ParamSpec("P")


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await test(*args, **kwargs)

        asyncio.run(whole())

    return run


class Log:
    """A channel whose flushes are counted."""

    def __init__(self) -> None:
        self.num_flushes = 0
        self.channel = Channel(self._flush)

    def _flush(self) -> None:
        self.num_flushes += 1

    def taken(self) -> list[tuple[Op, int]]:
        return [(command.op, command.call) for command in commands(self.channel.take())]


def failure(call: int, kind: str = "out_of_pages", message: str = "none left", param: str = "") -> bytes:
    return pack_event(EventKind.ERROR, call, kind.encode(), message.encode(), param.encode())


async def waited(call: Awaitable[list[bytes]]) -> list[bytes]:
    return await call


def test_commands_leave_in_order_and_one_flush_asks_for_all_of_them() -> None:
    log = Log()
    log.channel.post(Op.LOG, 1, b"a")
    call = log.channel.ask(Op.TOKENIZE, 1, b"b")
    stream = log.channel.stream(Op.SUBSCRIBE, b"c")
    assert log.num_flushes == 1
    assert log.taken() == [(Op.LOG, 0), (Op.TOKENIZE, call.number), (Op.SUBSCRIBE, stream.number)]
    assert log.channel.take() == b""
    log.channel.post(Op.LOG, 1, b"d")
    assert log.num_flushes == 2


def test_much_that_is_said_at_once_leaves_before_the_program_awaits() -> None:
    taken: list[int] = []
    channel = Channel(lambda: None, lambda: taken.append(len(channel.take())))
    said = b"x" * 1000
    for _ in range(10 * MANY_BYTES // len(said)):
        channel.post(Op.SEND, said)
    assert 9 <= len(taken) <= 10
    assert all(MANY_BYTES < size < MANY_BYTES + 2 * len(said) for size in taken)


def test_numbers_of_calls_and_handles_are_never_the_same() -> None:
    channel = Log().channel
    numbers = [Resource(channel).number, channel.ask(Op.MODELS).number, channel.number(10), channel.number()]
    assert numbers == [1, 2, 3, 13]
    channel.unused(5)
    assert channel.last_number == 4


@in_loop
async def test_an_answer_that_came_before_the_await_and_one_that_comes_later() -> None:
    channel = Log().channel
    early, late = channel.ask(Op.MODELS), channel.ask(Op.MODELS)
    channel.dispatch(pack_event(EventKind.RESULT, early.number, b"one", b"two"))
    assert await early == [b"one", b"two"]
    waiting = asyncio.ensure_future(late)
    await asyncio.sleep(0)
    channel.dispatch(pack_event(EventKind.RESULT, late.number, b"three"))
    assert await waiting == [b"three"]
    assert await late == [b"three"]


@in_loop
async def test_errors_of_the_host_are_exceptions_by_kind() -> None:
    channel = Log().channel
    for cls in (errors.InvalidRequest, errors.OutOfPages, errors.LimitExceeded, errors.NetworkDenied):
        call = channel.ask(Op.MODELS)
        channel.dispatch(failure(call.number, cls.kind, "so it is", "pages"))
        with pytest.raises(cls, match="so it is") as raised:
            await call
        assert raised.value.param == "pages"
    call = channel.ask(Op.MODELS)
    channel.dispatch(failure(call.number, "of_tomorrow"))
    with pytest.raises(errors.ProgramError) as other:
        await call
    assert (other.value.kind, other.value.param) == ("of_tomorrow", None)


@in_loop
async def test_an_error_without_a_waiter_is_its_resources_and_raised_once() -> None:
    channel = Log().channel
    resource, other = Resource(channel), Resource(channel)
    assert channel.post(Op.SEQ_APPEND, resource.number, b"", owner=resource) == resource.number
    channel.dispatch(failure(resource.number))
    other.check()
    with pytest.raises(errors.OutOfPages):
        resource.check()
    resource.check()


@in_loop
async def test_an_error_without_an_owner_is_raised_by_the_next_call() -> None:
    log = Log()
    channel = log.channel
    earlier = asyncio.ensure_future(waited(channel.ask(Op.MODELS)))
    channel.post(Op.SEND, b"1")
    following = asyncio.ensure_future(waited(channel.ask(Op.STORE_GET, b"x")))
    another = asyncio.ensure_future(waited(channel.ask(Op.STORE_GET, b"y")))
    await asyncio.sleep(0)
    channel.dispatch(failure(0, "limit_exceeded"))
    with pytest.raises(errors.LimitExceeded):
        await following
    # What nobody reads is given up; the error is raised once, and by no other call.
    asked = [(Op.MODELS, 1), (Op.SEND, 0), (Op.STORE_GET, 2), (Op.STORE_GET, 3)]
    assert log.taken() == [*asked, (Op.CANCEL, 0)]
    for call, task in ((1, earlier), (3, another)):
        channel.dispatch(pack_event(EventKind.RESULT, call))
        assert await task == []
    channel.dispatch(failure(2, "cancelled"))
    channel.ask(Op.MODELS)


@in_loop
async def test_an_error_of_a_later_command_is_kept_for_the_call_behind_it() -> None:
    channel = Log().channel
    channel.post(Op.SEND, b"1")
    earlier = asyncio.ensure_future(waited(channel.ask(Op.SLEEP, 1.0)))
    await asyncio.sleep(0)
    channel.post(Op.SEND, b"2")
    channel.dispatch(failure(0) + pack_event(EventKind.RESULT, 1))
    assert await earlier == []
    with pytest.raises(errors.OutOfPages):
        channel.ask(Op.MODELS)
    channel.ask(Op.MODELS)


@in_loop
async def test_an_earlier_error_takes_no_message_from_receive() -> None:
    channel = Log().channel
    token = channels.install(channel)
    try:
        for together in (True, False):
            run.send("refused")
            receiving = asyncio.ensure_future(run.receive())
            await asyncio.sleep(0)
            message = pack_event(EventKind.RESULT, channel.last_number, b'"kept"')
            channel.dispatch(failure(0) + message if together else failure(0))
            with pytest.raises(errors.OutOfPages):
                await receiving
            if not together:
                channel.dispatch(message)
            assert await run.receive() == "kept"
        receiving = asyncio.ensure_future(run.receive())
        await asyncio.sleep(0)
        channel.dispatch(failure(channel.last_number))
        with pytest.raises(errors.OutOfPages):
            await receiving
        assert run._PENDING not in channel.values
    finally:
        channels.uninstall(token)


@in_loop
async def test_an_earlier_error_of_the_resource_is_raised_by_the_call_that_waits() -> None:
    channel = Log().channel
    resource = Resource(channel)
    call = channel.ask(Op.SEQ_DIST, resource.number, 1, b"", owner=resource)
    channel.dispatch(failure(resource.number) + failure(call.number, "engine_dead"))
    with pytest.raises(errors.OutOfPages):
        await call


@in_loop
async def test_an_unheard_answer_spills_its_error_to_the_resource() -> None:
    channel = Log().channel
    resource = Resource(channel)
    call = channel.ask(Op.PAGES_ALLOC, resource.number, 1, 1, owner=resource)
    call.spill = True
    channel.dispatch(failure(call.number))
    with pytest.raises(errors.OutOfPages):
        resource.check()


def test_an_error_that_belongs_to_nothing_is_raised_by_the_next_call() -> None:
    channel = Log().channel
    channel.post(Op.SEND, b"1")
    channel.dispatch(failure(0, "limit_exceeded"))
    with pytest.raises(errors.LimitExceeded):
        channel.ask(Op.MODELS)
    channel.ask(Op.MODELS)


def test_a_resource_that_was_given_back_says_so_and_hears_nothing_more() -> None:
    channel = Log().channel
    resource = Resource(channel)
    resource.close()
    channel.dispatch(failure(resource.number))
    with pytest.raises(errors.UnknownHandle, match="was released"):
        resource.check()


@in_loop
async def test_parts_then_the_result() -> None:
    channel = Log().channel
    stream = channel.stream(Op.SUBSCRIBE, b"topic")
    parts: list[list[bytes]] = []

    async def read() -> None:
        async for part in stream:
            parts.append(part)

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    channel.dispatch(pack_event(EventKind.PART, stream.number, b"1") + pack_event(EventKind.PART, stream.number, b"2"))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        _ = stream.result
    channel.dispatch(
        pack_event(EventKind.PART, stream.number, b"3") + pack_event(EventKind.RESULT, stream.number, b"end")
    )
    await reading
    assert parts == [[b"1"], [b"2"], [b"3"]]
    assert stream.result == [b"end"]


@in_loop
async def test_parts_before_an_error_are_read_first() -> None:
    channel = Log().channel
    stream = channel.stream(Op.SUBSCRIBE, b"topic")
    channel.dispatch(pack_event(EventKind.PART, stream.number, b"1") + failure(stream.number))
    assert await anext(stream) == [b"1"]
    with pytest.raises(errors.OutOfPages):
        await anext(stream)


@pytest.mark.parametrize("keep", [False, True])
@in_loop
async def test_a_task_that_is_cancelled_takes_its_call_with_it_unless_it_is_kept(keep: bool) -> None:
    log = Log()
    call = log.channel.ask(Op.RECEIVE)
    call.keep = keep
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    log.taken()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert log.taken() == ([] if keep else [(Op.CANCEL, 0)])
    log.channel.dispatch(pack_event(EventKind.RESULT, call.number, b"late"))
    assert await call == [b"late"]


@in_loop
async def test_two_tasks_cannot_wait_for_one_call() -> None:
    call = Log().channel.ask(Op.RECEIVE)
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks"):
        await call
    waiting.cancel()


@in_loop
async def test_closing_ends_what_is_under_way() -> None:
    channel = Log().channel
    call = channel.ask(Op.RECEIVE)
    channel.close(errors.EngineDead("gone"))
    with pytest.raises(errors.EngineDead):
        await call


@pytest.mark.parametrize(
    "data",
    [
        b"\1\2\3",
        bytes([6, 0, 0, 0, len(EventKind), 1, 0, 0, 0, 0]),
        bytes([10, 0, 0, 0, EventKind.RESULT, 1, 0, 0, 0, 2, 0, 0, 0, 0]),
        bytes([10, 0, 0, 0, EventKind.RESULT, 1, 0, 0, 0, 1, 1, 0, 0, 0]),
    ],
)
def test_bytes_that_are_no_events(data: bytes) -> None:
    with pytest.raises(WireError):
        Log().channel.dispatch(data)


def test_outside_a_program_the_library_says_how_to_run_one() -> None:
    with pytest.raises(errors.NoProgram, match="weft run"):
        channels.current()
    channel = Log().channel
    token = channels.install(channel)
    assert channels.current() is channel
    channels.uninstall(token)
