"""A tenant that floods an engine with unique prompts takes no KV from a neighbour within its share of the pages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.sched.stepping import Stepped
from weft.core import wire
from weft.sched.batch import StepBuilder
from weft.sched.sequence import Sequence

NUM_PAGES = 160
SYSTEM = [3] * 43
"""What all prompts of the quiet tenant begin with."""


class Tenants(Stepped):
    """Counts the prompt tokens that are computed for each tenant."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: str, num_host_pages: int):
        super().__init__(
            num_pages=NUM_PAGES, num_host_pages=num_host_pages, policy=policy, max_running=8, check_every=50
        )
        self.computed: Counter[str] = Counter()
        add_chunk = StepBuilder.add_chunk

        def counted(builder: StepBuilder, sequence: Sequence, start: int, end: int, samplers: list[Sequence]) -> None:
            self.computed[sequence.tenant] += end - start
            add_chunk(builder, sequence, start, end, samplers)

        monkeypatch.setattr(StepBuilder, "add_chunk", counted)

    def plain(self, seq: int, tokens: list[int], tenant: str) -> list[int]:
        """A turn of a plain client. Returns all its tokens."""
        self.open(seq, tokens, tenant=tenant)
        op = self.generate(seq, 6)
        self.run()
        assert isinstance(self.generations[op].ending, wire.Finished)
        known = self.known[seq]
        self.release(seq, "chat")
        return known


def unique(seq: int) -> list[int]:
    """200 tokens that no other sequence begins with."""
    return [seq % 1000, seq // 1000, *[6] * 198]


Flood = Callable[[Tenants, int], None]


def no_flood(tenants: Tenants, turn: int) -> None:
    """The quiet tenant is alone."""


def plain_flood(tenants: Tenants, turn: int) -> None:
    for index in range(14):
        seq = 1000 + 50 * turn + index
        tenants.plain(seq, unique(seq), "loud")


def flood_of_programs(tenants: Tenants, turn: int) -> None:
    """Contexts that stay open, all of which announce that they return at once; and they do, now and then."""
    for index in range(8):
        seq = 1000 + 50 * turn + index
        tenants.open(seq, unique(seq), tenant="loud")
        tenants.generate(seq, 2)
        tenants.run()
        tenants.say(wire.Expect(seq=seq, kind="http", expected_in_s=0.01))
        if turn > 3:
            back = 1000 + 50 * (turn - 3) + index
            tenants.generate(back, 2)
            tenants.run()


def flood_with_a_shared_prefix(tenants: Tenants, turn: int) -> None:
    """Its prompts share a prefix among them, and begin with the tokens of the quiet tenant's."""
    for index in range(14):
        seq = 1000 + 50 * turn + index
        tenants.plain(seq, [*SYSTEM, *[4] * 60, *unique(seq)[:140]], "loud")


def quiet_tokens(monkeypatch: pytest.MonkeyPatch, flood: Flood, policy: str, num_host_pages: int) -> int:
    """Tokens that are computed for a tenant with two chats and two programs on a common prompt, which take a third of
    the pages at the end."""
    tenants = Tenants(monkeypatch, policy, num_host_pages)
    chance = random.Random(5)
    chats = [[*SYSTEM, 10, chat] for chat in (11, 12)]
    for seq in (1, 2):
        tenants.open(seq, [*SYSTEM, 20 + seq], tenant="quiet")
    for turn in range(12):
        for index in range(2):
            tenants.now += chance.choice([0.1, 2.0, 40.0])
            chats[index] = tenants.plain(100 + 2 * turn + index, [*chats[index], 5, 6, 7], "quiet")
            flood(tenants, 2 * turn + index)
            tenants.append(1 + index, [8, 9])
            tenants.generate(1 + index, 5)
            tenants.run()
    table = tenants.sequence(1).table
    for seq in list(tenants.known):
        tenants.release(seq)
    assert table.tree.namespace == "quiet"
    assert tenants.cache.tiers.indexed_pages["quiet"] < NUM_PAGES / 2
    monkeypatch.undo()
    return tenants.computed["quiet"]


@pytest.mark.parametrize("num_host_pages", [0, 40])
@pytest.mark.parametrize("flood", [plain_flood, flood_of_programs, flood_with_a_shared_prefix])
def test_a_neighbour_computes_hardly_more_than_alone(
    monkeypatch: pytest.MonkeyPatch, flood: Flood, num_host_pages: int
) -> None:
    alone = quiet_tokens(monkeypatch, no_flood, "min_waste", num_host_pages)
    assert quiet_tokens(monkeypatch, flood, "min_waste", num_host_pages) <= 1.05 * alone
    assert quiet_tokens(monkeypatch, flood, "lru", 0) > 1.5 * alone, "the flood is none"
