"""Many sequences wait for pages at once: the first in rank gets them, also from those that wait and have some."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.sched.stepping import Stepped
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched.sequence import SequenceState


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages a step come back from the host."""
    monkeypatch.setattr("weft.sched.interception.UNMEASURED_COPIES", 2)
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", 2)


def waiting_on_host(monkeypatch: pytest.MonkeyPatch, *lengths: int, **config: Any) -> Stepped:
    """Sequences 1, 2, ... of these lengths, all intercepted, with all but their last tokens on the host alone."""
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", 1000)
    monkeypatch.setattr("weft.sched.interception.UNMEASURED_COPIES", 1000)
    stepped = Stepped(num_host_pages=200, **config)
    for seq, length in enumerate(lengths, 1):
        stepped.open(seq, [seq] * length)
        stepped.generate(seq, 2)
        stepped.run()
        stepped.now += 1.0
    pressure = len(lengths) + 1
    stepped.open(pressure, [pressure] * 184)
    stepped.generate(pressure, 1)
    stepped.run()
    stepped.release(pressure)
    for seq, length in enumerate(lengths, 1):
        device, host = stepped.pages(seq)
        assert device <= 1
        assert device + host == (length + 1) // 8
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", 2)
    monkeypatch.setattr("weft.sched.interception.UNMEASURED_COPIES", 2)
    return stepped


def test_an_earlier_return_takes_the_pages_that_a_later_one_has_got_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they need more pages than there are, and nothing runs that would end and give some back."""
    stepped = waiting_on_host(monkeypatch, 128, 128, return_order="arrival")
    later = stepped.generate(2, 1)
    for _ in range(5):
        stepped.turn()
    assert len(stepped.sequence(2).table.pages) >= 10
    earlier = stepped.generate(1, 1)
    order = []
    for _ in range(100):
        stepped.turn()
        order += [op for op in (earlier, later) if stepped.generations[op].ending is not None and op not in order]
    assert order == [earlier, later]
    stepped.finish()


def test_a_later_arrival_takes_no_pages_that_an_earlier_return_has_got_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence runs all the time, so there is always one that would end first."""
    stepped = waiting_on_host(monkeypatch, 128)
    stepped.open(10, [10] * 8)
    stepped.generate(10, 30)
    for _ in range(3):
        stepped.turn()
    stepped.generate(1, 20)
    for _ in range(4):
        stepped.turn()
    returning = stepped.sequence(1)
    assert returning.state is SequenceState.WAITING
    held = len(returning.table.pages)
    assert held >= 8
    stepped.open(11, [11] * 56)
    stepped.generate(11, 1)
    while returning.state is not SequenceState.RUNNING:
        stepped.turn()
        assert len(returning.table.pages) >= held
        held = len(returning.table.pages)
        assert stepped.sequence(11).state is SequenceState.WAITING
    stepped.finish()


def test_pages_that_nothing_can_bring_back_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins hold what a return needs, and nothing runs: it goes on with the part that has room and breaks the pins."""
    stepped = waiting_on_host(monkeypatch, 160)
    stepped.open(10, [10] * 88)
    stepped.generate(10, 1)
    stepped.run()
    stepped.release(10)
    stepped.say(wire.Retain(op=999, tokens=pack_tokens([10] * 88), ttl_s=1e9, weight=math.inf))
    assert stepped.cache.retention.pinned()
    stepped.generate(1, 1)
    stepped.finish()


@pytest.mark.parametrize("seed", range(6))
def test_returns_that_fill_the_device_in_parts_all_end(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """They come back in any order, each needs a third of the device or more, and pages come two a step."""
    chance = random.Random(seed)
    lengths = [chance.randrange(60, 150) for _ in range(7)]
    stepped = waiting_on_host(monkeypatch, *lengths)
    waiting = list(range(1, 8))
    chance.shuffle(waiting)
    while waiting:
        for _ in range(chance.randrange(1, 7)):
            stepped.turn()
        stepped.generate(waiting.pop(), chance.randrange(1, 6))
    stepped.run(600)
    stepped.finish()


def intercepted(count: int, *, num_host_pages: int) -> Stepped:
    """So many sequences that wait, of up to three pages, on a device with fewer pages than they have tokens."""
    stepped = Stepped(
        num_pages=320, num_host_pages=num_host_pages, max_running=32, max_step_tokens=512, check_every=200, aging_s=1.0
    )
    for seq in range(1, count + 1):
        stepped.open(seq, [seq % 997, seq // 997, *[7] * (seq % 20)])
        stepped.generate(seq, 1)
        if seq % 64 == 0:
            stepped.run()
            stepped.now += 0.5
    stepped.run()
    return stepped


def newcomer_among(count: int, num_host_pages: int, seed: int) -> None:
    """A newcomer needs 60 % of the pages. Before it come returns that fill the device; after it, in every step, returns
    and small newcomers: as many as would keep the device full."""
    chance = random.Random(seed)
    stepped = intercepted(count, num_host_pages=num_host_pages)
    waiting = list(range(1, count + 1))
    chance.shuffle(waiting)
    for _ in range(100):
        stepped.append(waiting[-1], [5, 6, 7])
        stepped.generate(waiting.pop(), chance.randrange(1, 20))
    for _ in range(3):
        stepped.turn()
    arrived_s, large = stepped.now, count + 1
    stepped.open(large, [8] * (320 * 8 * 6 // 10))
    stepped.generate(large, 2)
    small, returns = {}, {}
    while stepped.sequence(large).place.admission == float("inf"):
        stepped.turn()
        number = large + 1 + len(small)
        stepped.open(number, [number % 997, 9])
        small[number] = stepped.generate(number, 2)
        stepped.append(waiting[-1], [5, 6, 7])
        returns[waiting[-1]] = stepped.now, stepped.generate(waiting[-1], 2)
        waiting.pop()
        assert len(small) < 400, "it waits behind those that came later"
    own = stepped.sequence(large).place
    for number in small:
        assert stepped.sequence(number).place.admission > own.admission
    for number, (returned_s, _) in returns.items():
        place = stepped.sequence(number).place
        if returned_s > arrived_s + stepped.scheduler.config.aging_s:
            assert place.admission > own.admission, "a return counts as having come a second earlier at most"
    for seq in waiting:
        stepped.generate(seq, 1)
    stepped.run(20_000)
    for seq in list(stepped.known):
        stepped.release(seq)
    stepped.finish()


@pytest.mark.parametrize("num_host_pages", [0, 500])
def test_a_large_newcomer_is_admitted_before_all_that_come_later(num_host_pages: int) -> None:
    newcomer_among(300, num_host_pages, 1)


@pytest.mark.soak
@pytest.mark.parametrize("num_host_pages", [0, 100, 4000])
@pytest.mark.parametrize("seed", range(3))
def test_a_large_newcomer_among_two_thousand(num_host_pages: int, seed: int) -> None:
    newcomer_among(2000, num_host_pages, seed)
