"""The prefix index: one radix tree of page-sized token runs per namespace.

Owns the tree's shape: nodes, their tokens and pages, splits. A node is a path-compressed run of pages; its children
differ in their first page. Locks are counted along the path to the root, so a node without locks has no locked
descendant and unlocked leaves can be evicted one after another. Knows nothing of pools or eviction order; the manager
(`weft.cache.manager`) moves pages and calls in here.

Lookup, insertion and split cost O(pages touched), never O(tree).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from weft.core.ids import TOKEN_BYTES

Tier = Literal["device", "host"]

MAX_SIBLINGS_SCANNED = 32
"""Siblings looked at, newest first, for a page that begins with the same tokens."""

SHORT_RUN = 32
"""Tokens of two runs that are compared as one number: for fewer, numpy costs more than it saves."""


class InFlightRuns:
    """Runs of whole pages that sequences at the end of a node are computing: sequence number -> tokens.

    Found by their first page, or by the first half of it: a shorter beginning is not worth waiting for.
    """

    __slots__ = ("_by_start", "_runs")

    def __init__(self) -> None:
        self._runs: dict[int, tuple[bytes, bytes, bytes]] = {}
        """(tokens, first page, first half page)."""
        self._by_start: dict[bytes, dict[int, None]] = {}

    def __contains__(self, seq: object) -> bool:
        return seq in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, seq: int, run: bytes, page_bytes: int) -> None:
        """A sequence computes a run of whole pages, which is not empty."""
        half = page_bytes // TOKEN_BYTES // 2 or 1
        self._runs[seq] = run, run[:page_bytes], run[: half * TOKEN_BYTES]
        for start in self._runs[seq][1:]:
            self._by_start.setdefault(start, {})[seq] = None

    def discard(self, seq: int) -> None:
        """The sequence computes its run no more. It must have one."""
        _, *starts = self._runs.pop(seq)
        for start in dict.fromkeys(starts):
            del self._by_start[start][seq]
            if not self._by_start[start]:
                del self._by_start[start]

    def beginning(self, start: bytes, but: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, tokens) of the newest runs with this first page or half page, except that of sequence `but`."""
        for seq in itertools.islice(reversed(self._by_start.get(start, {})), MAX_SIBLINGS_SCANNED):
            if seq != but:
                yield seq, self._runs[seq][0]


class Node:
    """A run of pages. The root of a namespace has none."""

    __slots__ = (
        "children",
        "depth_pages",
        "device_children",
        "expected_at_s",
        "fence",
        "in_flight",
        "last_used_s",
        "locks",
        "node_id",
        "pages",
        "parent",
        "tails",
        "tier",
        "tokens",
    )

    def __init__(self, node_id: int, parent: Node | None, tokens: bytes, pages: list[int], tier: Tier, now: float):
        self.node_id = node_id
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.tier: Tier = tier
        self.children: dict[bytes, Node] = {}
        self.device_children = 0
        self.locks = 0
        """Holders of this node or of any below it: sequences, pins, and direct references to its pages."""
        self.last_used_s = now
        self.expected_at_s: float | None = None
        self.fence = 0
        """The last step that may have named these pages when they were last let go."""
        self.depth_pages: int = (parent.depth_pages if parent else 0) + len(pages)
        self.in_flight = InFlightRuns()
        """In-flight prefixes of sequences at the end of this node."""
        self.tails: dict[int, Tail] = {}
        """Partial pages right below this node: of held sequences by number, of open ones by minus their number."""


class Tail(NamedTuple):
    """A page that is not full."""

    tokens: bytes
    """Those whose KV is written, fewer than a page's."""
    page: int


class Partial(NamedTuple):
    """A page whose first tokens match."""

    node: Node | None
    """The indexed run that has the page; None: a sequence has it."""
    page: int
    tier: Tier
    num_tokens: int


class Match(NamedTuple):
    """The longest known prefix of some tokens."""

    node: Node
    """The deepest node all of whose pages match."""
    child: Node | None
    """A child of it that matches for `child_pages` pages and then differs, or None."""
    child_pages: int
    num_pages: int
    """Whole pages matched, the child's included."""
    path: tuple[Node, ...]
    """From below the root to `node`."""


class InFlightPrefix(NamedTuple):
    """A prefix that another sequence is computing."""

    seq: int
    num_tokens: int
    """Tokens after the match that it shares."""
    num_pages: int
    """Pages from the start that the other must have indexed for all of them but less than half a page to be found."""


