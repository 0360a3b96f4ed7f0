"""Commands on a sequence whose pages move between device and host, with a step in flight that moves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.sched.stepping import CLIENT, Stepped
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched.sequence import SequenceState

TOKENS = [*range(40), *range(300, 340)]
"""Of sequence 1, the one that commands are about: ten pages."""


class Setup(NamedTuple):
    """What the states below begin with."""

    monkeypatch: pytest.MonkeyPatch
    is_masked: bool
    """Whether sequence 1 hides tokens from those that it does not share with sequence 2."""

    def copies_per_step(self, num_pages: int) -> None:
        self.monkeypatch.setattr("weft.sched.interception.UNMEASURED_COPIES", num_pages)
        self.monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", num_pages)

    def intercepted(self, num_host_pages: int = 60, policy: str = "lru") -> Stepped:
        """Sequence 1 has run and waits for its program; sequence 2 shares its first half."""
        stepped = Stepped(num_pages=24, num_host_pages=num_host_pages, policy=policy)
        stepped.open(1, TOKENS[:44])
        if self.is_masked:
            stepped.say(wire.MaskTokens(seq=1, op=5, ranges=pack_tokens([3, 9])))
        stepped.append(1, TOKENS[44:])
        stepped.generate(1, 3)
        stepped.run()
        stepped.open(2, [*TOKENS[:40], 7, 8, 9])
        stepped.generate(2, 2)
        stepped.run()
        return stepped


def press(stepped: Stepped) -> None:
    """A request that needs nearly all pages."""
    stepped.open(9, [900] * 180)
    stepped.generate(9, 2)


def going_out(setup: Setup) -> Stepped:
    """The step in flight takes its last pages to the host, and none were copied before."""
    setup.monkeypatch.setattr("weft.sched.interception.HORIZON_STEPS", 0)
    stepped = setup.intercepted()
    press(stepped)
    while not any(len(scheduled.step.swap_outs) for scheduled in stepped.in_flight):
        stepped.turn()
    assert stepped.pages(1)[1] > 0
    return stepped


def copied_ahead(setup: Setup) -> Stepped:
    """The step in flight copies its last pages, which stay on the device."""
    setup.copies_per_step(3)
    stepped = setup.intercepted(policy="min_waste")
    stepped.open(8, [800] * 8)
    stepped.generate(8, 40)
    while not any(len(scheduled.step.swap_outs) for scheduled in stepped.in_flight):
        stepped.turn()
    assert stepped.pages(1) == (10, 0)
    return stepped


def on_host(setup: Setup) -> Stepped:
    """The host has all its pages; another sequence's step is in flight."""
    stepped = setup.intercepted()
    press(stepped)
    stepped.run()
    stepped.release(9)
    stepped.open(8, [800] * 8)
    stepped.generate(8, 40)
    stepped.turn()
    assert stepped.in_flight
    assert stepped.pages(1)[1] >= 9
    return stepped


def coming_back(setup: Setup) -> Stepped:
    """The step in flight brings all its pages back."""
    stepped = on_host(setup)
    stepped.generate(1, 4)
    stepped.turn()
    assert len(stepped.in_flight[-1].step.swap_ins) >= 9
    assert stepped.sequence(1).state is SequenceState.WAITING
    return stepped


def partly_back(setup: Setup) -> Stepped:
    """The step in flight brings two of its pages; some are back, and the host has the rest."""
    stepped = on_host(setup)
    setup.copies_per_step(2)
    kept, _ = stepped.pages(1)
    stepped.generate(1, 4)
    stepped.turn()
    stepped.turn()
    assert len(stepped.in_flight[-1].step.swap_ins) == 2
    assert stepped.sequence(1).returning
    assert len(stepped.sequence(1).table.pages) == kept + 4
    return stepped


def just_back(setup: Setup) -> Stepped:
    """The step in flight computes its next token over pages that came back in the step before."""
    stepped = coming_back(setup)
    stepped.turn()
    assert stepped.sequence(1).state is SequenceState.RUNNING
    return stepped


def without_room(setup: Setup) -> Stepped:
    """It waits for pages, all of which another sequence uses."""
    stepped = setup.intercepted()
    stepped.open(9, [900] * 176)
    stepped.generate(9, 12)
    for _ in range(5):
        stepped.turn()
    stepped.generate(1, 4)
    stepped.turn()
    assert stepped.sequence(1).state is SequenceState.WAITING
    assert not stepped.sequence(1).table.pages
    return stepped


