"""KV that a sequence computed under masks: parked like any other, found by the sequence and its forks alone."""

from __future__ import annotations

import pytest

from tests.sched.stepping import CLIENT, Stepped
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched import sequence_table

TOKENS = list(range(80))
"""Ten pages; the last four are under a mask."""
FIRST_MASKED = 48


def intercepted(num_pages: int = 24) -> Stepped:
    stepped = Stepped(num_pages=num_pages, num_host_pages=60)
    stepped.open(1, TOKENS[:FIRST_MASKED])
    stepped.say(wire.MaskTokens(seq=1, op=5, ranges=pack_tokens([3, 9])))
    stepped.append(1, TOKENS[FIRST_MASKED:])
    stepped.generate(1, 3)
    stepped.run()
    return stepped


def press(stepped: Stepped) -> None:
    """A request of another tenant that needs nearly all pages."""
    stepped.open(9, [900] * (stepped.cache.tiers.device.num_pages - 2) * 8, tenant="other")
    stepped.generate(9, 2)
    stepped.run()
    stepped.release(9)


def num_indexed(stepped: Stepped) -> int:
    """Pages of the tenant of sequence 1 in the prefix index, on both tiers."""
    return sum(node.num_pages for node in stepped.cache.trees()[""].nodes())


def cached(stepped: Stepped, seq: int) -> int:
    """Tokens that the first generation of a new sequence finds."""
    op = stepped.generate(seq, 2)
    stepped.run()
    ending = stepped.generations[op].ending
    assert isinstance(ending, wire.Finished)
    return ending.usage.num_cached_tokens


def test_a_masked_part_moves_to_the_host_and_comes_back() -> None:
    stepped = intercepted()
    press(stepped)
    host = stepped.pages(1)[1]
    assert host > 4, "more than was computed without a mask"
    before = stepped.scheduler.stats()
    stepped.append(1, [50])
    stepped.generate(1, 3)
    stepped.run()
    after = stepped.scheduler.stats()
    assert after.recomputed_tokens == before.recomputed_tokens
    assert after.swapped_in_pages - before.swapped_in_pages == host + 1, "and the last page, which is not full"
    stepped.finish()


def test_only_the_sequence_and_its_forks_find_a_masked_part() -> None:
    stepped = intercepted()
    tokens = stepped.known[1]
    press(stepped)
    stepped.open(2, tokens)
    assert cached(stepped, 2) == FIRST_MASKED
    stepped.open(3, tokens[:FIRST_MASKED])
    stepped.say(wire.MaskTokens(seq=3, op=6, ranges=pack_tokens([3, 9])))
    stepped.append(3, tokens[FIRST_MASKED:])
    assert cached(stepped, 3) == FIRST_MASKED, "a branch has one sequence, whatever the mask"
    stepped.fork(1, 4)
    stepped.append(4, [7])
    before = stepped.scheduler.stats().recomputed_tokens
    stepped.generate(4, 2)
    stepped.run()
    assert stepped.scheduler.stats().recomputed_tokens == before
    stepped.finish()


def test_forks_share_what_they_have_in_common_and_nothing_after_it() -> None:
    stepped = intercepted(num_pages=40)
    stepped.fork(1, 2)
    stepped.fork(2, 3)
    for seq in (1, 2, 3):
        stepped.append(seq, [200 + seq] * 16)
        stepped.generate(seq, 1)
    stepped.run()
    press(stepped)
    assert [sum(stepped.pages(seq)) for seq in (1, 2, 3)] == [12] * 3
    assert num_indexed(stepped) == 10 + 3 * 3, "what they share is there once"
    before = stepped.scheduler.stats().recomputed_tokens
    for seq in (1, 2, 3):
        stepped.append(seq, [60])
        stepped.generate(seq, 2)
        stepped.run()
    assert stepped.scheduler.stats().recomputed_tokens == before
    stepped.finish()


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_closed_sequence_leaves_what_it_computed_without_masks(is_parked: bool) -> None:
    stepped = intercepted()
    if is_parked:
        press(stepped)
    stepped.release(1, "chat")
    assert num_indexed(stepped) == FIRST_MASKED // 8
    stepped.finish()


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("num_tokens", [20, FIRST_MASKED, 60])
def test_what_is_cut_off_a_branch_is_forgotten(num_tokens: int, is_parked: bool) -> None:
    stepped = intercepted()
    if is_parked:
        press(stepped)
    stepped.truncate(1, num_tokens)
    assert num_indexed(stepped) == -(-max(num_tokens, FIRST_MASKED) // 8)
    assert sum(stepped.pages(1)) == num_tokens // 8
    stepped.append(1, TOKENS[num_tokens:])
    stepped.generate(1, 2)
    stepped.finish()


def test_numbers_of_branches_that_begin_anew_are_not_those_of_open_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_table, "LEAST_BRANCH", -3)
    stepped = Stepped()
    for seq in (1, 2):
        stepped.open(seq, [1, 2, 3])
        stepped.say(wire.MaskTokens(seq=seq, op=seq, ranges=pack_tokens([0, 1])))
    stepped.release(1)
    numbers = [stepped.scheduler.sequences.new_branch() for _ in range(5)]
    assert numbers == [-3, -1, -3, -1, -3], "sequence 2 has -2"
    assert [branch.number for branch in stepped.scheduler.sequences.open[CLIENT, 2].branches] == [-2]


def test_a_sequence_that_is_cut_and_goes_on_finds_nothing_of_its_forks() -> None:
    stepped = intercepted()
    stepped.fork(1, 2)
    press(stepped)
    stepped.truncate(1, 60)
    stepped.append(1, [7] * 20)
    stepped.generate(1, 2)
    stepped.run()
    stepped.generate(2, 2)
    stepped.finish()
