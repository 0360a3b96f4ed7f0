"""Threads that tenants share: the order of service, the charged time, and isolation from a tenant with much work."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from weft.abi.errors import Overloaded
from weft.threads import FairQueue, FairThreads


def served(queue: FairQueue[str], count: int, cost_s: float = 1.0) -> list[str]:
    """Jobs in the order in which one thread does them."""
    order = []
    for _ in range(count):
        taken = queue.take()
        assert taken is not None
        order.append(taken[1])
        queue.done(taken[0], cost_s)
    return order


def test_a_tenant_that_asks_for_much_waits_for_itself() -> None:
    queue: FairQueue[str] = FairQueue(1)
    for number in range(5):
        queue.put("a", f"a{number}")
    queue.put("b", "b0")
    queue.put("b", "b1")
    assert served(queue, 7) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]
    assert queue.take() is None
    assert len(queue) == 0


def test_costly_jobs_are_paid_with_turns() -> None:
    queue: FairQueue[str] = FairQueue(1)
    for number in range(3):
        queue.put("a", f"a{number}")
    for number in range(7):
        queue.put("b", f"b{number}")
    order = []
    for _ in range(8):
        taken = queue.take()
        assert taken is not None
        order.append(taken[1])
        queue.done(taken[0], 3.0 if taken[0] == "a" else 1.0)
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "b5"]


def test_no_tenant_has_all_threads() -> None:
    queue: FairQueue[int] = FairQueue(2)
    for number in range(4):
        queue.put("a", number)
    assert [queue.take(), queue.take(), queue.take()] == [("a", 0), ("a", 1), None]
    queue.put("b", 9)
    assert queue.take() == ("b", 9)
    queue.done("a", 1.0)
    assert queue.take() == ("a", 2)


def test_who_comes_back_has_saved_nothing_and_owes_nothing() -> None:
    queue: FairQueue[str] = FairQueue(1)
    queue.put("a", "a0")
    queue.put("a", "a1")
    served(queue, 1, 100.0)
    queue.put("b", "b0")
    queue.put("b", "b1")
    # b starts where a is; at a tie the first to come is first.
    assert served(queue, 3) == ["a1", "b0", "b1"]


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    async def body() -> None:
        threads = FairThreads(2, per_tenant=1, name="test")
        gate = threading.Event()
        flood = [asyncio.ensure_future(threads.run(gate.wait, tenant="a")) for _ in range(50)]
        await asyncio.sleep(0)
        assert await threads.run(lambda: 7, tenant="b") == 7
        assert not any(task.done() for task in flood)
        gate.set()
        assert await asyncio.gather(*flood) == [True] * 50
        threads.close()

    asyncio.run(body())


def test_what_a_job_takes_is_charged_also_where_nobody_waits_any_more() -> None:
    async def body() -> None:
        threads = FairThreads(1, per_tenant=1, name="test")
        charged: list[float] = []
        await threads.run(lambda: sum(range(10_000)), charge=charged.append)
        await asyncio.sleep(0)
        assert len(charged) == 1
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 / 0, charge=charged.append)
        begun, gate = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            gate.wait()

        task = asyncio.ensure_future(threads.run(work, charge=charged.append))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        gate.set()
        await threads.run(lambda: None, charge=charged.append)
        await asyncio.sleep(0)
        assert len(charged) == 4
        assert all(seconds >= 0 for seconds in charged)
        threads.close()

    asyncio.run(body())


def test_closed_threads_begin_nothing() -> None:
    threads = FairThreads(1, per_tenant=1, name="test")
    begun, gate = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return gate.wait()

    first = threads.submit(work)
    begun.wait()
    waiting = threads.submit(lambda: None)
    threads.close()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError):
        threads.submit(lambda: None)
    gate.set()
    assert first.result() is True


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a limit of processes does to a process that has reached it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_job_that_gets_no_thread_fails_and_the_pool_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads(2, per_tenant=1, name="test")
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        with pytest.raises(Overloaded, match="cannot start a thread"):
            threads.submit(lambda: 1).result()
    assert threads.submit(lambda: 2).result() == 2
    threads.close()


def test_a_job_that_gets_no_thread_of_its_own_runs_on_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads(2, per_tenant=1, name="test")
    begun, gate = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return gate.wait()

    first = threads.submit(work, tenant="a")
    begun.wait()
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        waiting = [threads.submit(lambda: 2, tenant=tenant) for tenant in "ab"]
    gate.set()
    assert [first.result(), *(future.result() for future in waiting)] == [True, 2, 2]
    assert threads.submit(lambda: 3).result() == 3
    threads.close()


def test_threads_begin_with_the_stack_that_their_jobs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    before = threading.stack_size()
    small = FairThreads(1, per_tenant=1, name="small")
    large = FairThreads(2, per_tenant=2, name="large", stack_bytes=64 << 20)
    together = threading.Barrier(2)
    small.submit(lambda: None).result()
    jobs = [large.submit(together.wait) for _ in range(2)]
    assert sorted(job.result() for job in jobs) == [0, 1]
    assert sizes == [before, 64 << 20, 64 << 20]
    assert threading.stack_size() == before, "of other threads of the process"
    small.close()
    large.close()
