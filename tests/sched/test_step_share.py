"""What a step takes of throughput and batch work beside work whose latency matters, read from steps alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.sched.policies.snapshots import line
from tests.sched.stepping import Stepped
from weft.abi.errors import InvalidRequest
from weft.cache.manager import KVCache
from weft.core import wire
from weft.core.cost.model import CostModel, StepShape
from weft.core.ids import pack_tokens
from weft.core.objectives import OBJECTIVES, check_objective
from weft.core.sampling import StopParams
from weft.core.step import Step, StepResult
from weft.sched.scheduler import Scheduler, SchedulerConfig
from weft.sched.sequence import SequenceState
from weft.sched.service_classes import BATCH, MOST_GONE, THROUGHPUT
from weft.sched.step_share import EMPTY, ShareView, StepShare
from weft.sim.devices import linear_forward


def linear_costs() -> CostModel:
    """10 ms of every step, and 1 ms of each of its tokens."""
    return CostModel(linear_forward(0.010, 0.001), None, None, 64)


class Shared:
    """A scheduler whose steps take what its cost model says, one at a time."""

    def __init__(self, *, costs: CostModel | None = None, num_pages: int = 400, **changes: Any):
        config = {"max_context": 3000, "max_running": 16, "max_step_tokens": 64, "vocab_size": 100}
        self.cache = KVCache(num_pages, page_size=8)
        self.costs = linear_costs() if costs is None else costs
        known = None if changes.pop("unprofiled", False) else self.costs
        self.scheduler = Scheduler(SchedulerConfig(**{**config, **changes}), self.cache, costs=known)
        self.now = 0.0
        self.ended: list[int] = []
        """Operations in the order of their ends."""
        self.failed: list[wire.Failed] = []
        self.spent_s: dict[str, float] = {"foreground": 0.0, "background": 0.0}
        """Of steps with both kinds of work, where each objective's name begins with its kind."""

    def request(self, seq: int, objective: str, num_tokens: int = 4, limit: int = 1000, **more: Any) -> None:
        commands = (
            wire.Open(seq=seq, objective=objective, **more),  # type: ignore[arg-type]
            wire.Append(seq=seq, op=10 * seq, tokens=pack_tokens([seq % 100] * num_tokens)),
            wire.Generate(seq=seq, op=10 * seq + 1, stop=StopParams(max_tokens=limit)),
        )
        self._take(self.scheduler.handle(1, commands, self.now).messages)

    def release(self, seq: int) -> None:
        self._take(self.scheduler.handle(1, [wire.Release(seq=seq)], self.now).messages)

    def turn(self) -> list[tuple[int, int]]:
        """The rows of the next step: (handle, query tokens)."""
        step, flight, events = self.scheduler.schedule(self.now)
        self._take(events.messages)
        if step.forward is None:
            assert not self.scheduler.has_work
            return []
        self.scheduler.launched(step.step_id)
        lengths = np.diff(step.forward.q_indptr).tolist()
        handles = [sequence.handle for sequence, *_ in (*flight.decoded, *flight.written)]
        rows = list(zip(handles, lengths, strict=True))
        shape = StepShape.of(step.forward)
        self.now += self.costs.predict_forward_s(shape)
        count = 0 if step.sampling is None else len(step.sampling.rows)
        result = StepResult(step.step_id, tokens=np.full(count, 5, np.int32))
        self._take(self.scheduler.update(flight, result, self.now).messages)
        return rows

    def settle(self, *handles: int) -> None:
        """Until all of these decode."""
        for _ in range(1000):
            if all(self.scheduler.sequences.open[1, handle].decoding for handle in handles):
                return
            self.turn()
        raise AssertionError(f"{handles} do not all decode")

    def _take(self, messages: list[tuple[int, wire.Event]]) -> None:
        for _, event in messages:
            if isinstance(event, wire.Finished):
                self.ended.append(event.op)
            elif isinstance(event, wire.Failed):
                self.failed.append(event)


def handles(rows: list[tuple[int, int]]) -> list[int]:
    return [handle for handle, _ in rows]


def test_decoding_background_is_held_to_the_factor() -> None:
    shared = Shared()
    for seq in range(1, 11):
        shared.request(seq, "throughput")
    shared.settle(*range(1, 11))
    assert len(shared.turn()) == 10, "nothing is held back while nothing else is there"
    shared.request(20, "latency")
    shared.settle(20)
    rows = shared.turn()
    assert rows == [(20, 1), *[(seq, 1) for seq in range(1, 6)]], "16 ms for 11 ms alone, and 17 are too many"
    shared.request(21, "latency")
    shared.settle(21)
    assert handles(shared.turn()) == [20, 21, *range(1, 7)], "18 ms for 12 ms"


