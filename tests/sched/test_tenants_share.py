"""A tenant that floods an engine with unique prompts takes no KV from a neighbour within its share of the pages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.sched.stepping import Stepped
from weft.core import wire
from weft.core.step import Step
from weft.sched.batch import StepBuilder
from weft.sched.policies.min_waste import KEPT_S
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


class Flooded(Tenants):
    """The loud tenant has twelve requests under way at any time, once it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_host_pages: int, seed: int):
        super().__init__(monkeypatch, "min_waste", num_host_pages)
        self.floods = False
        self.num_flooding = 0
        """Requests of the loud tenant that have ended."""
        self._chance = random.Random(seed)
        self._loud: dict[int, int] = {}

    def turn(self) -> Step:
        for seq, op in list(self._loud.items()):
            if self.generations[op].ending is not None:
                self.release(seq, "chat")
                del self._loud[seq]
                self.num_flooding += 1
        while self.floods and len(self._loud) < 12:
            seq = 1000 + self.num_flooding + len(self._loud)
            self.open(seq, unique(seq), tenant="loud")
            self._loud[seq] = self.generate(seq, 6 + self._chance.randrange(40))
        return super().turn()

    def until(self, op: int) -> None:
        """Run until an operation has ended."""
        for _ in range(400):
            if self.generations[op].ending is not None:
                return
            self.turn()
        raise AssertionError(f"operation {op} does not end")

    def run_until(self, now: float) -> None:
        while self.now < now:
            self.turn()


def computed_beside(flooded: Flooded, num_turns: int, num_added: int, wait_s: float) -> int:
    """Tokens that are computed for a tenant with two chats. A turn adds `num_added` tokens and an answer of 6."""
    chats = [[*SYSTEM, 10 + chat] for chat in range(2)]
    for turn in range(num_turns):
        for index in range(2):
            seq = 2 * turn + index + 1
            flooded.open(seq, [*chats[index], *[5] * num_added], tenant="quiet")
            flooded.until(flooded.generate(seq, 6))
            chats[index] = list(flooded.known[seq])
            flooded.release(seq, "chat")
            flooded.run_until(flooded.now + wait_s)
    return flooded.computed["quiet"]


def beside_many_at_once(
    monkeypatch: pytest.MonkeyPatch, seed: int, num_host_pages: int, num_turns: int, num_added: int
) -> None:
    undisturbed = Flooded(monkeypatch, num_host_pages, seed)
    alone = computed_beside(undisturbed, num_turns, num_added, 0.1)
    assert NUM_PAGES / 4 < undisturbed.cache.tiers.indexed_pages["quiet"] <= NUM_PAGES / 2, "not within its share"
    monkeypatch.undo()
    flooded = Flooded(monkeypatch, num_host_pages, seed)
    flooded.floods = True
    flooded.run_until(1.0)
    assert computed_beside(flooded, num_turns, num_added, 0.5) <= 1.05 * alone
    assert flooded.num_flooding > 8 * num_turns, "the flood is none"
    flooded.floods = False
    flooded.finish()


@pytest.mark.parametrize("num_host_pages", [0, 40])
@pytest.mark.parametrize(("seed", "num_turns", "num_added"), [(1, 4, 30), (14, 4, 57), (108, 12, 18)])
def test_a_neighbour_of_many_requests_at_once_computes_hardly_more(
    monkeypatch: pytest.MonkeyPatch, seed: int, num_turns: int, num_added: int, num_host_pages: int
) -> None:
    """Turns of 57 tokens nearly fill a step each; twelve turns take the tenant close to its share."""
    beside_many_at_once(monkeypatch, seed, num_host_pages, num_turns, num_added)


def neighbours(monkeypatch: pytest.MonkeyPatch, part: float) -> Flooded:
    """A quiet tenant has a turn that takes a part of the pages."""
    flooded = Flooded(monkeypatch, 0, 0)
    flooded.plain(1, [5] * int(NUM_PAGES * 8 * part), "quiet")
    return flooded


