"""Bounded memory of waits: who is replaced by whom, and who is not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.core.ids import TOKEN_BYTES
from weft.core.waits import COHORT_TOKENS, of_cohort, without_cohort
from weft.sched.policies.wait_samples import (
    ENOUGH,
    KINDS_PER_TENANT,
    MAX_GROUPS,
    MAX_SAMPLES,
    MAX_TABLES,
    SHARED_KINDS,
    WaitSamples,
)

SLOTS = 1 + MAX_GROUPS + SHARED_KINDS
"""As many as there ever are: the empty one, those of tenants, and those over all tenants."""


def learn(samples: WaitSamples, tenant: str, kind: str, wait_s: float, count: int = ENOUGH) -> None:
    for _ in range(count):
        samples.add(tenant, kind, wait_s)


def median(samples: WaitSamples, tenant: str, kind: str) -> float | None:
    """Of the slot that is used for a tenant and kind."""
    slot = samples.slots((tenant,), (kind,)).item()
    return float(samples.ended_s[slot, np.isfinite(samples.ended_s[slot]).sum() // 2]) if slot else None


def test_samples_are_sorted_and_the_last_ones() -> None:
    samples = WaitSamples()
    waits = np.random.default_rng(0).random(3 * MAX_SAMPLES + 7)
    for number, wait_s in enumerate(waits, 1):
        samples.add("t", "k", wait_s)
        if number >= ENOUGH:
            row = samples.ended_s[samples.slots(("t",), ("k",)).item()]
            last = np.sort(waits[max(0, number - MAX_SAMPLES) : number])
            assert row.tolist() == [*last, *[np.inf] * (len(row) - len(last))]


def test_what_ended_and_what_was_given_up_are_apart() -> None:
    samples = WaitSamples()
    generator = np.random.default_rng(1)
    waits, ended = generator.random(3 * MAX_SAMPLES), generator.random(3 * MAX_SAMPLES) < 0.5
    for number, (wait_s, has_ended) in enumerate(zip(waits.tolist(), ended.tolist(), strict=True), 1):
        samples.add("t", "k", wait_s, ended=has_ended)
        if number >= ENOUGH:
            slots = samples.slots(("t",), ("k",))[0]
            last = slice(max(0, number - MAX_SAMPLES), number)
            found = samples.lasted(slots, np.array([0.5]))
            longer = waits[last] >= 0.5
            assert found.num_ended.item() == np.count_nonzero(longer & ended[last])
            assert found.num_given_up.item() == np.count_nonzero(longer & ~ended[last])
            assert found.ended_s[found.first.item()] == min(waits[last][longer & ended[last]], default=np.inf)


def chance(samples: WaitSamples, waited_s: float) -> float:
    """Of waits of tenant t and kind k."""
    return samples.lasted(samples.slots(("t",), ("k",))[0], np.array([waited_s])).chance.item()


def test_the_chance_of_an_end_by_hand() -> None:
    # Of 20 waits the first 8 end after 1 to 8 s, 6 are given up after 10 s, then 2 of the 6 left end after 20 s.
    samples = WaitSamples()
    waits = [(float(seconds), True) for seconds in range(1, 9)] + [(10.0, False)] * 6 + [(20.0, True)] * 2
    for wait_s, ended in [*waits, *[(30.0, False)] * 4]:
        samples.add("t", "k", wait_s, ended=ended)
    assert chance(samples, 9.0) == pytest.approx(2 / 12)
    assert chance(samples, 20.0) == pytest.approx(2 / 6)
    assert chance(samples, 5.0) == pytest.approx(6 / 16)
    assert chance(samples, 0.0) == pytest.approx(10 / 20)
    assert chance(samples, 25.0) == chance(samples, 1e6) == pytest.approx(1 / 5), "as of the five longest"
    assert WaitSamples().lasted(np.array([0]), np.array([3.0])).chance.item() == 1, "nothing is known"


def test_clients_whose_runs_were_given_up_wait_on_until_they_come_back() -> None:
    samples = WaitSamples()
    for number in range(ENOUGH):
        samples.add("t", "k", 1.0, since_s=float(number))
    for number in range(10):
        samples.add("t", "k", 2.0, ended=False, since_s=100.0 + number)
    assert chance(samples, 1.5) == 0
    for number in range(3, 10):
        samples.add("t", "k", 50.0 - number, since_s=100.0 + number)  # at 150 s
    assert chance(samples, 1.5) == pytest.approx(0.7), "each counts once, and the first three wait on"
    assert chance(samples, 46.0) == pytest.approx(2 / 5)
    assert samples.ended_s[samples.slots(("t",), ("k",)).item(), ENOUGH + 6] == 47


def test_a_flood_of_kinds_replaces_only_its_tenants_own() -> None:
    samples = WaitSamples()
    learn(samples, "neighbour", "shell", 5.0)
    learn(samples, "flood", "shell", 9.0)
    for number in range(4 * MAX_GROUPS):
        samples.add("flood", f"k{number}", 1.0)
    assert median(samples, "neighbour", "shell") == 5
    assert median(samples, "flood", "shell") == 9, "a kind of enough samples stays before kinds of few"
    assert median(samples, "third", "shell") is not None, "so it does over all tenants"
    assert samples._num_slots <= 1 + 1 + KINDS_PER_TENANT + SHARED_KINDS
    assert len(samples._tenants["flood"]) == KINDS_PER_TENANT


def test_the_tenant_observed_longest_ago_is_forgotten() -> None:
    samples = WaitSamples()
    learn(samples, "old", "shell", 5.0)
    learn(samples, "kept", "shell", 9.0)
    for number in range(MAX_GROUPS):
        samples.add(f"t{number}", "web", 1.0)
        samples.add("kept", "shell", 9.0)
    assert "old" not in samples._tenants
    assert median(samples, "kept", "shell") == 9
    assert len(samples._tenants) == MAX_GROUPS
    assert samples._num_slots <= SLOTS
    assert len(samples.is_own) < 2 * SLOTS


def test_kinds_of_enough_samples_are_replaced_when_none_is_new() -> None:
    samples = WaitSamples()
    for number in range(SHARED_KINDS + 1):
        learn(samples, f"t{number}", f"k{number}", 5.0)
    assert median(samples, "another", "k0") is None
    assert median(samples, "another", "k1") == 5
    assert median(samples, "t0", "k0") == 5, "the tenant's own is still there"


def test_a_kind_that_is_still_observed_is_not_replaced() -> None:
    samples = WaitSamples()
    for number in range(SHARED_KINDS):
        learn(samples, f"t{number}", f"k{number}", 5.0)
    samples.add("t0", "k0", 5.0)
    samples.add("u", "new", 5.0)
    assert [median(samples, "u", kind) for kind in ("k0", "k1", "k2")] == [5, None, 5]


def test_new_kinds_find_room_where_all_others_have_enough_samples() -> None:
    samples = WaitSamples()
    for number in range(SHARED_KINDS):
        learn(samples, f"t{number}", f"k{number}", 5.0)
    for _ in range(ENOUGH):
        samples.add("u", "one", 1.0)
        samples.add("v", "other", 2.0)
    assert [median(samples, "w", kind) for kind in ("one", "other")] == [1, 2]


@pytest.mark.parametrize("change", ["usable", "replaced", "names"])
def test_the_table_of_slots_follows(change: str) -> None:
    samples = WaitSamples()
    learn(samples, "t", "k0", 5.0)
    assert samples.slots(("t",), ("k0", "k1")).astype(bool).tolist() == [[True, False]]
    if change == "names":
        assert samples.slots(("u", "t"), ("k1", "k0")).astype(bool).tolist() == [[False, True], [False, True]]
    elif change == "usable":
        learn(samples, "t", "k1", 5.0)
        assert samples.slots(("t",), ("k0", "k1")).astype(bool).tolist() == [[True, True]]
    else:
        for number in range(1, SHARED_KINDS):
            learn(samples, f"t{number}", f"k{number}", 5.0)
        assert samples.slots(("u",), ("k0", "k1")).astype(bool).tolist() == [[True, True]]
        samples.add("u", "new", 5.0)
        assert samples.slots(("u",), ("k0", "k1")).astype(bool).tolist() == [[False, True]]


def test_a_slot_that_is_taken_over_starts_empty() -> None:
    samples = WaitSamples()
    for number in range(KINDS_PER_TENANT + 1):
        learn(samples, "t", f"k{number}", 100.0, 2 * ENOUGH)
    learn(samples, "t", "new", 1.0)
    slot = samples.slots(("t",), ("new",)).item()
    assert np.isfinite(samples.ended_s[slot]).sum() == ENOUGH
    assert samples.ended_s[slot, :ENOUGH].tolist() == [1.0] * ENOUGH
    assert (samples.ended_s[slot, ENOUGH:] == np.inf).all()


def test_each_asker_has_a_table_of_its_own() -> None:
    samples = WaitSamples()
    learn(samples, "t", "k0", 5.0)
    askers = [((f"t{number}",), ("k0",)) for number in range(MAX_TABLES)]
    tables = [samples.slots(*names) for names in askers]
    assert all(samples.slots(*names) is table for _ in range(3) for names, table in zip(askers, tables, strict=True))
    samples.slots(("other",), ("k0",))
    assert len(samples._tables) == MAX_TABLES
    assert samples.slots(*askers[-1]) is tables[-1]
    assert samples.slots(*askers[0]) is not tables[0], "the one that was asked for longest ago"


@pytest.mark.parametrize("seed", range(20))
def test_the_table_of_slots_is_as_one_by_one(seed: int) -> None:
    source = random.Random(seed)
    samples, tenants, plain = WaitSamples(), ["a", "b", "c"], ["chat", "tool"]
    kinds = [
        *plain,
        *(of_cohort(kind, bytes([number] * COHORT_TOKENS * TOKEN_BYTES)) for kind in plain for number in range(3)),
    ]
    for _ in range(source.randrange(600)):
        # Only where some waits do not end do cohorts tell anything apart.
        samples.add(source.choice(tenants), source.choice(kinds), source.random(), ended=source.random() < 0.7)
    for _ in range(4):
        asked = tuple(source.sample(tenants, source.randrange(4))), tuple(source.sample(kinds, source.randrange(1, 9)))
        assert samples.slots(*asked).tolist() == slots_one_by_one(samples, *asked)


def slots_one_by_one(samples: WaitSamples, tenants: tuple[str, ...], kinds: tuple[str, ...]) -> list[list[int]]:
    shared = dict(samples._shared.used())
    if not tenants:
        return [[shared.get(kind, 0) for kind in kinds]]
    table = []
    for tenant in tenants:
        found = dict(shared)
        for groups in (samples._tenants, samples._cohorts):
            if tenant in groups:
                found.update(groups[tenant].used())
        for kind in kinds:
            plain = without_cohort(kind)
            if plain in kinds:
                found.setdefault(kind, found.get(plain, 0))
        table.append([found.get(kind, 0) for kind in kinds])
    return table
