"""`GivenUpPrefixes`: which KV existed and was given up, so that computing it again can be told from computing it first.

A prefix is remembered by a 64-bit number: the sum, modulo 2^64, of a mix of each token and its position, and of a
number of the namespace. Sums of prefixes that grow token by token are running sums, so those of all pages of a run are
computed at once, and only when a run is first given up. Two prefixes have the same number with a probability of about
2^-64, and then a count is wrong, never a token.

Bounded: `capacity` prefixes are remembered. Beyond that, the tenant that has most loses its oldest ones (`FairFifo`).
What was forgotten counts as computed for the first time. Owned by `weft.cache.tiers`; asked by
`weft.sched.closed_waits`.
"""

from __future__ import annotations

import hashlib

import numpy as np

from weft.cache.fair_fifo import FairFifo
from weft.cache.nodes import Node
from weft.core.step import U64

_POSITION = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
MIN_CAPACITY = 1024
PER_PAGE = 4
"""Prefixes that are remembered for each page of the pools."""
MAX_NEW = 256
"""Runs that are given up before their numbers are entered."""


def namespace_number(namespace: str) -> int:
    """The number of a namespace's empty prefix."""
    return int.from_bytes(hashlib.blake2b(namespace.encode(), digest_size=8).digest(), "little")


def prefix_numbers(tokens: bytes, start: int, base: int) -> U64:
    """[n] numbers of the prefixes that end with each of `tokens`, the first of which stands at position `start` after a
    prefix with the number `base`."""
    mixed = np.frombuffer(tokens, np.int32).astype(np.uint64)
    mixed += np.arange(start, start + len(mixed), dtype=np.uint64) * _POSITION
    # The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    mixed[:1] += np.uint64(base)  # an empty slice, where there are no tokens
    return np.cumsum(mixed, dtype=np.uint64)


class GivenUpPrefixes:
    """Numbers of prefixes that end with a page, or with a tail, whose KV was given up."""

    def __init__(self, page_size: int, capacity: int):
        self.capacity = max(capacity, MIN_CAPACITY)
        self._page_size = page_size
        self._new: list[tuple[str, U64]] = []
        """(tenant, numbers) not entered yet: entering many at once is cheap, and nothing asks between most of them."""
        self._numbers = FairFifo[int](self.capacity)

    def __bool__(self) -> bool:
        """Whether anything was given up."""
        return bool(self._new or self._numbers.total)

    def __len__(self) -> int:
        self._enter()
        return self._numbers.total

    def add(self, node: Node, keep: int) -> None:
        """The pages of `node` past the first `keep` are being given up."""
        self._new.append((node.owner, _page_numbers(node, self._page_size)[keep:]))
        if len(self._new) >= MAX_NEW:
            self._enter()

    def extent(self, tenant: str, numbers: U64, found: int) -> int:
        """How far the KV of tokens in a namespace of a tenant had existed, of which the first `found` have it now: at
        least `found`.

        `numbers` [n + 1] are those of their prefixes, the empty one included. Gaps end it: pages are given up from the
        end of a run.
        """
        self._enter()
        known = self._numbers.of(tenant)
        size = self._page_size
        page = found // size
        for number in numbers[(page + 1) * size :: size].tolist():
            if number not in known:
                break
            page += 1
        end = max(found, page * size)
        tails = numbers[end + 1 : (page + 1) * size].tolist()
        for count in range(len(tails), 0, -1):
            if tails[count - 1] in known:
                return end + count
        return end

    def _enter(self) -> None:
        new, self._new = self._new, []
        for tenant, numbers in new:
            self._numbers.add(tenant, numbers.tolist())


def _page_numbers(node: Node, page_size: int) -> U64:
    """[pages] of `node`: the number of the prefix that ends with each page."""
    path: list[Node] = []
    current = node
    while current.page_numbers is None:
        path.append(current)
        assert current.parent is not None, "the root of a namespace has its number from the start"
        current = current.parent
    known = current.page_numbers
    for current in reversed(path):
        start = (current.depth_pages - current.num_pages) * page_size
        numbers = prefix_numbers(current.tokens, start, int(known[-1]))
        ends = numbers[page_size - 1 :: page_size]
        known = current.page_numbers = numbers[-1:] if current.is_tail else ends.copy()
    return known