class RadixTree:
    """The tree of one namespace."""

    def __init__(self, namespace: str, page_size: int, next_id: Iterator[int]):
        self.namespace = namespace
        self._page_bytes = page_size * TOKEN_BYTES
        self._next_id = next_id
        self.root = Node(next(next_id), None, b"", [], "device", 0.0)

    def match(self, tokens: bytes, max_pages: int) -> Match:
        """Find the longest prefix of `tokens`, at most `max_pages` pages of it. Changes nothing."""
        page_bytes = self._page_bytes
        end = min(len(tokens) // page_bytes, max_pages) * page_bytes
        node, position = self.root, 0
        path: list[Node] = []
        while position < end:
            child = node.children.get(tokens[position : position + page_bytes])
            if child is None:
                break
            size = len(child.tokens)
            if position + size <= end and tokens[position : position + size] == child.tokens:
                path.append(child)
                node, position = child, position + size
                continue
            pages = (
                common_tokens(child.tokens, tokens[position : min(position + size, end)]) * TOKEN_BYTES // page_bytes
            )
            return Match(node, child, pages, position // page_bytes + pages, tuple(path))
        return Match(node, None, 0, position // page_bytes, tuple(path))

    def partial(self, match: Match, tokens: bytes, max_tokens: int) -> Partial | None:
        """The page after `match` that begins with most of the tokens that follow, at most `max_tokens` of them."""
        start = match.num_pages * self._page_bytes
        wanted = tokens[start : start + min(self._page_bytes, max_tokens * TOKEN_BYTES)]
        if not wanted:
            return None
        best: Partial | None = None
        for node, page, tier, candidate in self._next_pages(match):
            count = common_tokens(candidate, wanted)
            if count and (best is None or count > best.num_tokens):
                best = Partial(node, page, tier, count)
        return best

    def in_flight(self, match: Match, tokens: bytes, max_tokens: int, seq: int) -> InFlightPrefix | None:
        """The sequence other than `seq` that is computing, right after `match`, most of the tokens that follow it in
        `tokens[:max_tokens]`: at least half a page of them. Looks at `MAX_SIBLINGS_SCANNED` sequences."""
        if match.child is not None:
            return None
        following = tokens[match.num_pages * self._page_bytes : max_tokens * TOKEN_BYTES]
        half = self._page_bytes // TOKEN_BYTES // 2 or 1
        for start in (following[: self._page_bytes], following[: half * TOKEN_BYTES]):
            best = max(
                ((common_tokens(run, following), other) for other, run in match.node.in_flight.beginning(start, seq)),
                default=None,
            )
            if best is not None:
                whole, rest = divmod(best[0] * TOKEN_BYTES, self._page_bytes)
                return InFlightPrefix(best[1], best[0], match.num_pages + whole + (rest >= half * TOKEN_BYTES))
        return None

    def add_child(self, parent: Node, tokens: bytes, pages: list[int], now: float) -> Node:
        """Hang a new run of device pages below `parent`, which has no child with the same first page."""
        node = Node(next(self._next_id), parent, tokens, pages, "device", now)
        parent.children[tokens[: self._page_bytes]] = node
        parent.device_children += 1
        return node

    def extend(self, leaf: Node, tokens: bytes, pages: list[int]) -> None:
        """Append pages to a leaf's own run."""
        leaf.tokens += tokens
        leaf.pages.extend(pages)
        leaf.depth_pages += len(pages)

    def nodes(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _next_pages(self, match: Match) -> Iterator[tuple[Node | None, int, Tier, bytes]]:
        child = match.child
        if child is not None:
            start = match.child_pages * self._page_bytes
            yield child, child.pages[match.child_pages], child.tier, child.tokens[start:]
            return
        for count, child in enumerate(reversed(match.node.children.values())):
            if count >= MAX_SIBLINGS_SCANNED:
                break
            yield child, child.pages[0], child.tier, child.tokens[: self._page_bytes]
        for count, tail in enumerate(reversed(match.node.tails.values())):
            if count >= MAX_SIBLINGS_SCANNED:
                break
            yield None, tail.page, "device", tail.tokens


def split(node: Node, num_pages: int, node_id: int, head_refs: int) -> Node:
    """Cut `node` after `num_pages`: a new node takes the head, `node` keeps the tail and all who hold it.

    `head_refs` is the number of direct page references on the head's pages, which stop counting for the tail.
    """
    parent = node.parent
    if parent is None or not 0 < num_pages < len(node.pages):
        raise ValueError(f"node {node.node_id} cannot be split after {num_pages} pages")
    page_bytes = _page_bytes(node)
    cut = num_pages * page_bytes
    head = Node(node_id, parent, node.tokens[:cut], node.pages[:num_pages], node.tier, node.last_used_s)
    head.locks = node.locks
    head.fence = node.fence
    head.expected_at_s = node.expected_at_s
    parent.children[head.tokens[:page_bytes]] = head
    node.tokens = node.tokens[cut:]
    node.pages = node.pages[num_pages:]
    node.locks -= head_refs
    node.parent = head
    head.children[node.tokens[:page_bytes]] = node
    head.device_children = int(node.tier == "device")
    return head


def detach(node: Node) -> None:
    """Remove a node from its parent."""
    parent = node.parent
    if parent is None:
        raise ValueError("a root cannot be removed")
    del parent.children[node.tokens[: _page_bytes(node)]]
    parent.device_children -= int(node.tier == "device")
    node.parent = None


def _page_bytes(node: Node) -> int:
    return len(node.tokens) // len(node.pages)


def common_tokens(left: bytes, right: bytes) -> int:
    """The number of leading tokens that two packed runs share."""
    size = min(len(left), len(right)) // TOKEN_BYTES
    if size <= SHORT_RUN:
        differing = int.from_bytes(left[: size * TOKEN_BYTES], "little") ^ int.from_bytes(
            right[: size * TOKEN_BYTES], "little"
        )
        lowest = differing & -differing
        return (lowest.bit_length() - 1) // (8 * TOKEN_BYTES) if differing else size
    if left[: size * TOKEN_BYTES] == right[: size * TOKEN_BYTES]:
        return size
    a = np.frombuffer(left, np.int32, size)
    b = np.frombuffer(right, np.int32, size)
    return int(np.argmax(a != b))