def test_a_newcomer_beyond_its_share_is_admitted_once_its_tenant_runs_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It needs 60 % of the pages, so it takes some of what is kept; until then others of the tenant wait behind it."""
    flooded = neighbours(monkeypatch, 0.45)
    first, large, small = 1000, 1001, 1002
    flooded.open(first, unique(first)[:80], tenant="loud")
    flooded.generate(first, 40)
    flooded.turn()
    flooded.open(large, unique(large) + [7] * (NUM_PAGES * 8 * 6 // 10 - 200), tenant="loud")
    flooded.generate(large, 2)
    flooded.open(small, unique(small)[:80], tenant="loud")
    flooded.generate(small, 2)
    kept = flooded.cache.tiers.indexed_pages["quiet"]
    while flooded.sequence(first).slot >= 0:
        assert flooded.sequence(large).slot < 0
        flooded.turn()
    assert flooded.cache.tiers.indexed_pages["quiet"] == kept
    flooded.run()
    places = [flooded.sequence(seq).place.admission for seq in (first, large, small)]
    assert places == sorted(places)
    assert flooded.cache.tiers.indexed_pages["quiet"] < kept
    flooded.finish()


def test_what_is_kept_goes_to_the_only_running_sequence_once_nothing_else_is_left() -> None:
    """Of the idle tenant's runs the last is of no use any more. To give it up uncovers one that is kept."""
    stepped = Stepped(num_pages=12, policy="min_waste")
    stepped.program(1, 6)
    stepped.open(1, [5] * 33, tenant="idle")
    stepped.generate(1, 2)
    stepped.run()
    stepped.open(2, [*[5] * 32, *[6] * 9], tenant="idle")
    stepped.generate(2, 2)
    stepped.run()
    stepped.release(2)
    assert (stepped.cache.tiers.device.num_free, stepped.cache.num_available) == (1, 6)
    stepped.open(3, [7] * 20, tenant="comes")
    op = stepped.generate(3, 2)
    while stepped.generations[op].ending is None:
        had_flight = bool(stepped.in_flight)
        step = stepped.turn()
        assert had_flight or not step.is_empty, "nothing is in flight that could make room"
    stepped.finish()


def test_a_sequence_that_grows_beyond_the_share_of_its_tenant_takes_from_its_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences begin with 72 pages and would end with 102, where a quiet tenant leaves 88."""
    flooded = neighbours(monkeypatch, 0.45)
    kept = flooded.cache.tiers.indexed_pages["quiet"]
    for seq in (1000, 1001):
        flooded.open(seq, unique(seq) + [7] * 88, tenant="loud")
        flooded.generate(seq, 120)
    most = 0
    while flooded.scheduler.has_work or flooded.in_flight:
        flooded.turn()
        most = max(most, len(flooded.scheduler.sequences.running))
        assert flooded.cache.tiers.indexed_pages["quiet"] == kept
    assert most == 2
    flooded.finish()


@pytest.mark.parametrize(("idle_s", "is_kept"), [(KEPT_S - 60.0, True), (KEPT_S + 1.0, False)])
def test_a_tenant_that_has_gone_takes_no_room_for_long(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, is_kept: bool
) -> None:
    flooded = neighbours(monkeypatch, 0.3)
    kept = flooded.cache.tiers.indexed_pages["quiet"]
    flooded.now += idle_s
    flooded.floods = True
    most = 0
    for _ in range(150):
        flooded.turn()
        most = max(most, sum(len(s.table.pages) for s in flooded.scheduler.sequences.running.values()))
    assert (flooded.cache.tiers.indexed_pages["quiet"] == kept) is is_kept
    assert (most > NUM_PAGES * 8 // 10) is not is_kept, "one tenant alone uses all there is"
    flooded.floods = False
    flooded.finish()


@pytest.mark.soak
@pytest.mark.parametrize("num_host_pages", [0, 40])
@pytest.mark.parametrize("seed", range(20))
def test_many_floods_of_many_requests_at_once(monkeypatch: pytest.MonkeyPatch, seed: int, num_host_pages: int) -> None:
    beside_many_at_once(monkeypatch, 100 + seed, num_host_pages, 12, 18)
