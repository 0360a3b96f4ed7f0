"""`RunUses`: how long runs of pages were unused before they were found again or given up, and where those went that
were given up.

A policy's estimator learns from the first (`Observe`), metrics tell the second. Knows nodes, and neither pools nor
locks. Owned by `weft.cache.tiers`; the manager says which runs sequences find.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Protocol

from weft.cache.nodes import Node
from weft.cache.runs import PREFIX, UNUSED
from weft.core.waits import label_of


class Observe(Protocol):
    """Told for how long a run was unused before it was found, or was given up."""

    def __call__(self, tenant: str, kind: str, seconds: float, was_used: bool, since_s: float = math.nan) -> None:
        """`since_s`: when the wait of a client began that goes on; nan: nothing waits for the run."""


class RunUses:
    """What is told of runs when they are found, and when they go."""

    def __init__(self) -> None:
        self.observe: Observe = lambda tenant, kind, seconds, was_used, since_s=math.nan: None
        self.moved_pages: Counter[tuple[str, str]] = Counter()
        """(label of the kind of wait, "host" or "nowhere") -> pages given up so, of the device, and of the host that
        only the host had."""

    def found(self, node: Node, now: float) -> None:
        """A sequence that has not computed the pages up to the end of `node` is about to use them."""
        if not (node.locks or node.waits):
            self.observe(node.owner, _unawaited(node), now - node.last_used_s, True)
        current: Node | None = node
        while current is not None and not current.was_found:
            current.was_found = True
            current = current.parent

    def moved(self, node: Node, num_pages: int, to: str) -> None:
        """Pages at the end of `node` go to the "host", or "nowhere"."""
        self.moved_pages[_label(node), to] += num_pages

    def gave_up(self, node: Node, keep: int, now: float) -> None:
        """The pages of `node` past the first `keep` are given up for good: what they were kept for took longer than
        there was room for them. Noted once for a wait that goes on, and for a run that nothing waits for when all of it
        is gone."""
        if not (node.waits or keep):
            self.observe(node.owner, _unawaited(node), now - node.last_used_s, False)
        for wait in node.waits.values():
            if not (wait.is_open or wait.was_cut or wait.kind == PREFIX):
                wait.was_cut = True
                if not wait.num_returns:
                    self.observe(wait.tenant, wait.cohort or wait.kind, now - wait.since_s, False, wait.since_s)


def _label(node: Node) -> str:
    """The label of the wait that a run, an unlocked leaf of its tier, is kept for. The end of the run may be on the
    host."""
    while not node.waits and node.children:
        node = next(reversed(node.children.values()))
    kinds = (wait.kind for wait in reversed(node.waits.values()) if wait.kind != PREFIX)
    return label_of(next(kinds, _unawaited(node)))


def _unawaited(node: Node) -> str:
    """The kind of a run that nothing waits for."""
    return PREFIX if node.was_found else UNUSED
