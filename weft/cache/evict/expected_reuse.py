"""Runs without an expected use first, by recency; then those expected latest (Belady's rule on what is known)."""

from __future__ import annotations

from weft.cache.evict.base import NodeView


class ExpectedReuse:
    """For workloads whose plan or interception policy announces when a prefix is needed again."""

    def rank(self, view: NodeView) -> tuple[float, ...]:
        """(has expectation, minus expected time or last use, minus depth, id)."""
        if view.expected_at_s is None:
            return (0.0, view.last_used_s, -view.depth_pages, view.node_id)
        return (1.0, -view.expected_at_s, -view.depth_pages, view.node_id)