def partly_gone(setup: Setup, num_host_pages: int) -> Stepped:
    """Pages were given up, of which the host has some where it has room for any."""
    stepped = setup.intercepted(num_host_pages=num_host_pages)
    press(stepped)
    while sum(stepped.pages(1)) == 10 or stepped.cache.tiers.host.num_free == num_host_pages > 0:
        stepped.turn()
    assert stepped.in_flight
    return stepped


def host_full(setup: Setup) -> Stepped:
    """The host has room for three pages of all that were given up."""
    return partly_gone(setup, 3)


def without_host(setup: Setup) -> Stepped:
    """There is no host tier: what was given up is gone."""
    return partly_gone(setup, 0)


STATES = [
    going_out,
    copied_ahead,
    on_host,
    coming_back,
    partly_back,
    just_back,
    without_room,
    host_full,
    without_host,
]


def cancel(stepped: Stepped) -> None:
    stepped.say(wire.Cancel(seq=1))


def cancel_twice(stepped: Stepped) -> None:
    stepped.say(wire.Cancel(seq=1), wire.Cancel(seq=1))


def fork(stepped: Stepped) -> None:
    stepped.fork(1, 20)
    stepped.generate(20, 3)
    stepped.say(wire.Cancel(seq=1))


def fork_after_cancel(stepped: Stepped) -> None:
    stepped.say(wire.Cancel(seq=1))
    stepped.fork(1, 20)
    stepped.fork(20, 21)
    stepped.append(21, [4, 5])
    stepped.generate(20, 3)
    stepped.generate(21, 3)


def fork_and_release(stepped: Stepped) -> None:
    stepped.say(wire.Cancel(seq=1))
    stepped.fork(1, 20)
    stepped.generate(20, 3)
    stepped.release(1)


def truncate_to(num_tokens: int) -> Callable[[Stepped], None]:
    def truncate(stepped: Stepped) -> None:
        stepped.truncate(1, num_tokens)

    truncate.__name__ = f"truncate_to_{num_tokens}"
    return truncate


def truncate_and_go_on(stepped: Stepped) -> None:
    stepped.truncate(1, 61)
    stepped.append(1, [70, 71, 72])
    stepped.generate(1, 2)


def release(stepped: Stepped) -> None:
    stepped.release(1)


def release_with_kind(stepped: Stepped) -> None:
    stepped.release(1, "chat")


def release_both(stepped: Stepped) -> None:
    stepped.release(2)
    stepped.release(1, "tools")


def hold(stepped: Stepped) -> None:
    stepped.say(wire.Hold(seq=1, ttl_s=0.05))
    del stepped.known[1]


def expect(stepped: Stepped) -> None:
    stepped.say(wire.Expect(seq=1, kind="http", expected_in_s=3.0), wire.Expect(seq=1, kind="people"))


def later_priority(stepped: Stepped) -> None:
    stepped.say(wire.SetPriority(seq=1, priority=5))


def forget_prefixes(stepped: Stepped) -> None:
    stepped.say(wire.ResetPrefixCache())


def drop_client(stepped: Stepped) -> None:
    stepped.scheduler.drop_client(CLIENT, stepped.now)
    stepped.known.clear()
    stepped.generations.clear()
    stepped.check()


COMMANDS = [
    cancel,
    cancel_twice,
    fork,
    fork_after_cancel,
    fork_and_release,
    *[truncate_to(num_tokens) for num_tokens in (0, 37, 40, 79, 80)],
    truncate_and_go_on,
    release,
    release_with_kind,
    release_both,
    hold,
    expect,
    later_priority,
    forget_prefixes,
    drop_client,
]


@pytest.fixture(params=[False, True], ids=["plain", "masked"])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch, request.param)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_command_while_pages_move(
    state: Callable[[Setup], Stepped], command: Callable[[Stepped], None], setup: Setup
) -> None:
    """Every token afterwards is that of the tokens alone, and nothing is left behind."""
    stepped = state(setup)
    command(stepped)
    stepped.settle()
    stepped.run()
    if 1 in stepped.known:
        stepped.append(1, [50])
        stepped.generate(1, 3)
    if 2 in stepped.known:
        stepped.generate(2, 3)
    stepped.open(30, TOKENS)
    stepped.generate(30, 2)
    stepped.finish()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("command", [cancel, release, drop_client], ids=lambda command: command.__name__)
