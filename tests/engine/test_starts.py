"""Starts of generations, and what operations have computed: told before the first token, and equal to the counters."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.sched.policies import make_policy


def started(driver: Driver, op: int) -> wire.Started:
    (found,) = [event for event in driver.others if isinstance(event, wire.Started) and event.op == op]
    return found


def begin(driver: Driver, tokens: list[int], limit: int = 2) -> tuple[int, int]:
    """Open a sequence and generate, asking for the start. Returns the numbers of both."""
    seq, op = next(driver.numbers), next(driver.numbers)
    driver.send(
        wire.Open(seq=seq),
        wire.Append(seq=seq, op=next(driver.numbers), tokens=pack_tokens(tokens)),
        wire.Generate(seq=seq, op=op, stop=stop_after(limit), tells_start=True),
    )
    return seq, op


def stop_after(limit: int) -> StopParams:
    return StopParams(max_tokens=limit, ignore_eos=True)


def ends(driver: Driver) -> dict[int, wire.Finished]:
    return {event.op: event for event in driver.others if isinstance(event, wire.Finished)}


def tokens_of(driver: Driver, op: int) -> list[int]:
    return [event.token for event in driver.others if isinstance(event, wire.Token) and event.op == op]


def test_a_start_says_what_of_the_prompt_is_there_before_the_first_token() -> None:
    driver = Driver(num_device_pages=64, page_size=16, intercept=make_policy("lru"), max_context=400)
    prompt = list(range(100))
    seq, op = begin(driver, prompt)
    driver.run()
    first = started(driver, op)
    assert (first.num_prompt_tokens, first.num_cached_tokens, first.num_continued_tokens) == (100, 0, 0)
    places = [event.op for event in driver.others if isinstance(event, wire.Started | wire.Token)]
    assert places == [op, op, op]
    driver.send(wire.Release(seq=seq, kind="chat"))
    driver.run()

    more = [*prompt, *tokens_of(driver, op), 7, 8]
    seq, op = begin(driver, more)
    driver.run()
    again, usage = started(driver, op), ends(driver)[op].usage
    assert again.num_prompt_tokens == 104
    assert again.num_cached_tokens == again.num_continued_tokens == 101, "the last token of an answer has no KV"
    assert (usage.num_cached_tokens, usage.num_continued_tokens, usage.num_prefill_tokens) == (101, 101, 3)
    driver.send(wire.Release(seq=seq))
    driver.run()
    assert driver.engine.stats().prefill_tokens == 103


def test_forks_go_on_from_their_parent() -> None:
    driver = Driver(num_device_pages=64, page_size=16, max_context=400)
    seq, _ = begin(driver, list(range(100)))
    child, other = next(driver.numbers), next(driver.numbers)
    driver.send(
        wire.Fork(seq=seq, child=child),
        wire.Append(seq=child, op=next(driver.numbers), tokens=pack_tokens([5, 6, 7])),
        wire.Generate(seq=child, op=other, stop=stop_after(2), tells_start=True),
    )
    driver.run()
    fork, usage = started(driver, other), ends(driver)[other].usage
    assert fork.num_prompt_tokens == 105
    assert fork.num_cached_tokens == fork.num_continued_tokens == usage.num_continued_tokens == 101
    assert usage.num_prefill_tokens == 4
    assert sum(each.usage.num_prefill_tokens for each in ends(driver).values()) == driver.engine.stats().prefill_tokens
    for number in (seq, child):
        driver.send(wire.Release(seq=number))
    driver.run()


@pytest.mark.parametrize("seed", range(6))
def test_what_operations_computed_adds_up_to_the_engine_s_counter(seed: int) -> None:
    driver = Driver(seed, num_device_pages=20, page_size=16, max_context=300, num_slots=8)
    driver.random.seed(seed)
    opened = [
        begin(driver, [driver.random.randrange(40)] * driver.random.randrange(20, 150), limit=40) for _ in range(8)
    ]
    driver.run()
    found = ends(driver)
    assert set(found) == {op for _, op in opened}
    stats = driver.engine.stats()
    assert stats.preemptions > 0
    assert sum(each.usage.num_prefill_tokens for each in found.values()) == stats.prefill_tokens
    assert sum(each.usage.num_prompt_tokens for each in found.values()) == stats.prompt_tokens
    for seq, _ in opened:
        driver.send(wire.Release(seq=seq))
    driver.run()


def turn(driver: Driver, prompt: list[int]) -> list[int]:
    """A finished turn, whose client may go on. Returns all of its tokens."""
    seq, op = begin(driver, prompt, limit=20)
    driver.run()
    driver.send(wire.Release(seq=seq, kind="chat"))
    driver.run()
    return [*prompt, *tokens_of(driver, op)]


def continued(driver: Driver, prompt: list[int]) -> tuple[int, int]:
    """Cached and continued tokens of a request."""
    seq, op = begin(driver, prompt)
    driver.run()
    usage = ends(driver)[op].usage
    assert started(driver, op).num_continued_tokens == usage.num_continued_tokens
    driver.send(wire.Release(seq=seq))
    driver.run()
    return usage.num_cached_tokens, usage.num_continued_tokens


def test_every_request_that_goes_on_with_a_finished_turn_continues_it() -> None:
    driver = Driver(num_device_pages=64, page_size=16, intercept=make_policy("lru"), max_context=400)
    whole = turn(driver, list(range(100)))
    assert continued(driver, [*whole, 7, 8]) == (119, 119)
    cached, again = continued(driver, [*whole, 9, 9, 9])
    assert cached == again >= 112, "the second branch of a conversation continues the same turn"


def test_a_request_with_another_answer_continues_the_turn_as_far_as_it_has_it() -> None:
    driver = Driver(num_device_pages=64, page_size=16, intercept=make_policy("lru"), max_context=400)
    prompt = list(range(100))
    whole = turn(driver, prompt)
    other = [*whole[:114], 1, 1, 1, 1, 1]
    cached, found = continued(driver, other)
    assert 112 <= cached == found <= 114
    assert continued(driver, [*prompt[:80], 3, 3, 3, 3]) == (80, 0), "that is not its prompt"


def test_found_tokens_behind_the_turn_are_cached_and_not_continued() -> None:
    driver = Driver(num_device_pages=64, page_size=16, intercept=make_policy("lru"), max_context=400)
    whole = turn(driver, list(range(100)))
    longer = [*whole, *range(200, 260)]
    continued(driver, longer)
    cached, found = continued(driver, [*longer[:-1], 1, 2])
    assert cached >= 160
    assert found in (119, 120)
