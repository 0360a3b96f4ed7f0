"""`Retention`: KV that is kept although no sequence uses it: holds of finished sequences, pins of prefixes.

Owns who asked for what to be kept until when. A hold is a wait with a weight: its pages are given up after all pages
without one. A pin is a lock: its pages are not given up at all, until the scheduler breaks it for a sequence that
cannot go on otherwise. Both together may take `max_pages` of the device. Called by the scheduler.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from typing import NamedTuple, Protocol

from weft.cache.nodes import Node, Wait
from weft.cache.page_table import PageTable
from weft.cache.prefix_index import PrefixIndex

HOLD_WEIGHT = 1.0


class PrefixPages(Protocol):
    """What retention needs of the cache whose pages it keeps: `KVCache`."""

    index: PrefixIndex

    def free(
        self, table: PageTable, tokens: array[int], num_written: int, now: float, *, wait: Wait | None = None
    ) -> None:
        """As `KVCache.free`: empty a table."""
        ...


class _Hold(NamedTuple):
    wait: Wait
    num_pages: int
    until_s: float


class _Pin(NamedTuple):
    node: Node
    until_s: float


class Retention:
    """Holds by the number of their sequence, and pins by a number of their own."""

    def __init__(self, cache: PrefixPages, max_pages: int):
        self._cache = cache
        self._max_pinned_pages = max_pages
        self._ids = itertools.count(1)
        self._holds: dict[int, _Hold] = {}
        self._pins: dict[int, _Pin] = {}

    @property
    def num_held(self) -> int:
        """How many finished sequences are held."""
        return len(self._holds)

    def hold(
        self, table: PageTable, tokens: array[int], num_written: int, until_s: float, now: float, wait: Wait
    ) -> bool:
        """Keep the KV of a finished sequence, partial page included, until `until_s` or until pages run out.

        Empties the table as `free` does. Where the pinned share is used up, holds of tenants that have more than that
        of `wait` end first. False when that is not enough: then the KV stays as long as it would of any sequence.
        """
        num_pages = len(table.pages)
        kept = self._make_room(wait.tenant, num_pages)
        if kept:
            wait.weight = HOLD_WEIGHT
            self._holds[table.seq] = _Hold(wait, num_pages, until_s)
        self._cache.free(table, tokens, num_written, now, wait=wait)
        return kept

    def pin(self, namespace: str, tokens: bytes, until_s: float) -> int | None:
        """Keep the indexed prefix of `tokens` on the device until `until_s`. Returns the pin's id, or None when nothing
        of the prefix is there or the pinned share is used up."""
        match = self._cache.index.find(namespace, tokens)
        if match is None:
            return None
        node = self._cache.index.node_for(match)
        if node.parent is None or not node.on_device or self._num_pinned() + node.depth_pages > self._max_pinned_pages:
            return None
        pin = next(self._ids)
        self._cache.index.tiers.lock(node)
        self._pins[pin] = _Pin(node, until_s)
        return pin

    def unpin(self, pin: int, now: float) -> None:
        """Let a pinned prefix be evicted again. Does nothing for a pin that has ended."""
        found = self._pins.pop(pin, None)
        if found is not None:
            self._cache.index.tiers.unlock(found.node, now)

    def break_pin(self, now: float) -> bool:
        """Give up one pin, because a sequence cannot go on otherwise. Whether there was one. The cheapest goes first:
        of those that nothing else locks as well, the one with the fewest pages."""
        pin = min(self._pins, key=self._cost_of_break, default=None)
        if pin is None:
            return False
        self.unpin(pin, now)
        return True

    def expire(self, now: float) -> None:
        """Let go of holds and pins whose time is over."""
        if self._pins:
            for pin in [p for p, pin in self._pins.items() if pin.until_s <= now]:
                self.unpin(pin, now)
        if self._holds:
            for seq in [s for s, hold in self._holds.items() if hold.until_s <= now or hold.wait.end is None]:
                self.end_hold(seq)

    @property
    def has_pins(self) -> bool:
        """Whether a prefix is pinned."""
        return bool(self._pins)

    def end_hold(self, seq: int) -> None:
        """End the hold of a sequence, by its number: its pages are as any others."""
        wait = self._holds.pop(seq).wait
        wait.weight = 0.0
        if wait.end is not None:
            self._cache.index.tiers.offer(wait.end)

    def end_holds(self) -> None:
        """End every hold."""
        for seq in list(self._holds):
            self.end_hold(seq)

    def pinned(self) -> list[Node]:
        """The nodes that pins lock, for integrity checks."""
        return [pin.node for pin in self._pins.values()]

    def _cost_of_break(self, pin: int) -> tuple[bool, int, float, int]:
        node, until_s = self._pins[pin]
        return node.locks > 1, node.depth_pages, until_s, pin

    def _num_pinned(self) -> int:
        return sum(h.num_pages for h in self._holds.values()) + sum(p.node.depth_pages for p in self._pins.values())

    def _make_room(self, tenant: str, num_pages: int) -> bool:
        """Whether `tenant` may hold so many more pages. Ends holds, the first to expire first, of the tenant with the
        most held pages, as long as it has more than `tenant` would: so no tenant keeps another from a fair share."""
        held: Counter[str] = Counter()
        for hold in self._holds.values():
            held[hold.wait.tenant] += hold.num_pages
        missing = self._num_pinned() + num_pages - self._max_pinned_pages
        while missing > 0:
            largest = max(held, key=lambda other: (held[other], other), default=tenant)
            if held[largest] <= held[tenant] + num_pages:
                return False
            first = min(
                (seq for seq, hold in self._holds.items() if hold.wait.tenant == largest),
                key=lambda seq: (self._holds[seq].until_s, seq),
            )
            freed = self._holds[first].num_pages
            self.end_hold(first)
            held[largest] -= freed
            missing -= freed
        return True
