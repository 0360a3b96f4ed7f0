"""Least recently used first; of runs used together, the deeper first."""

from __future__ import annotations

from weft.cache.evict.base import NodeView


class LeastRecentlyUsed:
    """The default: no knowledge of the future."""

    def rank(self, view: NodeView) -> tuple[float, ...]:
        """(last use, minus depth, id)."""
        return (view.last_used_s, -view.depth_pages, view.node_id)
