"""Values that are kept by tenant: found by their own only, and dropped from the tenant that has the most."""

from __future__ import annotations

from weft.tenant_cache import TenantCache


def keys(cache: TenantCache[int, str], tenant: str) -> list[int]:
    return [key for key in range(100) if cache.peek(tenant, key) is not None]


def test_a_tenant_does_not_find_the_values_of_another() -> None:
    cache = TenantCache[int, str](2, 10)
    cache.put("a", 1, "x")
    assert cache.get("a", 1) == cache.peek("a", 1) == "x"
    assert cache.get("b", 1) is None
    cache.put("b", 1, "y")
    cache.pop("a", 1)
    assert (cache.get("a", 1), cache.get("b", 1)) == (None, "y")
    cache.pop("a", 1)
    assert len(cache) == 1


def test_the_least_recently_used_value_is_dropped() -> None:
    cache = TenantCache[int, str](3, 10)
    for key in range(3):
        cache.put("a", key, "x")
    cache.get("a", 0)
    cache.peek("a", 1)
    cache.put("a", 3, "x")
    assert keys(cache, "a") == [0, 2, 3]
    cache.put("a", 2, "y")
    assert keys(cache, "a") == [0, 2, 3]


def test_beyond_the_bound_for_all_the_tenant_with_the_most_loses_its_oldest() -> None:
    cache = TenantCache[int, str](3, 4)
    for key in range(3):
        cache.put("many", key, "x")
    cache.put("few", 0, "x")
    cache.put("new", 0, "x")
    assert (keys(cache, "many"), keys(cache, "few"), keys(cache, "new")) == ([1, 2], [0], [0])


def test_held_values_stay_beyond_the_bounds_and_go_once_they_are_not_held() -> None:
    held = {("a", key) for key in range(3)}
    cache = TenantCache[int, str](2, 3, lambda tenant, key: (tenant, key) in held)
    for key in range(4):
        cache.put("a", key, "x")
    assert keys(cache, "a") == [0, 1, 2, 3], "the newest stays too"
    cache.put("b", 0, "x")
    assert (keys(cache, "a"), keys(cache, "b")) == ([0, 1, 2], [0])
    held.clear()
    cache.put("a", 4, "x")
    assert (keys(cache, "a"), keys(cache, "b")) == ([2, 4], [0])
