"""Who may have a worker, and that it ends with the task that waits for it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from weft.abi.errors import Overloaded
from weft.programs.sandbox.workers import WorkerKilled, WorkerPool, WorkerProcess


class Work:
    """Tasks that end when they are told to; what has begun, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, name: str):
        gate = self.gates[name] = threading.Event()

        def work(worker: WorkerProcess) -> str:
            self.begun.append(name)
            assert gate.wait(60)
            return name

        return work


async def until(what) -> None:
    while not what():  # noqa: ASYNC110 (threads do it)
        await asyncio.sleep(0.001)


def test_a_tenant_has_one_at_a_time_and_others_do_not_wait_for_it() -> None:
    async def test() -> None:
        pool, work = WorkerPool(2), Work()
        tasks = {
            name: asyncio.ensure_future(pool.call(name[0], work(name))) for name in ("a1", "a2", "a3", "b1", "b2", "c1")
        }
        await until(lambda: len(work.begun) == 2)
        assert set(work.begun) == {"a1", "b1"}
        work.gates["a1"].set()
        # c has had none yet; what else a and b have comes after it.
        await until(lambda: len(work.begun) == 3)
        assert work.begun[2] == "c1"
        for gate in work.gates.values():
            gate.set()
        assert [await task for task in tasks.values()] == list(tasks)
        assert pool.num_running == 0
        assert not pool._waiting
        await pool.close()

    asyncio.run(test())


def test_one_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    async def test() -> None:
        pool, work = WorkerPool(1), Work()
        first, second, third = (asyncio.ensure_future(pool.call("t", work(name))) for name in "123")
        await until(lambda: work.begun == ["1"])
        second.cancel()
        work.gates["1"].set()
        work.gates["3"].set()
        assert (await first, await third) == ("1", "3")
        assert work.begun == ["1", "3"]
        assert pool.num_running == 0
        await pool.close()

    asyncio.run(test())


def test_one_that_is_cancelled_in_the_moment_in_which_its_turn_comes_takes_none() -> None:
    """A task notices its cancellation in a later turn of the loop, and the place is given away in this one."""

    async def test() -> None:
        pool, work = WorkerPool(1), Work()
        later: list[asyncio.Future[str]] = []
        first = asyncio.ensure_future(pool.call("a", work("1"), lambda cpu_s: [task.cancel() for task in later[:2]]))
        later += [asyncio.ensure_future(pool.call(name[0], work(name))) for name in ("b2", "c3", "c4", "d5")]
        await until(lambda: work.begun == ["1"])
        for gate in work.gates.values():
            gate.set()
        assert await first == "1"
        assert [str(each) for each in await asyncio.gather(*later, return_exceptions=True)] == ["", "", "c4", "d5"]
        assert work.begun == ["1", "c4", "d5"]
        assert pool.num_running == 0
        assert not pool._waiting
        await pool.close()

    asyncio.run(test())


def test_one_that_is_cancelled_twice_gives_its_place_back() -> None:
    async def test() -> None:
        pool, work = WorkerPool(1), Work()
        charged: list[float] = []
        unseen: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        waits = work("1")

        def fails(worker: WorkerProcess) -> None:
            waits(worker)
            raise WorkerKilled

        task = asyncio.ensure_future(pool.call("t", fails, charged.append))
        await until(lambda: work.begun == ["1"])
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.num_running == 1, "its thread works"
        work.gates["1"].set()
        after = asyncio.ensure_future(pool.call("t", work("2")))
        work.gates["2"].set()
        assert await after == "2"
        assert len(charged) == 1
        assert not pool._workers
        gc.collect()
        assert not unseen
        await pool.close()

    asyncio.run(test())


def test_one_that_is_cancelled_has_its_process_killed_before_its_place_is_free() -> None:
    pids: list[int] = []

    async def test() -> float:
        pool, charged = WorkerPool(1), list[float]()

        def work(worker: WorkerProcess) -> None:
            worker.run("http.server", ["0", "--bind", "127.0.0.1"], b"")

        task = asyncio.ensure_future(pool.call("t", work, charged.append))
        await until(lambda: any(worker._pid for worker in pool._workers))
        [worker] = pool._workers
        pids.append(worker._pid or 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.num_running == 0
        await pool.close()
        return charged[0]

    assert asyncio.run(test()) >= 0
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_closing_kills_what_runs_and_says_so() -> None:
    async def test() -> None:
        pool = WorkerPool(1)
        task = asyncio.ensure_future(
            pool.call("t", lambda worker: worker.run("http.server", ["0", "--bind", "127.0.0.1"], b""))
        )
        await until(lambda: any(worker._pid for worker in pool._workers))
        await pool.close()
        with pytest.raises(WorkerKilled, match="shutting down"):
            await task

    asyncio.run(test())


def test_what_a_process_wrote_and_took() -> None:
    worker = WorkerProcess()
    ended = worker.run("base64", ["-e"], b"hello")
    assert (ended.status, ended.output, ended.errors) == (0, "aGVsbG8=\n", "")
    assert worker.cpu_s > 0
    ended = worker.run("weft.programs.sandbox.check_worker", ["python", "5", str(1 << 30)], b"x", bare=True)
    assert ended.status == 1
    assert "no `main`" in ended.errors


def test_one_that_gets_no_thread_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        pool = WorkerPool(1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(Overloaded, match="thread"):
                await pool.call("a", lambda worker: worker.cpu_s)
        assert pool.num_running == 0
        assert await pool.call("a", lambda worker: worker.cpu_s) == 0.0
        await pool.close()

    asyncio.run(test())
