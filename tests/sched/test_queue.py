"""The order of waiting, and the random numbers of sampling."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.cache.manager import KVCache
from weft.sched.order import FairOrder
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import QueuePlace, Sequence, SequenceState
from weft.sched.slots import uniforms

CACHE = KVCache(4)


def make(seq: int, arrival_s: float, priority: int = 0, tenant: str = "") -> Sequence:
    return Sequence(seq, 1, seq, tenant, "", "", priority, QueuePlace(arrival_s), CACHE.open_table(seq, ""))


def make_queue() -> WaitingQueue:
    return WaitingQueue(FairOrder(aging_s=10.0, max_context=100))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3)), max_size=30))
def test_a_priority_is_worth_having_come_earlier(arrivals: list[tuple[float, int]]) -> None:
    queue = make_queue()
    for seq, (arrival, priority) in enumerate(arrivals):
        queue.push(make(seq, arrival, priority))
    popped = [queue.pop() for _ in arrivals]
    keys = [(s.place.since_s + 10.0 * s.priority, s.seq) for s in popped if s is not None]
    assert keys == sorted(keys)
    assert len(keys) == len(arrivals)
    assert queue.pop() is None
    assert len(queue) == 0


def test_a_changed_priority_moves_a_waiting_sequence() -> None:
    queue = make_queue()
    first, second = make(1, 0.0), make(2, 1.0)
    queue.push(first)
    queue.push(second)
    first.priority = 5
    queue.push(first)
    assert len(queue) == 2
    assert queue.pop() is second
    assert queue.pop() is first
    assert queue.pop() is None


def test_shares_count_the_other_waiting_sequences_of_each_tenant_wherever_they_wait() -> None:
    queue = make_queue()
    first, second, other, new = (make(n, float(n), tenant=name) for n, name in enumerate(("a", "a", "b", "c")))
    for sequence in (first, second):
        queue.push(sequence)
    assert [queue.has_share(each, 2) for each in (first, other)] == [True, True]
    assert not queue.has_share(make(9, 9.0, tenant="a"), 2)
    queue.push(other)
    assert queue.pop() is first
    queue.defer(first, 5, num_pages=2, until_step=20)
    assert [queue.has_share(each, 2) for each in (first, second, other, new)] == [False, False, True, True]
    for sequence in (first, second, second):
        queue.remove(sequence)
    assert queue.has_share(make(9, 9.0, tenant="a"), 2)
    queue.remove(other)
    assert queue._by_tenant == {}


def test_removal_and_return() -> None:
    queue = make_queue()
    one = make(1, 0.0)
    queue.push(one)
    queue.remove(one)
    queue.remove(one)
    assert len(queue) == 0
    assert queue.pop() is None
    queue.push(one)
    assert queue.pop() is one
    assert queue.pop() is None


def test_deferred_sequences_come_back_when_the_pages_are_there_or_time_is_up() -> None:
    queue = make_queue()
    one, two, three = make(1, 0.0), make(2, 0.0), make(3, 0.0)
    for sequence in (one, two, three):
        queue.push(sequence)
        assert queue.pop() is sequence
    queue.defer(one, leader=7, num_pages=3, until_step=5)
    queue.defer(two, leader=8, num_pages=1, until_step=6)
    queue.defer(three, leader=7, num_pages=4, until_step=9)
    assert len(queue) == 3
    queue.progressed(7, 2)
    assert queue.pop() is None
    queue.progressed(7, 3)
    assert queue.pop() is one
    assert queue.pop() is None
    queue.end_deferrals(5)
    assert two.state is SequenceState.DEFERRED
    queue.end_deferrals(6)
    assert queue.pop() is two
    queue.gave_up(7)
    assert queue.pop() is three
    assert len(queue) == 0


def test_a_deferred_sequence_that_leaves_or_changes_priority_does_not_come_back_with_its_group() -> None:
    queue = make_queue()
    sequences = [make(seq, 0.0) for seq in range(5)]
    for sequence in sequences:
        queue.push(sequence)
        assert queue.pop() is sequence
        queue.defer(sequence, leader=9, num_pages=1, until_step=50)
    queue.remove(sequences[0])
    sequences[3].priority = -1
    queue.push(sequences[3])
    assert queue.pop() is sequences[3]
    queue.progressed(9, 1)
    assert [queue.pop() for _ in range(4)] == [sequences[1], sequences[2], sequences[4], None]
    assert len(queue) == 0


def test_uniforms_depend_on_seed_and_index_alone_and_are_uniform() -> None:
    seeds = np.arange(2000, dtype=np.uint64)
    index = np.zeros(2000, np.int64)
    draws = uniforms(seeds, index)
    assert ((draws >= 0) & (draws < 1)).all()
    assert np.array_equal(draws[100:200], uniforms(seeds[100:200], index[100:200]))
    for each in (draws, uniforms(np.full(2000, 5, np.uint64), np.arange(2000))):
        histogram, _ = np.histogram(each, 20, (0, 1))
        assert ((histogram - 100) ** 2 / 100).sum() < 50  # chi-square, 19 degrees of freedom: p < 1e-4 beyond
        assert abs(np.corrcoef(each[:-1], each[1:])[0, 1]) < 0.1