def test_the_factor_is_settable() -> None:
    shared = Shared(latency_factor=1.2, min_share=0.0)
    for seq in range(1, 11):
        shared.request(seq, "batch")
    shared.settle(*range(1, 11))
    shared.request(20, "latency")
    shared.settle(20)
    assert handles(shared.turn()) == [20, 1, 2], "13 ms for 11 ms"


def test_a_background_prompt_gets_what_decoding_leaves() -> None:
    shared = Shared(latency_factor=2.5, min_share=0.0)
    shared.request(1, "latency")
    shared.settle(1)
    shared.request(2, "throughput", 100)
    assert shared.turn() == [(1, 1), (2, 16)], "27 ms for 11 ms alone"
    shared.request(3, "latency", 30)
    assert shared.turn() == [(1, 1), (3, 30), (2, 16)], "as many beside another prompt"
    shared.release(1)
    shared.release(3)
    assert shared.turn() == [(2, 64)]


def test_what_does_not_fit_gets_its_share_piece_by_piece() -> None:
    """A page of a prompt takes 8 ms, of which a step of 11 ms leaves 5.5."""
    shared = Shared()
    shared.request(1, "latency")
    shared.settle(1)
    shared.request(2, "throughput", 1600, limit=1)
    steps = [shared.turn() for _ in range(400)]
    with_piece = [index for index, rows in enumerate(steps) if len(rows) > 1]
    assert all(rows[1] == (2, 8) for rows in steps if len(rows) > 1)
    assert with_piece[0] == 6, "6.1 ms are owed, with 1.9 of the step itself, after 6 steps of 11 ms"
    background_s, whole_s = 0.008 * len(with_piece), shared.now
    assert 0.095 <= background_s / whole_s <= 0.1


def test_without_a_share_what_does_not_fit_waits() -> None:
    shared = Shared(min_share=0.0)
    shared.request(1, "latency", limit=200)
    shared.settle(1)
    shared.request(2, "throughput", 40, limit=1)
    steps = [shared.turn() for _ in range(250)]
    assert 21 not in shared.ended[: shared.ended.index(11)]
    assert shared.ended == [11, 21]
    assert [(2, 40)] in steps, "it goes on when nothing else is there"


@pytest.mark.parametrize("min_share", [0.05, 0.1, 0.3])
def test_the_background_always_gets_its_share(min_share: float) -> None:
    """With a factor of 1, nothing fits beside work whose latency matters."""
    shared = Shared(latency_factor=1.0, min_share=min_share, num_pages=1000)
    shared.request(1, "latency", limit=2900)
    shared.settle(1)
    for seq in range(2, 6):
        shared.request(seq, "batch", limit=2900)
    shared.settle(2)
    begun_s, num_tokens = shared.now, 0
    for _ in range(1000):
        num_tokens += sum(count for handle, count in shared.turn() if handle != 1)
    share = 0.001 * num_tokens / (shared.now - begun_s)
    most = 4 / 15
    """Of four rows beside one, in steps of 10 ms and 1 ms a row."""
    assert min(min_share, most) * 0.99 <= share <= min(min_share, most) * 1.01


def test_without_a_profile_nothing_is_held_back_and_others_come_first() -> None:
    shared = Shared(unprofiled=True, max_step_tokens=32)
    for seq in range(1, 5):
        shared.request(seq, "throughput", 20)
    assert handles(shared.turn()) == [1, 2]
    shared.request(9, "latency", 20)
    assert shared.turn() == [(1, 1), (9, 20), (2, 8), (3, 3)], "its prompt comes before one that has begun"
    shared.settle(1, 2, 3, 4, 9)
    assert sorted(handles(shared.turn())) == [1, 2, 3, 4, 9]


