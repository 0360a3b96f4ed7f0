"""`ReplicaSet`: one of its engines dies while all are asked."""

from __future__ import annotations

import asyncio

import pytest

from weft.abi.errors import EngineDead
from weft.cluster import replicas
from weft.cluster.replicas import ReplicaSet
from weft.core.wire import SessionInfo, Sessions
from weft.testing.fake_engine import FakeEngine


class DyingEngine(FakeEngine):
    """Answers when it is asked whether it is ready, and dies before it is asked anything else."""

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        raise EngineDead("the engine died")


class StuckEngine(FakeEngine):
    """Is ready, and answers nothing."""

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        await asyncio.Event().wait()
        raise AssertionError


class SleepingEngine(FakeEngine):
    """Has one sequence, number 7, that sleeps."""

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        tokens = {"num_tokens": 1, "device_tokens": 1, "host_tokens": 0, "gone_tokens": 0}
        info = SessionInfo(id=7, request_id="r", state="intercepted", kind="sleep", waited_s=1.0, **tokens)
        return Sessions(query=0, sessions=[info], total=1)


def test_an_engine_that_is_stuck_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "ANSWER_TIMEOUT_S", 0.01)

    async def ask() -> None:
        assert (await ReplicaSet([StuckEngine(), FakeEngine()]).sessions("", 10)).total == 0
        with pytest.raises(EngineDead, match=r"no answer within 0\.01 s"):
            await ReplicaSet([StuckEngine()]).sessions("", 10)

    asyncio.run(ask())


def test_sessions_of_the_engines_that_answer() -> None:
    async def ask() -> None:
        found = await ReplicaSet([DyingEngine(), FakeEngine()]).sessions("", 10)
        assert (found.sessions, found.total) == ([], 0)
        with pytest.raises(EngineDead, match="the engine died"):
            await ReplicaSet([DyingEngine(), DyingEngine()]).sessions("", 10)

    asyncio.run(ask())


def test_a_session_names_its_engine_since_numbers_repeat() -> None:
    async def ask() -> None:
        engines = [SleepingEngine(), DyingEngine(), SleepingEngine()]
        found = await ReplicaSet(engines).sessions("", 10)
        assert [(session.engine, session.id) for session in found.sessions] == [(0, 7), (2, 7)]
        assert found.total == 2

    asyncio.run(ask())
