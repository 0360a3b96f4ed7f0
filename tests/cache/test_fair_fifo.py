"""Which keys are lost where tenants have too many together."""

from __future__ import annotations

import random

from weft.cache.fair_fifo import FairFifo


def test_the_tenant_that_has_most_loses_its_oldest_keys() -> None:
    fifo = FairFifo[int](6)
    assert fifo.add("quiet", [1, 2]) == []
    assert fifo.add("loud", [10, 11, 12, 13]) == []
    assert fifo.add("loud", [14, 15]) == [10, 11]
    assert fifo.add("quiet", [3]) == [12]
    assert (list(fifo.of("quiet")), list(fifo.of("loud"))) == ([1, 2, 3], [13, 14, 15])
    assert fifo.add("third", [20]) == [1], "of several that have most, the one that has so many for longest"
    assert list(fifo.of("nobody")) == []


def test_a_key_that_is_added_again_is_the_newest() -> None:
    fifo = FairFifo[int](3)
    fifo.add("a", [1, 2, 3])
    assert fifo.add("a", [1]) == []
    assert fifo.add("a", [4]) == [2]
    assert list(fifo.of("a")) == [3, 1, 4]


def test_of_many_tenants_with_one_key_the_oldest_goes_and_leaves_nothing() -> None:
    fifo = FairFifo[int](3)
    lost = [fifo.add(str(number), [number]) for number in range(6)]
    assert lost == [[], [], [], [0], [1], [2]]
    assert fifo._keys.keys() == {"3", "4", "5"}
    fifo.add("6", [])
    assert fifo._keys.keys() == {"3", "4", "5"}


def test_no_tenant_loses_of_its_share_and_the_limit_is_used() -> None:
    rng = random.Random(3)
    for _ in range(300):
        capacity = rng.randrange(1, 40)
        fifo = FairFifo[int](capacity)
        for _ in range(50):
            had = {tenant: list(keys) for tenant, keys in fifo._keys.items()}
            tenant, new = rng.choice("aaabcdefg"), rng.sample(range(60), rng.choice([0, 1, 1, 5, 50]))
            had[tenant] = [key for key in had.get(tenant, []) if key not in new] + new
            had = {tenant: keys for tenant, keys in had.items() if keys}
            lost = fifo.add(tenant, new)
            assert fifo.total == min(capacity, sum(map(len, had.values()))) == sum(map(len, fifo._keys.values()))
            assert all(fifo._keys.values())
            left = {tenant: list(fifo.of(tenant)) for tenant in had}
            assert sorted(lost) == sorted(
                key for tenant, keys in had.items() for key in keys[: len(keys) - len(left[tenant])]
            )
            for tenant, keys in had.items():
                assert left[tenant] == keys[len(keys) - len(left[tenant]) :]
                assert left[tenant] == keys or len(keys) > capacity // len(had)
