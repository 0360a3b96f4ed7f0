"""Tools that never return, return twice, return too much, or return after their sequence was given up."""

from __future__ import annotations

import pytest

from tests.sched.stepping import Stepped
from weft.cache.nodes import MAX_WAITS_PER_NODE
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.sched.sequence import SequenceState


def failures(stepped: Stepped) -> list[str]:
    return [event.error.kind for event in stepped.others if isinstance(event, wire.Failed)]


def num_waits(stepped: Stepped) -> int:
    return sum(len(node.waits) for tree in stepped.cache.trees().values() for node in tree.nodes())


@pytest.mark.parametrize("kind", ["tools", "chat"])
def test_turns_that_nobody_extends_leave_nothing_but_the_pages_that_there_are(kind: str) -> None:
    """As many waits as nodes may have, however many turns end; and none of a tenant whose KV is gone."""
    stepped = Stepped(num_pages=40, num_host_pages=20, policy="min_waste", check_every=100)
    most = 0
    for seq in range(1, 500):
        stepped.open(seq, [seq % 1000, seq // 1000, *[5] * (seq % 30)], tenant=f"t{seq % 50}")
        stepped.generate(seq, 2)
        stepped.run()
        stepped.release(seq, kind)
        most = max(most, num_waits(stepped))
    assert most <= 60 * MAX_WAITS_PER_NODE
    assert num_waits(stepped) <= 60
    assert len(stepped.cache.trees()) <= 50
    stepped.finish()


def test_programs_that_never_go_on_hold_up_nobody() -> None:
    """300 contexts wait for ever; requests that need all pages are served beside them, and no context is lost."""
    stepped = Stepped(num_pages=24, num_host_pages=10, check_every=50)
    for seq in range(1, 301):
        stepped.open(seq, [seq % 1000, seq // 100, *[6] * 20])
        stepped.generate(seq, 1)
        stepped.run()
    for seq in range(1000, 1010):
        stepped.open(seq, [seq - 900] * 180)
        stepped.generate(seq, 3)
        stepped.run(40)
        stepped.release(seq)
    assert all(stepped.sequence(seq).state is SequenceState.IDLE for seq in range(1, 301))
    stepped.generate(150, 4)
    stepped.finish()


def test_a_result_that_comes_twice_is_there_twice() -> None:
    """Two results and two answers are asked for at once; the second is on the board while the first is computed."""
    stepped = Stepped(num_host_pages=20)
    stepped.open(1, list(range(60)))
    stepped.generate(1, 3)
    stepped.run()
    result = [700, 701, 702]
    stepped.append(1, result)
    first = stepped.generate(1, 2)
    op = 5000
    stepped.say(
        wire.Append(seq=1, op=op, tokens=pack_tokens(result)),
        wire.Generate(seq=1, op=op + 1, stop=StopParams(max_tokens=2)),
    )
    stepped.run()
    assert stepped.generations[first].ending is not None
    assert stepped.sequence(1).tokens[63:].tolist()[:3] == result
    assert stepped.sequence(1).tokens[68:71].tolist() == result
    [ending] = [event for event in stepped.events_of(op + 1) if isinstance(event, wire.Finished)]
    assert ending.usage.num_prompt_tokens == 71
    stepped.finish()


@pytest.mark.parametrize("policy", ["lru", "min_waste", "swap"])
def test_two_requests_that_extend_one_turn_are_both_answered(policy: str) -> None:
    """As from a client that repeats a request: the turn's wait ends once, and what they share is computed once."""
    stepped = Stepped(num_pages=48, num_host_pages=40, policy=policy)
    stepped.open(1, list(range(60)))
    stepped.generate(1, 4)
    stepped.run()
    turn = [*stepped.known[1], 700, 701, *range(100, 130)]
    stepped.release(1, "tools")
    before = stepped.scheduler.stats().prefill_tokens
    for seq in (2, 3):
        stepped.open(seq, turn)
    for seq in (2, 3):
        stepped.generate(seq, 3)
    stepped.run()
    if policy != "swap":  # which has moved the turn away, so that both come back before either computes
        assert stepped.scheduler.stats().prefill_tokens - before <= len(turn) - 63 + 8 + 1
    for seq in (2, 3):
        stepped.release(seq, "tools")
    assert num_waits(stepped) == 2
    stepped.finish()


@pytest.mark.parametrize("policy", ["lru", "min_waste", "swap", "discard"])
@pytest.mark.parametrize("length", [60, 64])
def test_a_turn_that_is_asked_for_again_and_again_is_kept_once(policy: str, length: int) -> None:
    stepped = Stepped(num_pages=48, num_host_pages=40, policy=policy)
    for seq in range(1, 5):
        stepped.open(seq, list(range(length)))
        stepped.generate(seq, 1)
        stepped.run()
        stepped.release(seq, "chat")
        stepped.settle()
    indexed = sum(node.num_pages for tree in stepped.cache.trees().values() for node in tree.nodes())
    assert indexed <= -(-length // 8) + 1
    stepped.finish()


def test_a_result_of_megabytes_fails_alone_and_its_sequence_can_be_cut_back() -> None:
    stepped = Stepped(num_host_pages=20)
    for seq in (1, 2):
        stepped.open(seq, [seq] * 60)
        stepped.generate(seq, 3)
    stepped.run()
    free = stepped.cache.tiers.device.num_free
    stepped.say(wire.Append(seq=1, op=1, tokens=pack_tokens([9]) * 1_000_000))
    assert failures(stepped) == ["context_too_long"]
    assert stepped.cache.tiers.device.num_free == free
    assert len(stepped.sequence(1).tokens) == 63
    stepped.say(wire.Generate(seq=1, op=2))
    assert failures(stepped) == ["context_too_long"] * 2, "nothing is generated where a result is missing"
    stepped.generate(2, 3)
    stepped.truncate(1, 63)
    stepped.append(1, [8, 8])
    stepped.generate(1, 3)
    stepped.finish()


@pytest.mark.parametrize("how", [wire.Release(seq=1), wire.Release(seq=1, kind="tools"), wire.Hold(seq=1, ttl_s=9.0)])
def test_a_result_that_comes_too_late_is_refused(how: wire.Command) -> None:
    stepped = Stepped(num_host_pages=20)
    stepped.open(1, list(range(60)))
    stepped.generate(1, 3)
    stepped.run()
    stepped.say(how)
    del stepped.known[1]
    stepped.say(wire.Append(seq=1, op=1, tokens=pack_tokens([7])), wire.Generate(seq=1, op=2))
    assert failures(stepped) == ["unknown_handle"] * 2
    assert not stepped.scheduler.has_work
    stepped.finish()