def test_prompts_come_in_the_order_of_their_objectives_then_priority() -> None:
    shared = Shared(max_step_tokens=32)
    kinds = ("batch", "throughput", "latency", "ttft")
    for seq, objective in enumerate(kinds, 1):
        shared.request(seq, objective, 40, limit=1, priority=3)
        shared.request(10 + seq, objective, 40, limit=1, priority=-seq)
    for _ in range(60):
        shared.turn()
    assert [op // 10 for op in shared.ended] == [14, 4, 13, 3, 12, 2, 11, 1]


def test_background_gives_its_slot_to_others() -> None:
    shared = Shared(max_running=2)
    for seq in (1, 2):
        shared.request(seq, "throughput", priority=-5)
    shared.settle(1, 2)
    shared.request(3, "latency")
    shared.settle(3)
    assert shared.scheduler.stats().preemptions == 1
    assert shared.scheduler.sequences.open[1, 2].state is SequenceState.WAITING
    shared.request(4, "ttft")
    for _ in range(3):
        shared.turn()
    running = {sequence.handle for sequence in shared.scheduler.sequences.running.values()}
    assert running == {3, 4}, "ttft takes the place of background too, and no other"
    shared.request(5, "ttft")
    for _ in range(3):
        shared.turn()
    assert {sequence.handle for sequence in shared.scheduler.sequences.running.values()} == running


def test_what_waits_too_long_behind_others_gets_a_place() -> None:
    """Requests whose latency matters take all slots, one after the other."""
    shared = Shared(max_running=2)
    number = 100
    for seq in (100, 101):
        shared.request(seq, "latency", limit=60)
    shared.settle(100, 101)
    shared.request(1, "batch", limit=5)
    shared.request(2, "throughput", limit=5)
    while shared.now < 40.0 and not {11, 21} <= set(shared.ended):
        while len(shared.scheduler.sequences.queue) < 4:
            number += 1
            shared.request(number + 1, "latency", limit=60)
        shared.turn()
    assert {11, 21} <= set(shared.ended)
    assert shared.now > 10.0, "they had to wait"
    shared.turn()
    services = [shared.scheduler.sequences.open[1, seq].service for seq in (1, 2)]
    assert services == [BATCH, THROUGHPUT], "what they do next waits as before"
    assert shared.scheduler.stats().preemptions == 0


def test_a_deadline_becomes_latency_when_its_slack_is_gone() -> None:
    """A hundred tokens take 1.1 s alone, 1.65 s with background beside."""
    shared = Shared(latency_factor=1.5, min_share=0.0)
    for seq in range(1, 9):
        shared.request(seq, "throughput", limit=2900)
    shared.settle(*range(1, 9))
    shared.request(20, "latency", limit=2900)
    shared.settle(20)
    begun_s = shared.now
    shared.request(30, "deadline", limit=100, deadline_s=5.0)
    shared.turn()
    deadline = shared.scheduler.sequences.open[1, 30]
    assert deadline.is_background
    while deadline.is_background:
        assert deadline.total <= 4 + 1, "throughput work that came before it takes what there is"
        shared.turn()
    left_s = begun_s + 5.0 - shared.now
    assert 1.5 < left_s < 2.5
    while 301 not in shared.ended:
        shared.turn()
    assert shared.now <= begun_s + 5.0


def test_a_deadline_without_a_profile_is_latency_from_the_start() -> None:
    shared = Shared(unprofiled=True)
    shared.request(1, "deadline", deadline_s=100.0)
    shared.turn()
    assert not shared.scheduler.sequences.open[1, 1].is_background


@pytest.mark.parametrize(
    ("objective", "deadline_s", "field"),
    [
        ("fast", None, "objective"),
        ("deadline", None, "deadline_s"),
        ("latency", 3.0, "deadline_s"),
        ("deadline", 0.0, "deadline_s"),
        ("deadline", float("nan"), "deadline_s"),
        ("deadline", float("inf"), "deadline_s"),
    ],
)
def test_wrong_objectives_are_refused_by_name(objective: Any, deadline_s: float | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_objective(objective, deadline_s)
    assert error.value.param == field


def test_an_engine_refuses_a_deadline_without_seconds() -> None:
    shared = Shared()
    shared.request(1, "deadline")
    assert [failed.error.param for failed in shared.failed][:1] == ["deadline_s"]
    assert not list(shared.scheduler.sequences)


def test_forks_have_the_objective_of_their_parent() -> None:
    shared = Shared()
    shared.request(1, "batch", limit=3)
    shared.scheduler.handle(1, [wire.Fork(seq=1, child=2)], shared.now)
    assert shared.scheduler.sequences.open[1, 2].is_background
    while shared.scheduler.has_work:
        shared.turn()
    assert shared.ended == [11]


def test_a_policy_decides_from_its_view_alone() -> None:
    share = StepShare(linear_costs(), 1.5, 0.1)
    alone = StepShape.decodes(10, 100)
    kv = np.full(50, 7)
    assert share.num_rows(ShareView(alone, alone, EMPTY, 0.0), kv) == 10
    assert share.num_rows(ShareView(EMPTY, EMPTY, EMPTY, 0.0), kv) == 50
    assert share.num_rows(ShareView(alone, alone, StepShape.decodes(10, 1), 0.0), kv) == 0
    assert share.num_rows(ShareView(alone, alone, StepShape.decodes(10, 1), 0.0078), kv) == 0
    assert share.num_rows(ShareView(alone, alone, StepShape.decodes(10, 1), 0.008), kv) == 1
    assert share.num_rows(ShareView(alone, alone, StepShape.decodes(11, 1), 1.0), kv) == 0, "it has had a piece"
    assert share.num_tokens(ShareView(alone, alone, EMPTY, 0.0), 0, 100, 8) == 10
    assert share.num_tokens(ShareView(alone, alone, EMPTY, 0.0), 0, 100, 11) == 0
    assert share.num_tokens(ShareView(alone, alone, EMPTY, 0.008), 0, 100, 11) == 11
    assert share.num_tokens(ShareView(alone, alone, EMPTY, 0.5), 0, 100, 8) == 18
    assert share.owed_after(ShareView(alone, alone, EMPTY, 0.0)) == pytest.approx(0.002)
    assert share.owed_after(ShareView(alone, alone, StepShape.decodes(4, 1), 0.01)) == pytest.approx(
        0.01 + 0.0024 - 0.004
    )
    assert share.owed_after(ShareView(alone, alone, EMPTY, 5.0)) == share.most_owed_s == 1.0


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("latency", "deadline")])
def test_one_objective_alone_is_scheduled_as_any_other(objective: str) -> None:
    def steps(objective: str) -> list[object]:
        source = np.random.default_rng(5)
        stepped = Stepped(num_pages=32, num_host_pages=8, costs=linear_costs(), saturation_tokens=40)
        found: list[object] = []
        for seq in range(1, 30):
            prompt = [int(source.integers(3)), *[seq] * int(source.integers(1, 40))]
            stepped.open(seq, prompt, priority=int(source.integers(3)), tenant="ab"[seq % 2], objective=objective)
            stepped.generate(seq, int(source.integers(1, 20)))
            for _ in range(int(source.integers(6))):
                found.append(_content(stepped.turn()))
            if source.integers(4) == 0 and seq in stepped.known:
                stepped.release(seq)
        stepped.finish()
        return found

    assert steps(objective) == steps("latency")


