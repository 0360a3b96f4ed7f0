"""`Retention`: KV that is kept although no sequence uses it: holds of finished sequences, pins of prefixes.

Owns who asked for what to be kept until when, and gives it up when its time is over or pages run out. Both together may
take `max_pages` of the device. Called by the scheduler, and by the cache when it has nothing else to evict.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from typing import NamedTuple, Protocol

from weft.cache.page_table import PageTable
from weft.cache.radix import Match, Node, Tail
from weft.cache.tiers import TieredPages


class PrefixPages(Protocol):
    """What retention needs of the cache whose pages it keeps: `KVCache`."""

    page_size: int
    tiers: TieredPages

    def commit(self, table: PageTable, tokens: array[int], num_written: int, now: float) -> None:
        """As `KVCache.commit`: index the full pages of a table."""
        ...

    def free(self, table: PageTable, tokens: array[int], num_written: int, now: float) -> None:
        """As `KVCache.free`: empty a table."""
        ...

    def find(self, namespace: str, tokens: bytes) -> Match | None:
        """As `KVCache.find`: the longest indexed prefix."""
        ...

    def node_for(self, match: Match) -> Node:
        """As `KVCache.node_for`: the node that ends where a match does."""
        ...


class _Hold(NamedTuple):
    node: Node
    page: int | None
    until_s: float
    tenant: str

    @property
    def num_pages(self) -> int:
        return self.node.depth_pages + 1


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
        self, table: PageTable, tokens: array[int], num_written: int, until_s: float, now: float, tenant: str = ""
    ) -> bool:
        """Keep the KV of a finished sequence, partial page included, until `until_s` or until pages run out.

        Empties the table as `free` does. Where the pinned share is used up, holds of tenants that have more than
        `tenant` end first. False when that is not enough: then only whole pages stay, as evictable as any.
        """
        self._cache.commit(table, tokens, num_written, now)
        whole = num_written // self._cache.page_size
        if table.num_indexed != whole or not self._make_room(tenant, len(table.pages)):
            self._cache.free(table, tokens, num_written, now)
            return False
        rest = tokens[whole * self._cache.page_size : num_written].tobytes()
        page = table.pages[whole] if rest else None
        if page is not None:
            self._cache.tiers.share_ref(page)
            table.node.tails[table.seq] = Tail(rest, page)
        self._cache.tiers.lock(table.node)
        self._holds[table.seq] = _Hold(table.node, page, until_s, tenant)
        self._cache.free(table, tokens, num_written, now)
        return True

    def pin(self, namespace: str, tokens: bytes, until_s: float) -> int | None:
        """Keep the indexed prefix of `tokens` on the device until `until_s`. Returns the pin's id, or None when nothing
        of the prefix is there or the pinned share is used up."""
        match = self._cache.find(namespace, tokens)
        if match is None:
            return None
        node = self._cache.node_for(match)
        if node.parent is None or node.tier == "host" or self._num_pinned() + node.depth_pages > self._max_pinned_pages:
            return None
        pin = next(self._ids)
        self._cache.tiers.lock(node)
        self._pins[pin] = _Pin(node, until_s)
        return pin

    def unpin(self, pin: int, now: float) -> None:
        """Let a pinned prefix be evicted again. Does nothing for a pin that has ended."""
        found = self._pins.pop(pin, None)
        if found is not None:
            self._cache.tiers.unlock(found.node, now)

    def break_pins(self, now: float) -> bool:
        """Give up every pin, because a sequence cannot go on otherwise. Whether there was one."""
        broken = bool(self._pins)
        for pin in list(self._pins):
            self.unpin(pin, now)
        return broken

    def expire(self, now: float) -> None:
        """Let go of holds and pins whose time is over."""
        if self._pins:
            for pin in [p for p, pin in self._pins.items() if pin.until_s <= now]:
                self.unpin(pin, now)
        if self._holds:
            for seq in [s for s, hold in self._holds.items() if hold.until_s <= now]:
                self._end_hold(seq, now)

    def expect(self, namespace: str, tokens: bytes, at_s: float | None) -> None:
        """Tell the eviction policy when the indexed prefix of `tokens` is expected to be used again."""
        match = self._cache.find(namespace, tokens)
        for node in match.path if match else ():
            node.expected_at_s = at_s
            self._cache.tiers.offer(node)

    @property
    def has_pins(self) -> bool:
        """Whether a prefix is pinned."""
        return bool(self._pins)

    def first_hold(self) -> int | None:
        """The number of the held sequence whose hold would end first; None: nothing is held."""
        return min(self._holds, key=lambda seq: (self._holds[seq].until_s, seq), default=None)

    def end_hold(self, seq: int) -> None:
        """Give up the hold of a sequence, by its number. Its pages count as used when they last were."""
        self._end_hold(seq, self._holds[seq].node.last_used_s)

    def end_one_hold(self) -> bool:
        """Give up the hold that would end first. Whether there was one."""
        first = self.first_hold()
        if first is not None:
            self.end_hold(first)
        return first is not None

    def end_holds(self, now: float) -> None:
        """Give up every hold: whole pages stay cached, partial ones are free."""
        for seq in list(self._holds):
            self._end_hold(seq, now)

    def holders(self) -> list[tuple[Node, int | None]]:
        """The nodes and pages that holds and pins keep, for integrity checks."""
        return [(h.node, h.page) for h in self._holds.values()] + [(p.node, None) for p in self._pins.values()]

    def _end_hold(self, seq: int, now: float) -> None:
        hold = self._holds.pop(seq)
        if hold.page is not None:
            del hold.node.tails[seq]
            self._cache.tiers.drop_ref(hold.page, now)
        self._cache.tiers.unlock(hold.node, now)

    def _num_pinned(self) -> int:
        return sum(h.num_pages for h in self._holds.values()) + sum(p.node.depth_pages for p in self._pins.values())

    def _make_room(self, tenant: str, num_pages: int) -> bool:
        """Whether `tenant` may hold so many more pages. Ends holds, the first to expire first, of the tenant with the
        most held pages, as long as it has more than `tenant` would: so no tenant keeps another from a fair share."""
        held: Counter[str] = Counter()
        for hold in self._holds.values():
            held[hold.tenant] += hold.num_pages
        missing = self._num_pinned() + num_pages - self._max_pinned_pages
        while missing > 0:
            largest = max(held, key=lambda other: (held[other], other), default=tenant)
            if held[largest] <= held[tenant] + num_pages:
                return False
            first = min(
                (seq for seq, hold in self._holds.items() if hold.tenant == largest),
                key=lambda seq: (self._holds[seq].until_s, seq),
            )
            freed = self._holds[first].num_pages
            self.end_hold(first)
            held[largest] -= freed
            missing -= freed
        return True
