"""The order of waiting, and the random numbers of sampling."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.cache.manager import KVCache
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import Sequence, State
from weft.sched.slots import uniforms

CACHE = KVCache(4)


def make(seq: int, arrival_s: float, priority: int = 0) -> Sequence:
    return Sequence(seq, 1, seq, "", "", "", priority, arrival_s, CACHE.open_table(seq, ""))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3)), max_size=30))
def test_a_priority_is_worth_having_come_earlier(arrivals: list[tuple[float, int]]) -> None:
    queue = WaitingQueue(aging_s=10.0)
    for seq, (arrival, priority) in enumerate(arrivals):
        queue.push(make(seq, arrival, priority))
    popped = [queue.pop() for _ in arrivals]
    keys = [(s.arrival_s + 10.0 * s.priority, s.seq) for s in popped if s is not None]
    assert keys == sorted(keys)
    assert len(keys) == len(arrivals)
    assert queue.pop() is None
    assert len(queue) == 0


def test_a_changed_priority_moves_a_waiting_sequence() -> None:
    queue = WaitingQueue(10.0)
    first, second = make(1, 0.0), make(2, 1.0)
    queue.push(first)
    queue.push(second)
    first.priority = 5
    queue.push(first)
    assert len(queue) == 2
    assert queue.pop() is second
    assert queue.pop() is first
    assert queue.pop() is None


def test_removal_and_return() -> None:
    queue = WaitingQueue(10.0)
    one = make(1, 0.0)
    queue.push(one)
    queue.remove(one)
    queue.remove(one)
    assert len(queue) == 0
    assert queue.pop() is None
    queue.push(one)
    assert queue.pop() is one
    assert queue.pop() is None


def test_parked_sequences_come_back_when_the_other_gets_on_or_time_is_up() -> None:
    queue = WaitingQueue(10.0)
    one, two = make(1, 0.0), make(2, 0.0)
    for sequence in (one, two):
        queue.push(sequence)
        assert queue.pop() is sequence
    queue.park(one, claimant=7, until_step=5)
    queue.park(two, claimant=8, until_step=6)
    assert len(queue) == 2
    queue.unpark(7)
    assert queue.pop() is one
    queue.unpark_due(5)
    assert two.state is State.PARKED
    queue.unpark_due(6)
    assert two.no_parking
    assert queue.pop() is two
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
