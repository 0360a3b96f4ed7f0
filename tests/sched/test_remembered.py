"""What a scheduler remembers of KV that was given up, through what requests are told."""

from __future__ import annotations

import pytest

from tests.sched.stepping import Stepped
from weft.core import wire


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


@pytest.mark.parametrize("flood", [5, 60])
def test_pages_that_a_tenant_loses_do_not_make_those_of_another_count_as_new(flood: int) -> None:
    stepped = Stepped(num_pages=60, max_context=420, check_every=100)
    ask(stepped, 1, list(range(200)), "quiet", "chat")
    for number in range(flood):
        ask(stepped, 10 + number, [number, *[6] * 390], "loud")
    usage = ask(stepped, 2, [*range(200), 5], "quiet")
    assert (usage.num_cached_tokens, usage.num_recomputed_tokens) == (0, 200)
    stepped.finish()
