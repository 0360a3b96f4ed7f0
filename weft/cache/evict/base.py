"""What an eviction policy is: a total order on frozen views of cached runs."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class NodeView(NamedTuple):
    """A run of cached pages without locks, as a policy sees it."""

    node_id: int
    """Grows with creation; the last tie-break, so that the order is total."""
    num_pages: int
    depth_pages: int
    """Pages from the start of the sequence to the end of the run."""
    last_used_s: float
    expected_at_s: float | None
    """When a plan or an interception expects the run to be needed again; None: unknown."""


class EvictionPolicy(Protocol):
    """Pins are not the policy's business: a pinned run is not offered."""

    def rank(self, view: NodeView) -> tuple[float, ...]:
        """Runs with the smallest rank are evicted first. Must depend on the view alone."""
        ...