def test_what_ends_is_free_once_the_steps_in_flight_are_done(
    state: Callable[[Setup], Stepped], command: Callable[[Stepped], None], setup: Setup
) -> None:
    stepped = state(setup)
    command(stepped)
    for seq in list(stepped.known):
        stepped.release(seq)
    stepped.settle()
    tiers = stepped.cache.tiers
    assert tiers.device.num_fenced == tiers.host.num_fenced == 0
    assert tiers.num_available == tiers.device.num_pages
    assert not stepped.scheduler.has_work


@pytest.mark.parametrize(
    ("policy", "copies"), [("lru", True), ("min_waste", True), ("swap", False), ("discard", False)]
)
def test_policies_that_act_when_a_wait_begins_copy_nothing_ahead(policy: str, copies: bool) -> None:
    stepped = Stepped(num_pages=24, num_host_pages=60, policy=policy)
    stepped.open(1, TOKENS[:44])
    stepped.generate(1, 3)
    stepped.run()
    stepped.release(1)
    stepped.open(8, [800] * 8)
    stepped.generate(8, 40)
    moved = 0
    while stepped.scheduler.has_work:
        stepped.turn()
        moved += sum(len(scheduled.step.swap_outs) for scheduled in stepped.in_flight)
    assert (moved > 0) is copies


