"""Tenants take turns: who is admitted next when several wait."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.driver import Driver
from tests.sched.test_queue import make, make_queue
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.sched.order import MAX_IDLE_LANES, MIN_SWEEP, FairOrder
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import Sequence, SequenceState


def admit(queue: WaitingQueue, num_tokens: int = 10) -> Sequence | None:
    """What the scheduler does with the next sequence, which ends at once."""
    sequence = queue.pop()
    if sequence is not None:
        sequence.move_to(SequenceState.RUNNING)
        queue.order.admitted(sequence, num_tokens, 0.0)
    return sequence


def test_a_request_does_not_wait_behind_the_backlog_of_another_tenant() -> None:
    queue = make_queue()
    for seq in range(576):
        queue.push(make(seq, 0.0, tenant="bulk"))
    for _ in range(20):
        admit(queue)
    one = make(1000, 5.0, tenant="one")
    queue.push(one)
    assert admit(queue) is one


def test_two_backlogs_share_by_tokens() -> None:
    queue = make_queue()
    for seq in range(300):
        queue.push(make(seq, 0.0, tenant="long"))
    for seq in range(300, 600):
        queue.push(make(seq, 1.0, tenant="short"))
    served = {"long": 0, "short": 0}
    for _ in range(200):
        sequence = queue.pop()
        assert sequence is not None
        tokens = 400 if sequence.tenant == "long" else 100
        queue.order.admitted(sequence, tokens, 0.0)
        served[sequence.tenant] += tokens
    assert abs(served["long"] - served["short"]) <= 400


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue = make_queue()
    queue.push(make(0, 0.0, tenant="late"))
    admit(queue)
    for seq in range(1, 400):
        queue.push(make(seq, 0.0, tenant="early"))
    for _ in range(200):
        admit(queue)
    for seq in range(1000, 1010):
        queue.push(make(seq, 1.0, tenant="late"))
    turns = [sequence.tenant for sequence in (admit(queue) for _ in range(20)) if sequence is not None]
    assert turns.count("late") == 10


def test_a_preempted_sequence_comes_before_new_ones_of_its_priority() -> None:
    queue = make_queue()
    preempted = make(1, 0.0, tenant="a")
    queue.push(preempted)
    assert admit(queue, 10_000) is preempted
    queue.push(make(2, 1.0, tenant="b"))
    queue.push(preempted)
    assert queue.pop() is preempted


def test_a_tenant_that_is_held_back_is_passed_over_and_earns_nothing() -> None:
    queue = make_queue()
    preempted = make(1, 0.0, tenant="held")
    queue.push(preempted)
    assert admit(queue) is preempted
    queue.push(preempted)
    for seq in range(2, 30):
        queue.push(make(seq, 0.0, tenant="held"))
        queue.push(make(100 + seq, 1.0, tenant="other", priority=seq % 2))
    for _ in range(10):
        sequence = queue.pop({"held"})
        assert sequence is not None
        assert sequence.tenant == "other"
        queue.order.admitted(sequence, 500, 0.0)
    assert queue.pop({"held", "other"}) is None
    assert queue.pop() is preempted
    turns = [sequence.tenant for sequence in (admit(queue, 500) for _ in range(8)) if sequence is not None]
    assert turns.count("held") <= 5


def test_a_sequence_that_overtook_keeps_its_place_when_pages_run_out() -> None:
    queue = make_queue()
    bulk = [make(seq, 0.0, tenant="bulk") for seq in range(10)]
    for sequence in bulk:
        queue.push(sequence)
    admit(queue)
    one = make(100, 5.0, tenant="one")
    queue.push(one)
    assert admit(queue) is one
    later = admit(queue)
    assert later is not None
    assert queue.order.rank(one) < queue.order.rank(later)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 500), st.booleans()),
        min_size=1,
        max_size=120,
    )
)
def test_every_wait_is_bounded_and_every_sequence_comes_once(
    arrivals: list[tuple[str, int, int, bool]],
) -> None:
    """A steady stream of others never starves one, whatever tenants and priorities they have."""
    queue = make_queue()
    victim = make(0, 0.0, 2, tenant="victim")
    queue.push(victim)
    seen: list[int] = []
    now, seq = 0.0, 1
    for _ in range(40):
        for tenant, priority, tokens, admits in arrivals:
            now += 0.5
            queue.push(make(seq, now, priority, tenant=tenant))
            seq += 1
            if admits or len(queue) > 50:
                sequence = admit(queue, tokens)
                assert sequence is not None
                seen.append(sequence.seq)
        if victim.place.was_admitted:
            break
    while (sequence := admit(queue)) is not None:
        seen.append(sequence.seq)
    assert sorted(seen) == list(range(seq))
    overtaking = seen.index(0)
    # Only those that came less than 4 priorities x 10 s later, and the turns of three other tenants, go first.
    assert overtaking <= 80 + 3 * 500 + 1


def test_sequences_that_are_gone_are_forgotten_while_an_older_one_waits() -> None:
    queue = make_queue()
    queue.push(make(0, 0.0, tenant="patient"))
    for seq in range(1, 3000):
        gone = make(seq, float(seq), tenant=f"gone {seq % 3}")
        queue.push(gone)
        queue.remove(gone)
    del gone
    alive = [thing for thing in gc.get_objects() if type(thing) is Sequence and thing.tenant.startswith("gone")]
    assert len(alive) <= MIN_SWEEP + 1
    first = queue.pop()
    assert first is not None
    assert (first.seq, queue.pop()) == (0, None)


def test_lanes_where_nothing_waits_are_bounded() -> None:
    queue = make_queue()
    for seq in range(3 * MAX_IDLE_LANES):
        queue.push(make(seq, 0.0, tenant=f"tenant {seq}"))
        queue.push(make(10**6 + seq, 1.0, tenant="steady"))
        admit(queue)
        admit(queue)
    assert isinstance(queue.order, FairOrder)
    assert sum(len(level.lanes) for level in queue.order._levels.values()) <= 2 * MAX_IDLE_LANES


def test_one_short_request_behind_576_of_another_tenant_is_answered_in_a_few_steps() -> None:
    driver = Driver(num_slots=8, num_device_pages=600, max_step_tokens=128, max_waiting=10_000, prefix_cache=False)

    def submit(tenant: str, number: int) -> int:
        op = 1_000_000 + number
        driver.send(
            wire.Open(seq=number, tenant=tenant),
            wire.Append(seq=number, op=number, tokens=pack_tokens([number % 900] * 40)),
            wire.Generate(seq=number, op=op, stop=StopParams(max_tokens=4, ignore_eos=True)),
        )
        return op

    for number in range(1, 577):
        submit("bulk", number)
    for _ in range(5):
        driver.step()
    mine = submit("one", 5000)
    for _ in range(16):
        driver.step()
    assert any(isinstance(event, wire.Finished) and event.op == mine for event in driver.others)
