"""One child at a time: started, killed, started again, stopped."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable

import pytest

from weft.abi.errors import ConfigError
from weft.children.supervisor import MAX_SOCKET_PATH_BYTES, ChildSettings, ChildSupervisor

pytestmark = pytest.mark.slow


class Owner:
    """Notes what it is told; gives up after `lives` children."""

    def __init__(self, lives: int):
        self.lives = lives
        self.fails = False
        self.reasons: list[str] = []
        self.addresses: list[str] = []
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    def connect(self, address: str) -> None:
        self.addresses.append(address)

    def disconnect(self) -> None:
        pass

    def ping(self) -> None:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("a fault of the owner")
        self.heard.put_nowait("ping")

    def fail_next_ping(self) -> None:
        self.fails = True

    def lost(self, reason: str) -> bool:
        self.reasons.append(reason)
        self.heard.put_nowait("lost")
        return len(self.reasons) < self.lives


def run(how: str, lives: int, test: Callable[[ChildSupervisor, Owner], Awaitable[None]]) -> None:
    async def body() -> None:
        owner = Owner(lives)
        settings = ChildSettings(
            name="the child", module="tests.children.idle_child", args=how.encode(), deadline_s=float("inf")
        )
        child = ChildSupervisor(settings, owner)
        child.start()
        try:
            await asyncio.wait_for(test(child, owner), 60)
        finally:
            await child.close()
        assert child.folder is not None
        assert not child.folder.exists()
        assert not child.is_running

    asyncio.run(body())


async def until(owner: Owner, what: str) -> None:
    while await owner.heard.get() != what:
        pass


def test_a_child_that_is_killed_is_replaced_and_the_last_one_ends_by_itself() -> None:
    async def test(child: ChildSupervisor, owner: Owner) -> None:
        await until(owner, "ping")
        first = child.pid
        os.kill(first or 0, signal.SIGTERM)  # which is the front's
        await until(owner, "ping")
        os.kill(first or 0, signal.SIGKILL)
        await until(owner, "lost")
        await until(owner, "ping")
        process = child.process
        assert child.pid not in (None, first)
        assert child.num_restarts == 1
        assert len(set(owner.addresses)) == 2
        await child.close()
        assert process is not None
        assert process.returncode == 0
        assert owner.reasons == ["was killed by SIGKILL"]

    run("wait", 9, test)


def test_a_child_is_started_again_whatever_ended_it_and_though_its_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.children.supervisor.FIRST_PAUSE_S", 0.01)

    async def test(child: ChildSupervisor, owner: Owner) -> None:
        for ends, reason in (
            (lambda: os.kill(child.pid or 0, signal.SIGRTMIN + 3), f"was killed by signal {signal.SIGRTMIN + 3}"),
            (lambda: owner.fail_next_ping(), "cannot be watched: ZeroDivisionError('a fault of the owner')"),
        ):
            await until(owner, "ping")
            assert child.folder is not None
            shutil.rmtree(child.folder)
            ends()
            await until(owner, "lost")
            assert owner.reasons[-1] == reason
        await until(owner, "ping")

    run("wait", 3, test)


def test_an_owner_may_give_up() -> None:
    async def test(child: ChildSupervisor, owner: Owner) -> None:
        await until(owner, "lost")
        await until(owner, "lost")
        while child.is_running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert owner.reasons == ["ended with status 7"] * 2
        assert child.pid is None

    run("end", 2, test)


def test_a_stop_that_is_given_up_is_done_by_the_next_one() -> None:
    async def test(child: ChildSupervisor, owner: Owner) -> None:
        await until(owner, "ping")
        process = child.process
        assert process is not None
        stopping = asyncio.create_task(child.stop(kill=False))
        await asyncio.sleep(0)
        stopping.cancel()
        await child.close()
        assert process.returncode is not None

    run("wait", 1, test)


def test_a_folder_without_room_for_a_socket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    room = MAX_SOCKET_PATH_BYTES - len("/weft-12345678/idle_child-12345-4194304")

    async def start(folder: str) -> bool:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        settings = ChildSettings(name="", module="tests.idle_child", args=b"", deadline_s=float("inf"))
        child = ChildSupervisor(settings, Owner(1))
        child.start()
        is_running = child.is_running
        await child.close()
        return is_running

    assert asyncio.run(start("/" + "x" * (room - 1)))
    with pytest.raises(ConfigError, match=r"xxx, is 3 bytes too long for a socket in it: set TMPDIR"):
        asyncio.run(start("/" + "x" * (room + 2)))
