"""Forks that have kept their pages and go on with the same tokens: these are computed once."""

from __future__ import annotations

import random

import pytest

from tests.sched.stepping import Stepped
from weft.sched.sequence import SequenceState

CONTEXT = list(range(20))
FORKS = (1, 2, 3, 4)


def forked(**config: int) -> Stepped:
    """Sequences 1 to 4 of the same 24 tokens with KV, three pages, and one without."""
    stepped = Stepped(**{"num_pages": 80, "max_running": 8, **config})
    stepped.open(1, CONTEXT)
    stepped.generate(1, 5)
    stepped.run()
    for child in FORKS[1:]:
        stepped.fork(1, child)
    stepped.run()
    return stepped


def computed(stepped: Stepped) -> int:
    return stepped.scheduler.stats().prefill_tokens


@pytest.mark.parametrize("num_tokens", [9, 12, 16, 30, 61])
def test_a_common_message_is_computed_once(num_tokens: int) -> None:
    stepped = forked()
    known, message = computed(stepped), list(range(500, 500 + num_tokens))
    for seq in FORKS:
        stepped.append(seq, message)
        stepped.generate(seq, 4)
    stepped.run()
    # Of the page in which the message ends, each may compute its own part; of every message its last token.
    assert num_tokens < computed(stepped) - known <= 1 + num_tokens + 3 * 8
    stepped.finish()


def test_a_short_common_message_is_not_waited_for() -> None:
    stepped = forked()
    for seq in FORKS:
        stepped.append(seq, [500, 501, 502])
        stepped.generate(seq, 4)
    stepped.turn()
    assert all(stepped.sequence(seq).decoding for seq in FORKS)
    stepped.finish()


def test_what_the_forks_have_themselves_is_not_waited_for() -> None:
    stepped = Stepped(num_pages=80, max_running=8)
    stepped.open(1, list(range(22)))
    stepped.generate(1, 1)
    stepped.run()
    for child in FORKS[1:]:
        stepped.fork(1, child)
    stepped.run()
    for seq in FORKS:  # the page that each computes next begins with six tokens that all of them have
        stepped.append(seq, list(range(600 + 20 * seq, 616 + 20 * seq)))
        stepped.generate(seq, 4)
    stepped.turn()
    assert not any(stepped.sequence(seq).state is SequenceState.DEFERRED for seq in FORKS)
    stepped.finish()


def test_messages_share_what_they_begin_with() -> None:
    stepped = forked()
    known, common = computed(stepped), list(range(500, 540))
    for seq in FORKS:
        stepped.append(seq, [*common, *range(600 + 20 * seq, 610 + 20 * seq)])
        stepped.generate(seq, 4)
    stepped.run()
    assert computed(stepped) - known <= 41 + 4 * 10 + 3 * 8
    stepped.finish()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_later_fork_finds_what_an_earlier_one_has_computed(is_released: bool) -> None:
    stepped = forked()
    message = list(range(500, 530))
    stepped.append(2, message)
    stepped.generate(2, 20)
    for _ in range(8):
        stepped.turn()
    if is_released:
        stepped.run()
        stepped.release(2)
    known = computed(stepped)
    stepped.append(3, message)
    op = stepped.generate(3, 4)
    stepped.run()
    assert computed(stepped) - known < 8
    ending = stepped.generations[op].ending
    assert ending is not None
    assert ending.usage.num_cached_tokens >= len(CONTEXT) + 4 + len(message) - 8
    stepped.finish()


def test_a_fork_without_the_prefix_index_computes_its_own() -> None:
    stepped = forked(prefix_cache=False)
    known = computed(stepped)
    for seq in FORKS:
        stepped.append(seq, list(range(500, 530)))
        stepped.generate(seq, 4)
    stepped.run()
    assert computed(stepped) - known == 4 * 31
    stepped.finish()


def play(seed: int, num_acts: int) -> None:
    """Forks of forks with messages of few kinds, in a pool that is too small for them."""
    source = random.Random(seed)
    stepped = Stepped(
        num_pages=source.choice([16, 24, 60]),
        num_host_pages=source.choice([0, 20]),
        policy=source.choice(["lru", "min_waste", "discard", "swap"]),
        max_running=source.choice([2, 4]),
    )
    stepped.open(1, CONTEXT)
    names, begun = iter(range(2, 1000)), [1]
    for _ in range(num_acts):
        seq = source.choice(begun)
        act = source.randrange(8)
        length = len(stepped.known[seq])
        busy = stepped.sequence(seq).ops
        if act == 0 and len(begun) < 8:
            begun.append(next(names))
            stepped.run()
            stepped.fork(seq, begun[-1])
        elif act == 1 and len(begun) > 1:
            stepped.release(seq)
            begun.remove(seq)
        elif act == 2 and not busy and length > 20:
            stepped.truncate(seq, source.randrange(15, length))
        elif act >= 3 and not busy and length < 70:
            message = list(range(500, 500 + source.choice([1, 5, 9, 23])))
            stepped.append(seq, [*message, *([seq] if source.random() < 0.3 else [])])
            stepped.generate(seq, source.randrange(1, 7))
        for _ in range(source.choice([0, 0, 1, 3])):
            stepped.turn()
    stepped.finish()


@pytest.mark.parametrize("seed", range(6))
def test_forks_that_meet_at_random(seed: int) -> None:
    play(seed, 60)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_forks_that_meet_at_random(seed: int) -> None:
    play(seed, 150)


def test_a_fork_of_a_parked_sequence_computes_nothing_before_an_operation_asks() -> None:
    stepped = Stepped(num_pages=12, max_running=4)
    stepped.open(1, list(range(40)))
    stepped.generate(1, 1)
    stepped.run()
    stepped.open(2, list(range(500, 580)))
    stepped.generate(2, 1)
    stepped.run()
    assert stepped.sequence(1).wait is not None
    known = computed(stepped)
    stepped.fork(1, 3)
    stepped.run()
    assert computed(stepped) == known
    assert stepped.sequence(3).state is SequenceState.IDLE
    again = stepped.scheduler.stats().recomputed_tokens
    stepped.generate(3, 1)
    stepped.run()
    assert stepped.scheduler.stats().recomputed_tokens > again
    stepped.finish()
