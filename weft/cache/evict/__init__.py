"""Eviction policies: which cached run of pages goes first. `base.py` says what one is; one file per variant."""

from weft.cache.evict.base import EvictionPolicy, NodeView
from weft.cache.evict.expected_reuse import ExpectedReuse
from weft.cache.evict.recency import LeastRecentlyUsed

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed, "expected_reuse": ExpectedReuse}

__all__ = ["POLICIES", "EvictionPolicy", "ExpectedReuse", "LeastRecentlyUsed", "NodeView"]