@pytest.mark.parametrize("others", ["alone", "twin", "rival"])
@pytest.mark.parametrize("cut", [46, 37, 13])
@pytest.mark.parametrize("copies", [60, 2])
@pytest.mark.parametrize("is_plain", [True, False], ids=["client", "program"])
def test_no_forward_waits_for_the_last_page_of_a_return(
    copies: int, is_plain: bool, cut: int, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has all but the first page. The last page of the `cut` tokens that the sequence goes on with is a tail,
    or a full page that differs after `cut`: it too comes before the step that goes on. A twin goes on with the same
    tokens in the same step; a rival needs other pages of the same budget of copies."""
    stepped = Stepped(num_pages=24, num_host_pages=60)
    stepped.open(2, [*range(500, 550)])
    stepped.generate(2, 1)
    stepped.run()
    stepped.open(1, TOKENS[:44])
    stepped.generate(1, 3)
    stepped.run()
    known = stepped.known[1][: cut + (cut == 46)]
    if is_plain:
        stepped.release(1, kind="chat")
    press(stepped)
    stepped.run()
    stepped.release(9)
    Setup(monkeypatch, is_masked=False).copies_per_step(copies)
    operations = []
    if others == "rival":
        operations.append(stepped.generate(2, 1))
    if is_plain:
        stepped.open(1, [*known, 5])
    else:
        if cut < 46:
            stepped.truncate(1, cut)
        stepped.append(1, [5])
    operations.append(stepped.generate(1, 2))
    if others == "twin":
        stepped.open(3, [*known, 6])
        operations.append(stepped.generate(3, 2))
    stepped.open(8, [800] * 8)
    stepped.generate(8, 40)
    moved = 0
    while any(stepped.generations[op].ending is None for op in operations):
        step = stepped.turn()
        arriving = step.swap_ins[:, 1]
        moved += len(arriving)
        assert step.forward is None or not step.forward.touches(arriving, 8, 24)
    endings = {stepped.generations[op].seq: stepped.generations[op].ending for op in operations}
    usages = {seq: ending.usage for seq, ending in endings.items() if isinstance(ending, wire.Finished)}
    assert usages[1].num_cached_tokens == cut
    if others == "alone":
        assert usages[1].num_host_tokens == cut - 8
    if others == "twin":
        assert usages[3].num_cached_tokens == cut
    if others != "rival":
        assert moved == -(-cut // 8) - 1, "each page comes once"
    stepped.finish()


@pytest.mark.parametrize("copies", [60, 2])
@pytest.mark.parametrize(("num_pins", "pin_pages"), [(1, 6), (2, 6), (4, 3), (6, 2)])
def test_pages_come_before_the_forward_where_pins_leave_no_room_for_all(
    num_pins: int, pin_pages: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pin holds two to six of 24 pages, and nothing runs. A return of twenty pages brings all that the host has:
    it would break the pins as it goes on."""
    stepped = Stepped(num_pages=24, num_host_pages=60)
    stepped.open(1, [*range(150)])
    stepped.generate(1, 1)
    stepped.run()
    for number in range(num_pins):
        stepped.open(3, [*range(600 + 50 * number, 600 + 50 * number + 8 * pin_pages)])
        stepped.generate(3, 1)
        tokens = pack_tokens(stepped.known[3])
        stepped.run()
        stepped.release(3)
        stepped.say(wire.Retain(op=number + 1, tokens=tokens, ttl_s=1e9, weight=math.inf))
    stepped.open(9, [900] * 90)
    stepped.generate(9, 1)
    stepped.run()
    stepped.release(9)
    on_device, on_host = stepped.pages(1)
    assert on_host >= 12
    Setup(monkeypatch, is_masked=False).copies_per_step(copies)
    op = stepped.generate(1, 2)
    moved = 0
    while stepped.generations[op].ending is None:
        step = stepped.turn()
        arriving = step.swap_ins[:, 1]
        moved += len(arriving)
        assert step.forward is None or not step.forward.touches(arriving, 8, 24)
    ending = stepped.generations[op].ending
    assert isinstance(ending, wire.Finished)
    assert (ending.usage.num_cached_tokens, ending.usage.num_recomputed_tokens) == (150, 0)
    assert moved == 19 - on_device, "each page comes once, the tail too"
    num_lacking = num_pins * pin_pages - (24 - 20)
    assert stepped.scheduler.stats().retains_ended == {"broken": -(-num_lacking // pin_pages)}
    stepped.finish()


@pytest.mark.parametrize("copies", [60, 2])
def test_a_return_starts_with_what_came_where_nothing_gives_way_before(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs share twelve of 24 pages, which are therefore not lent. A return of twenty pages brings as many as
    are free, then starts, computes the rest, and takes those pages as it writes."""
    stepped = Stepped(num_pages=24, num_host_pages=60)
    stepped.open(1, [*range(150)])
    stepped.generate(1, 1)
    stepped.run()
    stepped.open(9, [900] * 180)
    stepped.generate(9, 1)
    stepped.run()
    stepped.release(9)
    first = stepped.program(3, 12)
    stepped.run()
    first.do(wire.ExportPages, queue=1, pages=first.packed, name="pages")
    stepped.run()
    stepped.program(4, 12, like=first)
    stepped.run()
    on_device, on_host = stepped.pages(1)
    assert (on_device + on_host, len(stepped.scheduler.spaces.device_pages())) == (18, 12)
    Setup(monkeypatch, is_masked=False).copies_per_step(copies)
    op = stepped.generate(1, 2)
    moved = 0
    while stepped.generations[op].ending is None:
        step = stepped.turn()
        arriving = step.swap_ins[:, 1]
        moved += len(arriving)
        assert step.forward is None or not step.forward.touches(arriving, 8, 24)
    ending = stepped.generations[op].ending
    assert isinstance(ending, wire.Finished)
    assert ending.usage.num_cached_tokens == 8 * (on_device + moved)
    stepped.finish()


@pytest.mark.parametrize(("num_common", "copies"), [(9, 60), (13, 0)], ids=["one-token", "no-budget"])
def test_the_tokens_of_a_part_of_a_page_are_computed_where_it_is_not_brought(
    num_common: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has one token in common with a page of the host, or comes when the budget of copies is used up,
    starts at once."""
    stepped = Stepped(num_pages=24, num_host_pages=60)
    stepped.open(1, TOKENS)
    stepped.generate(1, 1)
    stepped.run()
    stepped.release(1, kind="chat")
    press(stepped)
    stepped.run()
    stepped.release(9)
    Setup(monkeypatch, is_masked=False).copies_per_step(copies)
    stepped.open(2, [*TOKENS[:num_common], 5, 6, 7])
    op = stepped.generate(2, 1)
    step = stepped.turn()
    assert step.forward is not None
    assert (len(step.swap_ins), step.forward.num_tokens) == (0, num_common - 8 + 3)
    stepped.run()
    ending = stepped.generations[op].ending
    assert isinstance(ending, wire.Finished)
    assert ending.usage.num_cached_tokens == 8
    stepped.finish()