def _content(step: Step) -> object:
    forward = step.forward
    return None if forward is None else (forward.token_ids.tolist(), forward.kv_page_ids.tolist())


@pytest.mark.parametrize("seed", [*range(4), *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 60)]])
@pytest.mark.parametrize("profiled", [True, False])
def test_random_mixtures_end_with_the_tokens_of_each_alone(seed: int, profiled: bool) -> None:
    """`Stepped` compares every token, and checks that no page is lost."""
    source = random.Random(f"{seed} {profiled}")
    stepped = Stepped(
        num_pages=source.choice([24, 48]),
        num_host_pages=source.choice([0, 16]),
        policy=source.choice(["lru", "min_waste"]),
        costs=linear_costs() if profiled else None,
        saturation_tokens=source.choice([None, 24]),
        latency_factor=source.choice([1.0, 1.5]),
        min_share=source.choice([0.0, 0.1]),
        max_rows=source.choice([None, 2]),
    )
    for seq in range(1, 25):
        objective = source.choice(OBJECTIVES)
        deadline_s = source.choice([0.1, 1.0, 100.0]) if objective == "deadline" else None
        prompt = [source.randrange(3), *[seq] * source.randrange(1, 60)]
        stepped.open(seq, prompt, priority=source.randrange(-1, 2), objective=objective, deadline_s=deadline_s)
        if source.random() < 0.2:
            stepped.fork(seq, 100 + seq)
            stepped.generate(100 + seq, source.randrange(1, 12))
        stepped.generate(seq, source.randrange(1, 20))
        for _ in range(source.randrange(8)):
            had_flight = bool(stepped.in_flight)  # its results may be all that is waited for
            step = stepped.turn()
            is_stuck = step.is_empty and not had_flight and stepped.scheduler.has_work
            assert not is_stuck, "what is held back must not leave an empty step"
        if source.random() < 0.2:
            stepped.say(wire.Cancel(seq=seq))
        if source.random() < 0.2:
            stepped.now += 11.0
    stepped.finish()


def test_deadlines_of_sequences_that_are_gone_are_forgotten() -> None:
    s = Stepped(num_pages=64, costs=line(), check_every=1000)
    for seq in range(1, 200):
        s.open(seq, [seq] * 8, objective="deadline", deadline_s=86400.0)
        s.generate(seq, 1)
        s.run()
        s.release(seq)
    assert len(s.scheduler._state.services._deadlines) <= MOST_GONE


def test_a_call_whose_prompt_is_being_computed_already_was_in_no_queue() -> None:
    s = Stepped(num_pages=64, max_step_tokens=16)
    s.open(1, [5] * 200)
    for _ in range(3):
        s.turn()
    op = s.generate(1, 20)
    s.run()
    usage = s.generations[op].ending.usage
    assert 0 == usage.queued_s < usage.first_token_s
