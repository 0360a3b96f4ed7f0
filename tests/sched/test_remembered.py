"""What a scheduler remembers of turns and of KV that was given up, through what requests are told."""

from __future__ import annotations

import pytest

from tests.sched.stepping import Stepped
from weft.core import wire
from weft.sched import finished_turns
from weft.sched.sequence import COLD

PROMPT = list(range(50))


def usage_of(stepped: Stepped, op: int) -> wire.OperationUsage:
    ending = stepped.generations[op].ending
    assert isinstance(ending, wire.Finished)
    return ending.usage


def ask(stepped: Stepped, seq: int, tokens: list[int], tenant: str = "", kind: str = "") -> wire.OperationUsage:
    """A request with one new token, which waits as `kind` afterwards."""
    stepped.open(seq, tokens, tenant=tenant)
    op = stepped.generate(seq, 1)
    stepped.run()
    stepped.release(seq, kind)
    return usage_of(stepped, op)


def choices(stepped: Stepped, count: int, limit: int) -> list[list[int]]:
    """The tokens of finished turns that answer one prompt."""
    for seq in range(1, count + 1):
        stepped.open(seq, PROMPT)
        stepped.generate(seq, limit)
    stepped.run()
    turns = [list(stepped.known[seq]) for seq in range(1, count + 1)]
    for seq in range(1, count + 1):
        stepped.release(seq, "chat")
    return turns


def test_every_one_of_many_choices_is_continued_whole() -> None:
    stepped = Stepped(num_pages=400, max_context=400, check_every=100)
    for number, turn in enumerate(choices(stepped, 128, 6)):
        usage = ask(stepped, 1001 + number, [*turn, 900, 901])
        assert usage.num_cached_tokens == len(turn) - 1
        assert usage.first_different_token is None
    assert stepped.scheduler.stats().wait_returns == {"chat": {"kept": 128}}
    stepped.finish()


def test_no_token_is_said_to_differ_before_kv_that_was_found() -> None:
    stepped = Stepped(num_pages=60, max_context=400)
    [turn] = choices(stepped, 1, 6)
    rendered = [*turn[:52], (turn[52] + 1) % 1000, *range(900, 920)]
    usage = ask(stepped, 2, rendered)
    assert usage.first_different_token == usage.num_cached_tokens == 52
    usage = ask(stepped, 3, [*rendered, 5])
    assert usage.num_cached_tokens > 52, "of a request that was no turn"
    assert usage.first_different_token is None
    stepped.finish()


@pytest.mark.parametrize("flood", [0, 100])
def test_short_requests_of_a_tenant_do_not_erase_the_turns_of_another(
    flood: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_turns, "MAX_TURNS", 64)
    stepped = Stepped(num_pages=60, max_context=420, check_every=100)
    turns = []
    for seq in (1, 2):
        stepped.open(seq, [seq] * 200, tenant="quiet")
        stepped.generate(seq, 4)
        stepped.run()
        turns.append(list(stepped.known[seq]))
        first_s = stepped.sequence(seq).place.first_s
        stepped.release(seq, "chat")
    for number in range(flood):
        ask(stepped, 10 + number, [number, 5, 5], "loud", "chat")
    usage = ask(stepped, 3, [*turns[0][:201], (turns[0][201] + 1) % 1000, 7], "quiet")
    assert usage.first_different_token == 201
    for seq in (4, 5):
        ask(stepped, seq, [seq] * 410, "loud")
    stepped.open(9, [9] * 30, tenant="loud")
    stepped.generate(9, 20)
    stepped.turn()
    stepped.open(6, [*turns[1], 5], tenant="quiet")
    stepped.generate(6, 1)
    place = stepped.sequence(6).place
    assert (place.line, place.first_s) == (COLD, first_s), "it goes on with its session, whose KV is gone"
    stepped.finish()
    assert sum(stepped.scheduler.stats().wait_returns["chat"].values()) == 2


@pytest.mark.parametrize("flood", [5, 60])
def test_pages_that_a_tenant_loses_do_not_make_those_of_another_count_as_new(flood: int) -> None:
    stepped = Stepped(num_pages=60, max_context=420, check_every=100)
    ask(stepped, 1, list(range(200)), "quiet", "chat")
    for number in range(flood):
        ask(stepped, 10 + number, [number, *[6] * 390], "loud")
    usage = ask(stepped, 2, [*range(200), 5], "quiet")
    assert (usage.num_cached_tokens, usage.num_recomputed_tokens) == (0, 200)
    stepped.finish()
