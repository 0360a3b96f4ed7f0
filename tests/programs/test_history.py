"""Runs as the front keeps them: their states, listeners to their messages, and how many ended ones are kept."""

from __future__ import annotations

import asyncio

import pytest

from tests.programs.host.help import spec
from weft.abi.errors import (
    RunCancelled,
    SlowListener,
    WeftError,
)
from weft.programs.history import History
from weft.programs.run.listeners import LISTENER_BYTES, Listener
from weft.programs.run.runs import KEPT_MESSAGES, TRANSITIONS, Run, RunUsage


class _Idle:
    """Carries nothing out."""

    def deliver(self, message: bytes) -> None: ...

    def cancel(self, error: WeftError) -> None: ...

    async def confirm(self) -> None: ...

    def usage(self) -> RunUsage:
        return RunUsage()


def a_run(tenant: str = "t") -> Run:
    run = Run(spec("def main(): pass\n"), tenant)
    run.control = _Idle()
    return run


def test_one_table_of_states():
    async def test() -> None:
        run = a_run()
        with pytest.raises(RuntimeError, match="queued to finished"):
            run.finish(b"1")
        run.start()
        with pytest.raises(RuntimeError):
            run.start()
        run.finish(b"1")
        run.fail(RunCancelled("too late"))
        assert run.status == "finished"
        assert all(not TRANSITIONS[status] for status in ("finished", "failed", "cancelled"))

    asyncio.run(test())


def test_a_listener_that_never_reads_is_given_up_and_nobody_else_notices():
    async def test() -> None:
        run = a_run()
        run.start()
        deaf, keen = run.messages(), run.messages()
        for number in range(3 * KEPT_MESSAGES):
            run.emit(str(number).encode())
            assert keen.take() == str(number).encode()
        assert keen.take() is None
        with pytest.raises(SlowListener):
            await anext(deaf)
        late = run.messages()
        assert late.missed == 2 * KEPT_MESSAGES
        run.finish(b"1")
        assert len([message async for message in late]) == KEPT_MESSAGES
        assert [message async for message in keen] == []

    asyncio.run(test())


def test_large_messages_count_by_their_size():
    async def test() -> None:
        run = a_run()
        run.start()
        deaf = run.messages()
        for _ in range(LISTENER_BYTES // (1 << 20) + 2):
            run.emit(bytes(1 << 20))
        assert run.kept_bytes <= 2 << 20
        with pytest.raises(SlowListener):
            await anext(deaf)

    asyncio.run(test())


def test_history_is_bounded():
    async def test() -> None:
        history = History(max_ended=3, max_bytes=1000)
        runs = []
        for _ in range(5):
            run = a_run()
            history.add(run)
            run.start()
            runs.append(run)
        for run in runs:
            run.finish(bytes(400))
            history.ended(run)
        assert history.runs("t") == list(reversed(runs[2:]))
        assert [run.result is None for run in runs[2:]] == [True, False, False]
        alive = a_run()
        history.add(alive)
        assert list(history.active()) == [alive]
        for run in runs[2:]:
            history.forget("t", run.id)
        assert history.runs("t") == [alive]

    asyncio.run(test())


def test_a_closed_listener_hears_nothing():
    async def test() -> None:
        run = a_run()
        run.start()
        listener: Listener = run.messages()
        listener.close()
        run.emit(b"1")
        assert [message async for message in listener] == []

    asyncio.run(test())
