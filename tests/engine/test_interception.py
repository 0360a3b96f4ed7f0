"""Sequences that wait for something other than the device: where their KV is; nothing shows in their tokens."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched.policies import POLICIES, make_policy
from weft.sched.sequence import SequenceState

SIZES = {
    "tight": {"num_device_pages": 24, "num_host_pages": 0},
    "tiers": {"num_device_pages": 24, "num_host_pages": 60},
    "small-host": {"num_device_pages": 30, "num_host_pages": 7},
}


def turn(driver: Driver, tokens: list[int], limit: int, namespace: str = "") -> tuple[list[int], wire.OperationUsage]:
    """One request of a plain client, alone on the engine. Returns all tokens and its usage."""
    number = driver.open(tokens, namespace=namespace)
    op = driver.generate(number, limit, eos=False)
    driver.run()
    ending = driver.operations[op].ending
    assert isinstance(ending, wire.Finished)
    return driver.end_turn(number), ending.usage


def test_the_next_turn_of_a_plain_client_computes_what_follows_to_the_token() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    tokens, _ = turn(driver, list(range(40)), 11)
    # 51 tokens, the last of which was sampled and has no KV.
    tokens, usage = turn(driver, [*tokens, 3, 4, 5], 4)
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (54, 50)
    _, usage = turn(driver, [*tokens[:-1], 9, 9], 1)
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (59, 57), "an edit of the last token"
    driver.finish()


def test_a_retry_and_two_forks_of_a_turn_all_continue_it() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    tokens, _ = turn(driver, list(range(20)), 6)
    found = [turn(driver, [*tokens, 50 + index], 3)[1].num_cached_tokens for index in range(3)]
    assert found == [25, 26, 26], "the first of them has computed the token that was sampled last"
    _, usage = turn(driver, list(range(20)), 6)
    assert usage.num_cached_tokens == 19, "the first turn again"
    driver.finish()


def test_a_turn_that_was_cancelled_or_released_without_a_kind_leaves_whole_pages_alone() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    number = driver.open(list(range(40)), namespace="")
    driver.generate(number, 11, eos=False)
    driver.run()
    tokens = driver.end_turn(number, kind="")
    _, usage = turn(driver, [*tokens, 3], 1)
    assert usage.num_cached_tokens == 48
    driver.finish()


def test_another_tenants_namespace_finds_nothing() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    tokens, _ = turn(driver, list(range(40)), 11, "a")
    _, usage = turn(driver, [*tokens, 3], 1, "b")
    assert usage.num_cached_tokens == 0
    driver.finish()


def park(driver: Driver, number: int) -> None:
    """Make the engine park an idle sequence, by a request that needs more pages than are free."""
    sequence = driver.engine.scheduler.sequences.open[1, number]
    assert sequence.state is SequenceState.IDLE
    free = driver.engine.cache.tiers.device.num_free
    turn(driver, [60] * (16 * free + 1), 1, "pressure")
    assert sequence.wait is not None


def test_an_idle_sequence_gives_up_no_more_than_is_needed_and_only_its_end() -> None:
    driver = Driver(num_device_pages=24, page_size=16, intercept=make_policy("lru"), max_context=600)
    number = driver.open(list(range(300)), namespace="")
    op = driver.generate(number, 4, eos=False)
    driver.run()
    assert driver.operations[op].ending is not None
    sequence = driver.engine.scheduler.sequences.open[1, number]
    before = driver.engine.scheduler.stats().prefill_tokens
    park(driver, number)
    asked = driver.engine.scheduler.stats().prefill_tokens - before
    driver.generate(number, 4, eos=False)
    driver.run()
    computed = driver.engine.scheduler.stats().prefill_tokens - before - asked
    assert 1 <= computed <= 4 * 16, f"{computed} of {len(sequence.tokens)} tokens were computed again"
    driver.finish()


def test_a_turn_that_was_parked_before_its_client_released_it_is_waited_for() -> None:
    driver = Driver(num_device_pages=24, page_size=16, max_context=400)
    number = driver.open(list(range(100)), namespace="")
    driver.generate(number, 4, eos=False)
    driver.run()
    turn(driver, [60] * 350, 1, "pressure")
    sequence = driver.engine.scheduler.sequences.open[1, number]
    assert sequence.wait is not None
    end = sequence.wait.end
    assert end is not None
    driver.end_turn(number, "tools")
    [wait] = end.waits.values()
    assert (wait.kind, wait.is_open, wait.num_tokens) == ("tools", False, 104)
    driver.finish()


def test_a_host_copy_stays_valid_so_that_giving_up_again_moves_nothing() -> None:
    driver = Driver(num_device_pages=24, num_host_pages=64, page_size=16, intercept=make_policy("lru"), max_context=600)
    number = driver.open(list(range(300)), namespace="")
    driver.generate(number, 4, eos=False)
    driver.run()

    def press_and_return() -> tuple[int, int]:
        before = driver.engine.scheduler.stats()
        turn(driver, [60 + driver.random.randrange(1000) % 30] * 300, 1, f"other{driver.random.random()}")
        middle = driver.engine.scheduler.stats()
        driver.generate(number, 1, eos=False)
        driver.run()
        after = driver.engine.scheduler.stats()
        out = sum(1 for node in driver.engine.cache.trees()[""].nodes() for _ in node.copies)
        assert out
        return (
            middle.swapped_out_pages - before.swapped_out_pages,
            after.prefill_tokens - middle.prefill_tokens,
        )

    first, computed = press_and_return()
    assert first > 0
    assert computed <= 2, "what the host has is not computed again"
    second, computed = press_and_return()
    assert second <= 3, f"{second} pages went out again, of which only the newest had no copy"
    assert computed <= 2
    driver.finish()


def test_a_long_return_comes_back_over_many_steps_while_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_device_pages=64, num_host_pages=128, page_size=16, max_context=1000, num_slots=8)
    number = driver.open([7] * 700, namespace="")
    driver.generate(number, 2, eos=False)
    driver.run()
    turn(driver, [8] * 900, 1, "pressure")
    monkeypatch.setattr("weft.sched.interception.UNMEASURED_COPIES", 4)
    other = driver.open([9] * 20, namespace="other")
    decoding = driver.generate(other, 60, eos=False)
    for _ in range(4):
        driver.step()
    driver.generate(number, 2, eos=False)
    steps, brought, tokens = 0, [], []
    while driver.operations[max(driver.operations)].ending is None:
        before = driver.engine.scheduler.stats()
        told = len(driver.operations[decoding].tokens)
        driver.step()
        brought.append(driver.engine.scheduler.stats().swapped_in_pages - before.swapped_in_pages)
        tokens.append(len(driver.operations[decoding].tokens) - told)
        steps += 1
        assert steps < 200
    assert max(brought) <= 5, "four pages, and one that is not full"
    assert sum(brought) >= 8, "it was on the host for a good part"
    assert tokens.count(1) >= len(tokens) - 1, "the other one had a token in every step"
    driver.finish()


class Clients:
    """Programs that keep their sequences, and plain clients that send all tokens again."""

    def __init__(self, driver: Driver, seed: int):
        self.driver = driver
        self.random = random.Random(seed)
        self.turns: list[list[int]] = []
        self.plain: dict[int, int] = {}
        self.retains: list[int] = []

    def act(self) -> None:
        driver, choice = self.driver, self.random.random()
        idle = [n for n, s in driver.sequences.items() if s.active is None and n not in self.plain]
        if choice < 0.15:
            number = driver.open()
            driver.generate(number, self.random.randrange(1, 12))
        elif choice < 0.35 and idle:
            number = self.random.choice(idle)
            tokens = [self.random.randrange(driver.vocab) for _ in range(self.random.randrange(1, 20))]
            if len(driver.sequences[number].tokens) + len(tokens) + 20 < 170:
                driver.send(wire.Append(seq=number, op=next(driver.numbers), tokens=pack_tokens(tokens)))
                driver.sequences[number].tokens += tokens
                driver.generate(number, self.random.randrange(1, 12))
        elif choice < 0.42 and idle:
            number = self.random.choice(idle)
            driver.send(wire.Release(seq=number))
            del driver.sequences[number]
        elif choice < 0.5 and idle:
            child = driver.fork(self.random.choice(idle))
            driver.generate(child, self.random.randrange(1, 6))
        elif choice < 0.55 and idle:
            number = self.random.choice(idle)
            keep = self.random.randrange(1, len(driver.sequences[number].tokens) + 1)
            driver.send(wire.Truncate(seq=number, num_tokens=keep))
            del driver.sequences[number].tokens[keep:]
        elif choice < 0.75:
            tokens = driver.text(60)
            if self.turns and self.random.random() < 0.7:
                tokens = [*self.random.choice(self.turns), *driver.text(20)][:150]
            number = driver.open(tokens, namespace="")
            self.plain[number] = driver.generate(number, self.random.randrange(1, 15))
        elif choice < 0.95 and idle:
            driver.send(self.residency(self.random.choice(idle)))
        for number, op in list(self.plain.items()):
            if driver.operations[op].ending is not None:
                del self.plain[number]
                self.turns.append(driver.end_turn(number, self.random.choice(["chat", "tools", ""])))
        driver.clock.advance(self.random.choice([0.0, 0.0, 0.5, 40.0]))
        driver.step()

    def residency(self, number: int) -> wire.Command:
        """A command on where the KV of an idle sequence, or of a finished turn, is kept."""
        random, op = self.random, next(self.driver.numbers)
        target: dict[str, Any] = {"op": op, "seq": number}
        if self.turns and random.random() < 0.5:
            target = {"op": op, "tokens": pack_tokens(random.choice(self.turns))}
        match random.randrange(6):
            case 0:
                self.retains.append(op)
                weight = random.choice([0.5, 20.0, math.inf])
                return wire.Retain(**target, ttl_s=random.choice([0.0, 5.0, 60.0, math.inf]), weight=weight)
            case 1 if self.retains:
                return wire.EndRetain(op=op, retain=random.choice(self.retains))
            case 2 | 3:
                return wire.Demote(**target)
            case 4:
                return wire.Prefetch(**target)
            case _:
                return wire.Expect(op=op, seq=number, kind="http", expected_in_s=random.choice([None, 0.0, 30.0]))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("size", sorted(SIZES))
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_no_policy_and_no_residency_shows_in_the_tokens(policy: str, size: str, overlap: bool) -> None:
    driver = Driver(
        3, overlap=overlap, page_size=8, max_context=256, num_slots=6, intercept=make_policy(policy), **SIZES[size]
    )
    clients = Clients(driver, len(policy) + len(size) + overlap)
    for _ in range(250):
        clients.act()
    driver.finish()
    outcomes = [event for event in driver.others if isinstance(event, wire.Finished | wire.Failed)]
    assert len({event.op for event in outcomes}) == len(outcomes), "one outcome for each command"
    if size == "tiers" and make_policy(policy).uses_index:
        assert any(isinstance(event, wire.Finished) and event.count > 0 for event in outcomes)
