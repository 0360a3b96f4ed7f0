"""Rows that share a prefix: it is computed once, and no row waits for longer than that takes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.sched.sequence import SequenceState

PAGE = 16
ROW = 20
"""Tokens of a row that it shares with no other."""


def submit(driver: Driver, num_rows: int, num_shared: int, *, limit: int = 1, num_own: int = ROW) -> list[int]:
    """Rows of one namespace: `num_shared` tokens that are the same in all, then their own."""
    shared = [900 + i % 97 for i in range(num_shared)]
    numbers = []
    for row in range(num_rows):
        own = [row % 800, row // 800, *[row % 7] * (num_own - 2)]
        number, op = next(driver.numbers), next(driver.numbers)
        driver.send(
            wire.Open(seq=number),
            wire.Append(seq=number, op=op, tokens=pack_tokens(shared + own)),
            wire.Generate(seq=number, op=next(driver.numbers), stop=StopParams(max_tokens=limit, ignore_eos=True)),
        )
        numbers.append(number)
    return numbers


def num_steps(num_rows: int, num_shared: int, *, prefix_cache: bool = True, num_own: int = ROW) -> tuple[int, int]:
    """Steps, and prompt tokens computed, until the last row has its token."""
    driver = Driver(
        num_device_pages=num_rows * (num_shared // PAGE + 2) + 64,
        num_slots=num_rows,
        max_context=4096,
        max_step_tokens=4096,
        vocab_size=1024,
        prefix_cache=prefix_cache,
        eos=-1,
    )
    submit(driver, num_rows, num_shared, num_own=num_own)
    count = 0
    while driver.engine.busy:
        driver.engine.step()
        count += 1
        assert count < 2000
    return driver.engine.stats().steps, driver.engine.stats().prefill_tokens


@pytest.mark.parametrize("num_shared", [*range(0, 65), 1000, 1008])
def test_sharing_costs_at_most_four_steps_and_computes_full_pages_once(num_shared: int) -> None:
    for num_own in (2, 20):
        steps, computed = num_steps(48, num_shared, num_own=num_own)
        alone, _ = num_steps(48, num_shared, num_own=num_own, prefix_cache=False)
        assert steps <= alone + 4
        assert computed <= num_shared // PAGE * PAGE + 48 * (num_shared % PAGE + num_own)


@pytest.mark.parametrize("num_shared", [0, 3, 4, 7, 15])
def test_a_quarter_of_a_page_is_waited_for(num_shared: int) -> None:
    is_waited_for = num_shared >= PAGE // 4
    _, computed = num_steps(48, num_shared)
    assert computed == 48 * ROW + num_shared * (1 if is_waited_for else 48)


def lines_of_a_step(driver: Driver) -> int:
    """Lines of the scheduler and the cache that one step executes: what it touches, without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not any(part in frame.f_code.co_filename for part in ("/weft/sched/", "/weft/cache/")):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        driver.engine.step()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("num_shared", [0, 40, 520])
def test_the_work_of_a_step_does_not_grow_with_the_queue(num_shared: int) -> None:
    most = {}
    for num_rows in (100, 20_000):
        driver = Driver(
            num_device_pages=2000, num_slots=16, max_step_tokens=256, vocab_size=1024, eos=-1, max_waiting=30_000
        )
        submit(driver, num_rows, num_shared)
        counts = []
        while driver.engine.stats().num_waiting > num_rows - 60:
            counts.append(lines_of_a_step(driver))
        most[num_rows] = max(counts)
    assert most[20_000] <= 1.1 * most[100]


def test_a_deferral_ends_however_often_another_row_takes_the_prefix_over() -> None:
    driver = Driver(num_device_pages=2000, num_slots=32, max_step_tokens=2048, prefix_wait_steps=6, eos=-1)
    submit(driver, 24, 640)
    deferred = []
    for _ in range(12):
        driver.engine.step()
        # The leader is gone before any page of the prefix is indexed: the next row takes its place.
        driver.send(*[wire.Release(seq=s.handle) for s in list(driver.engine.scheduler.sequences.running.values())])
        deferred.append(sum(s.state is SequenceState.DEFERRED for s in driver.engine.scheduler.sequences))
    assert max(deferred) > 10
    assert deferred[8:] == [0, 0, 0, 0]
