"""Turns of guests that share a loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from tests.programs.sandbox.help import SHORT, FakeHost, execute
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.sandbox import Sandbox
from weft.programs.sandbox.turns import PASS_S, Turns

TURN_S = 0.002


def test_so_many_per_pass_in_order_and_cancelled_ones_take_none() -> None:
    async def run() -> list[list[int]]:
        turns = Turns(TURN_S)
        had: list[int] = []

        async def wait(number: int) -> None:
            await turns.next("a", part=0.5)
            had.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(7)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        passes = []
        while len(had) < 6:
            before = len(had)
            await asyncio.sleep(0)
            if had[before:]:
                passes.append(had[before:])
        assert tasks[3].cancelled()
        return passes

    assert execute(run()) == [[0, 1], [2, 4], [5, 6]]


def test_a_queue_outlives_its_loop_s_end() -> None:
    turns = Turns(TURN_S)

    async def abandoned() -> None:
        waiting = [asyncio.ensure_future(turns.next("a")) for _ in range(3)]
        await waiting[0]
        turns.spent("a", 2 * PASS_S)
        for task in waiting:
            task.cancel()

    asyncio.run(abandoned())
    execute(turns.next("a"))
    assert turns.runs_at_once("a")


class Guests:
    """Guests that compute without end, for so long in each turn; `order` is whose turns they had."""

    def __init__(self, part: float = 1.0) -> None:
        self.turns = Turns(TURN_S)
        self.part = part
        self.order: list[str] = []
        self._until = (0, asyncio.Event())
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, tenant: str, count: int = 1, turn_s: float = TURN_S) -> None:
        self._tasks += [asyncio.create_task(self._spin(tenant, turn_s)) for _ in range(count)]

    async def had(self, count: int) -> None:
        if len(self.order) < count:
            self._until = (count, asyncio.Event())
            await self._until[1].wait()

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _spin(self, tenant: str, turn_s: float) -> None:
        while True:
            await self.turns.next(tenant, part=self.part)
            self.order.append(tenant)
            if len(self.order) == self._until[0]:
                self._until[1].set()
            self.turns.spent(tenant, turn_s)


def order_of(begin: Callable[[Guests], None], *, part: float = 1.0, before: int = 0, count: int) -> list[str]:
    """The turns since `begin`, after so many of a hundred guests of tenant a."""

    async def run() -> list[str]:
        guests = Guests(part)
        guests.begin("a", 100)
        await guests.had(before)
        num_before = len(guests.order)
        begin(guests)
        await guests.had(num_before + count)
        guests.end()
        return guests.order[num_before:]

    return execute(run())


@pytest.mark.parametrize("part", [1.0, 1 / 8])
def test_one_guest_has_as_many_turns_as_a_hundred_of_another_tenant(part: float) -> None:
    order = order_of(lambda guests: guests.begin("b"), part=part, before=1000, count=1000)
    # It waits for what had begun when it came, and then for one turn of the other each time.
    first = order.index("b")
    assert first <= 2 / part
    assert "aa" not in "".join(order[first:])


def test_a_tenant_waits_for_at_most_one_turn_of_each_other() -> None:
    def begin(guests: Guests) -> None:
        for tenant in "cdefghi":
            guests.begin(tenant, 10)
        guests.begin("b")

    order = order_of(begin, before=500, count=1000)
    at = [index for index, tenant in enumerate(order) if tenant == "b"]
    assert len(at) >= 100
    for begun, ended in zip([-1, *at], at, strict=False):
        assert max(Counter(order[begun + 1 : ended]).values()) <= 2 if begun < 0 else 1


def test_turns_are_counted_by_what_they_take() -> None:
    order = order_of(lambda guests: guests.begin("b", 3, TURN_S / 4), before=100, count=1000)
    counts = Counter(order)
    assert counts["b"] == pytest.approx(4 * counts["a"], rel=0.02)


def test_a_tenant_that_comes_again_has_saved_nothing_and_owes_nothing() -> None:
    async def run() -> list[str]:
        guests = Guests()
        for _ in range(1000):
            guests.turns.spent("b", TURN_S)
        guests.begin("a", 2)
        await guests.had(100)
        guests.begin("c")
        await guests.had(200)
        guests.begin("b")
        await guests.had(300)
        guests.end()
        return guests.order

    order = execute(run())
    assert abs(Counter(order[100:200])["a"] - 50) <= 2, "c has no turns to catch up on"
    assert Counter(order[200:])["b"] >= 30


def test_answered_guests_pass_those_of_their_tenant_and_no_tenant_that_is_owed_a_turn() -> None:
    async def run() -> None:
        turns = Turns(TURN_S)
        spinning = asyncio.create_task(turns.next("a"))
        await asyncio.sleep(0)
        assert turns.runs_at_once("a"), "only others of its tenant wait"
        assert turns.runs_at_once("b"), "both have computed as much"
        turns.spent("b", TURN_S)
        assert not turns.runs_at_once("b"), "the turn is that of a"
        await spinning
        turns.spent("a", 2 * TURN_S)
        assert turns.runs_at_once("b")
        answered = asyncio.create_task(turns.next("b", answered=True))
        await asyncio.sleep(0)
        assert not turns.runs_at_once("b"), "one that was answered before it goes first"
        await answered
        assert turns.runs_at_once("b")

    execute(run())


def test_answered_guests_and_those_that_compute_alternate_within_a_tenant() -> None:
    async def run() -> list[str]:
        turns, order = Turns(TURN_S), []

        async def wait(kind: str) -> None:
            await turns.next("a", answered=kind == "answered")
            order.append(kind)

        kinds = ["computes"] * 3 + ["answered"] * 3
        await asyncio.gather(*(wait(kind) for kind in kinds))
        return order

    assert execute(run()) == ["answered", "computes"] * 3


def test_answered_guests_leave_the_loop_its_other_work() -> None:
    """Also where there is one tenant: after `PASS_S` in a pass they line up, and each pass begins some of them."""

    async def run() -> list[int]:
        turns, passes = Turns(TURN_S), [0]

        async def exchange() -> None:
            if not turns.runs_at_once("a"):
                await turns.next("a", part=1 / 8, answered=True)
            turns.spent("a", TURN_S)
            passes[-1] += 1

        tasks = [asyncio.create_task(exchange()) for _ in range(100)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            passes.append(0)
        return passes

    passes = execute(run())
    assert sum(passes) == 100
    assert max(passes) <= PASS_S / TURN_S + 8


def test_guests_of_a_sandbox_have_turns_by_tenant(fibers: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing, at once and in turns, is counted for the tenant of the guest's limits, of Python and modules alike."""
    spent: dict[str, float] = {}
    waited: set[str] = set()
    count, wait = Turns.spent, Turns.next

    def counted(turns: Turns, tenant: str, seconds: float) -> None:
        spent[tenant] = spent.get(tenant, 0.0) + seconds
        count(turns, tenant, seconds)

    async def noted(turns: Turns, tenant: str, *, part: float = 1.0, answered: bool = False) -> None:
        waited.add(tenant)
        await wait(turns, tenant, part=part, answered=answered)

    monkeypatch.setattr(Turns, "spent", counted)
    monkeypatch.setattr(Turns, "next", noted)

    async def run() -> float:
        asks = "def main():\n    for n in range(300): print(n)\n"
        guests = [
            fibers.python(source, b"null", FakeHost(), GuestLimits(cpu_s=SHORT.cpu_s, tenant=tenant))
            for tenant, source in (("a", "def main(): return sum(range(100_000))"), ("b", asks))
        ]
        await asyncio.gather(*(guest.run() for guest in guests))
        return sum(guest.usage().cpu_s for guest in guests)

    used_s = execute(run())
    assert set(spent) == waited == {"a", "b"}
    assert sum(spent.values()) == pytest.approx(used_s)
