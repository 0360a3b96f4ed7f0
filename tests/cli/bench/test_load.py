"""The load generator on a clock that a test moves: who is due when, who waits, and that everyone is accounted for."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from weft.cli.bench.client import StreamedAnswer
from weft.cli.bench.conversation import Script, Turn, hold
from weft.cli.bench.load import closed_loop, is_closed, offer
from weft.cli.bench.measure import Failure, Outcome, Timing
from weft.cli.bench.workload import BenchRequest

T = TypeVar("T")
TURNS = 20
"""Of the loop between two moments: more than any task here needs to come to rest."""


class ManualClock:
    """Advances to the next time that a task waits for, once no other task can run."""

    def __init__(self) -> None:
        self._now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    async def until(self, moment: float) -> None:
        if moment > self._now:
            self._count += 1
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._sleepers, (moment, self._count, future))
            await future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def drive() -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                if self._sleepers and not task.done():
                    self._now, _, future = heapq.heappop(self._sleepers)
                    future.set_result(None)
            return task.result()

        return asyncio.run(drive())


class FakeServer:
    """Answers each request after `takes` seconds; notes what came when, and the most at once."""

    def __init__(self, clock: ManualClock, takes: Callable[[BenchRequest], float]):
        self._clock, self._takes = clock, takes
        self.came: list[tuple[float, Any]] = []
        self.num_now = self.most = 0

    async def send(self, request: BenchRequest, due_s: float, answer: StreamedAnswer | None = None) -> Outcome:
        sent = self._clock.now()
        self.came.append((sent - 100, request.prompt))
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        await self._clock.until(sent + self._takes(request))
        self.num_now -= 1
        if request.fields.get("fail"):
            return Failure("broken", "as asked")
        if answer is not None:
            answer.token_ids, answer.text = [900] * request.output_len, ["yes"]
            answer.usage = {"completion_tokens": request.output_len}
        return Timing(due_s, sent, [self._clock.now()], request.output_len, len(request.prompt), 0)


def requests(count: int, **fields: Any) -> list[BenchRequest]:
    return [BenchRequest([index], 1, fields) for index in range(count)]


def test_requests_are_sent_when_they_are_due_whether_or_not_the_server_keeps_up():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 50.0)
    outcomes, elapsed = clock.run(offer(requests(3), [0.0, 1.0, 4.0], server.send, clock=clock))
    assert server.came == [(0.0, [0]), (1.0, [1]), (4.0, [2])]
    assert elapsed == 54.0
    assert [outcome.due_s for outcome in outcomes] == [100.0, 101.0, 104.0]
    assert [outcome.total_s for outcome in outcomes] == [50.0, 50.0, 50.0]


def test_a_wait_for_a_slot_is_part_of_the_latency():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 10.0)
    outcomes, _ = clock.run(offer(requests(3), [0.0, 1.0, 2.0], server.send, max_concurrency=1, clock=clock))
    assert server.most == 1
    assert [at for at, _ in server.came] == [0.0, 10.0, 20.0]
    assert [outcome.first_s for outcome in outcomes] == [10.0, 19.0, 28.0]
    assert [outcome.sent_s - outcome.due_s for outcome in outcomes] == [0.0, 9.0, 18.0]


def test_a_closed_loop_keeps_so_many_under_way_and_counts_from_when_one_is_sent():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 1.0 + request.prompt[0])
    outcomes, elapsed = clock.run(closed_loop(requests(5), server.send, concurrency=2, clock=clock))
    assert server.most == 2
    assert server.came == [(0.0, [0]), (0.0, [1]), (1.0, [2]), (2.0, [3]), (4.0, [4])]
    assert [outcome.first_s for outcome in outcomes] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert elapsed == 9.0


def test_a_closed_loop_of_more_than_there_is():
    clock = ManualClock()
    outcomes, _ = clock.run(closed_loop(requests(2), FakeServer(clock, lambda _: 1.0).send, concurrency=8, clock=clock))
    assert len(outcomes) == 2


@pytest.mark.parametrize("closed", [False, True])
def test_every_request_is_accounted_for_in_its_place(closed: bool):
    clock = ManualClock()
    server = FakeServer(clock, lambda request: float(7 - request.prompt[0]))
    work = [BenchRequest([index], 1, {"fail": index % 3 == 0}) for index in range(7)]
    seen: list[Outcome] = []
    if closed:
        outcomes, _ = clock.run(closed_loop(work, server.send, concurrency=3, on_done=seen.append, clock=clock))
    else:
        outcomes, _ = clock.run(offer(work, [0.0] * 7, server.send, on_done=seen.append, clock=clock))
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [True, False, False, True, False, False, True]
    assert len(seen) == 7


def test_which_loads_are_closed():
    assert is_closed(float("inf"), 4)
    assert not is_closed(float("inf"), None)
    assert not is_closed(3.0, 4)


def script(*turns: tuple[float, int, int], system: int = 2) -> Script:
    return Script([1] * system, [Turn(pause, [5] * said, output) for pause, said, output in turns])


def test_conversations_grow_by_what_was_said_and_answered():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 1.0)
    held = script((0.0, 3, 2), (4.0, 1, 1), (0.0, 2, 1))
    [one_held], elapsed = clock.run(hold([held], [0.0], server.send, fields={}, clock=clock))
    [first, second, third] = one_held.outcomes
    one = [1, 1, 5, 5, 5]
    two = [*one, 900, 900, 5]
    assert server.came == [(0.0, one), (5.0, two), (6.0, [*two, 900, 5, 5])]
    assert [outcome.due_s - 100 for outcome in (first, second, third)] == [0.0, 5.0, 6.0]
    assert elapsed == 7.0
    assert (one_held.due_s, one_held.end_s, one_held.waited_s) == (100.0, 107.0, 4.0)


def test_conversations_as_messages():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 1.0)
    held = Script("be brief", [Turn(0.0, "one", 1), Turn(0.0, "two", 1)])
    clock.run(hold([held], [0.0], server.send, fields={}, clock=clock))
    system = {"role": "system", "content": "be brief"}
    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    assert [prompt for _, prompt in server.came] == [
        [system, one],
        [system, one, {"role": "assistant", "content": "yes"}, two],
    ]


def test_a_failed_turn_ends_its_conversation_and_the_rest_of_it_is_accounted_for():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 1.0)
    seen: list[Outcome] = []
    held = [script((0.0, 1, 1), (0.0, 1, 1), (0.0, 1, 1))]
    work = hold(held, [0.0], server.send, fields={"fail": True}, on_done=seen.append, clock=clock)
    [one], _ = clock.run(work)
    assert [outcome.kind for outcome in one.outcomes] == ["broken", "not_sent", "not_sent"]
    assert len(seen) == 3
    assert len(server.came) == 1


def test_conversations_wait_for_a_place():
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 1.0)
    held = [script((0.0, 1, 1), (3.0, 1, 1))] * 2
    [_, second], elapsed = clock.run(hold(held, [0.0, 1.0], server.send, fields={}, max_concurrency=1, clock=clock))
    assert server.most == 1
    assert second.outcomes[0].first_s == 5.0  # due at 1, answered at 6
    assert elapsed == 10.0


def test_answers_whose_ids_are_not_told_cannot_be_continued():
    clock = ManualClock()

    async def send(request: BenchRequest, due_s: float, answer: StreamedAnswer) -> Outcome:
        answer.usage = {"completion_tokens": 1}
        return Timing(due_s, due_s, [due_s + 1], 1)

    [one], _ = clock.run(hold([script((0.0, 1, 1), (0.0, 1, 1))], [0.0], send, fields={}, clock=clock))
    assert [outcome.kind for outcome in one.outcomes] == ["no_token_ids", "not_sent"]
    assert "--endpoint chat" in one.outcomes[0].message


def test_subagents_run_in_the_pause_one_after_the_other() -> None:
    clock = ManualClock()
    server = FakeServer(clock, lambda request: 1.0)
    child = script((0.0, 1, 1), (2.0, 1, 1), system=4)  # ends after 4 seconds
    for pause_s, due_s in ((3.0, 9.0), (20.0, 21.0)):
        began = clock.now() - 100
        turns = [Turn(0.0, [5], 1), Turn(pause_s, [5], 1, (child, child))]
        held = Script([1], turns)
        assert held.num_turns == 6
        [one, first, second], elapsed = clock.run(hold([held], [0.0], server.send, fields={}, clock=clock))
        assert [at.due_s - 100 - began for at in (first, second)] == [1.0, 5.0]
        assert one.outcomes[1].due_s - 100 - began == due_s
        assert one.waited_s == due_s - 1.0
        assert (first.waited_s, elapsed) == (2.0, due_s + 1.0)
        assert [len(prompt) for _, prompt in server.came[-6:]] == [2, 5, 7, 5, 7, 4]


def test_a_subagent_that_fails_does_not_end_its_parent() -> None:
    clock = ManualClock()

    async def send(request: BenchRequest, due_s: float, answer: StreamedAnswer) -> Outcome:
        if len(request.prompt) > 10:
            return Failure("broken", "too long")
        answer.usage = {"completion_tokens": 0}
        return Timing(due_s, due_s, [due_s + 1], 1)

    held = Script([1], [Turn(0.0, [5], 1), Turn(0.0, [5], 1, (script((0.0, 20, 1), (0.0, 1, 1)),))])
    [one, child], _ = clock.run(hold([held], [0.0], send, fields={}, clock=clock))
    assert [outcome.kind for outcome in child.outcomes] == ["broken", "not_sent"]
    assert all(isinstance(outcome, Timing) for outcome in one.outcomes)
