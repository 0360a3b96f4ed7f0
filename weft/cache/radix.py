"""The prefix index: one radix tree of page-sized token runs per namespace.

Owns the tree's shape: nodes, their tokens and pages, splits. A node is a path-compressed run of full pages, whose
children differ in their first page, or a *tail*: a leaf of one page that is not full. Locks are counted along the path
to the root, so a node without locks has no locked descendant and unlocked leaves can be given up one after another.
Knows nothing of pools or of the order of giving up; the manager (`weft.cache.manager`) moves pages and calls in here.

Lookup, insertion and split cost O(pages touched), never O(tree).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.cache.given_up import namespace_number
from weft.cache.nodes import MAX_SIBLINGS_SCANNED, Node, Tier, least_common
from weft.core.ids import TOKEN_BYTES

SHORT_RUN = 32
"""Tokens of two runs that are compared as one number: for fewer, numpy costs more than it saves."""


class Partial(NamedTuple):
    """A page whose first tokens match."""

    node: Node | None
    """The indexed run that has the page; None: an open sequence has it."""
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

    @property
    def on_host(self) -> bool:
        """Whether only the host has a part of it."""
        return not self.node.on_device or (self.child is not None and self.child_pages > 0 and not self.child.on_device)


class InFlightPrefix(NamedTuple):
    """A prefix that another sequence is computing."""

    seq: int
    num_tokens: int
    """Tokens after the match that it shares."""
    num_pages: int
    """Pages from the start that the other must index until all but less than `least_common` of them are found."""


class RadixTree:
    """The tree of one namespace."""

    def __init__(self, namespace: str, tenant: str, page_size: int, next_id: Iterator[int]):
        self.namespace = namespace
        self._page_bytes = page_size * TOKEN_BYTES
        self._next_id = next_id
        self.root = Node(next(next_id), None, b"", 0, self._page_bytes, 0.0, tenant)
        self.root.page_numbers = np.array([namespace_number(namespace)], np.uint64)

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
        tail = None if match.child is not None else self._longest_tail(match.node, wanted)
        best = None if tail is None else Partial(tail, *_location(tail, 0), len(tail.tokens) // TOKEN_BYTES)
        for node, page, tier, candidate in self._next_pages(match):
            count = common_tokens(candidate, wanted)
            if count and (best is None or count > best.num_tokens):
                best = Partial(node, page, tier, count)
        return best

    def in_flight(self, match: Match, tokens: bytes, max_tokens: int, seq: int) -> InFlightPrefix | None:
        """The sequence other than `seq` that is computing, right after `match`, most of the tokens that follow it in
        `tokens[:max_tokens]`: at least `least_common` of them. Looks at `MAX_SIBLINGS_SCANNED` sequences."""
        if match.child is not None:
            return None
        following = tokens[match.num_pages * self._page_bytes : max_tokens * TOKEN_BYTES]
        least_bytes = least_common(self._page_bytes // TOKEN_BYTES) * TOKEN_BYTES
        for start in (following[: self._page_bytes], following[:least_bytes]):
            best = max(
                ((common_tokens(run, following), other) for other, run in match.node.in_flight.beginning(start, seq)),
                default=None,
            )
            if best is not None:
                whole, rest = divmod(best[0] * TOKEN_BYTES, self._page_bytes)
                return InFlightPrefix(best[1], best[0], match.num_pages + whole + (rest >= least_bytes))
        return None

    def ends(self, match: Match, tokens: bytes) -> Iterator[Node]:
        """The nodes, tails too, up to whose end `tokens` have KV, from the root on."""
        yield from match.path
        if match.child is not None:
            return
        following = tokens[match.num_pages * self._page_bytes : (match.num_pages + 1) * self._page_bytes]
        children = match.node.children
        for size in range(TOKEN_BYTES, len(following) + 1, TOKEN_BYTES):
            child = children.get(following[:size])
            if child is not None and child.is_tail:
                yield child

    def add_child(self, parent: Node, tokens: bytes, pages: list[int], now: float) -> Node:
        """Hang a new run of device pages below `parent`, which has no child with the same first page: full pages, or a
        tail."""
        node = Node(next(self._next_id), parent, tokens, len(pages), self._page_bytes, now)
        node.pages = pages
        parent.children[node.key] = node
        parent.device_children += 1
        return node

    def extend(self, leaf: Node, tokens: bytes, pages: list[int]) -> None:
        """Append device pages to a leaf's own run, which has no host copies."""
        leaf.tokens += tokens
        leaf.pages.extend(pages)
        leaf.num_pages += len(pages)
        leaf.depth_pages += len(pages)
        leaf.page_numbers = None

    def nodes(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _longest_tail(self, node: Node, following: bytes) -> Node | None:
        """The longest tail below `node` that `following`, a page at most, begins with. Unlike the scan of siblings, it
        finds a tail however many pages have been added beside it."""
        children = node.children
        for size in range(len(following), 0, -TOKEN_BYTES):
            child = children.get(following[:size])
            if child is not None and child.is_tail:
                return child
        return None

    def _next_pages(self, match: Match) -> Iterator[tuple[Node | None, int, Tier, bytes]]:
        child = match.child
        if child is not None:
            start = match.child_pages * self._page_bytes
            yield child, *_location(child, match.child_pages), child.tokens[start:]
            return
        for count, child in enumerate(reversed(match.node.children.values())):
            if count >= MAX_SIBLINGS_SCANNED:
                break
            yield child, *_location(child, 0), child.key
        for count, tail in enumerate(reversed(match.node.open_tails.values())):
            if count >= MAX_SIBLINGS_SCANNED:
                break
            yield None, tail.page, "device", tail.tokens


def _location(node: Node, index: int) -> tuple[int, Tier]:
    return (node.pages[index], "device") if node.on_device else (node.copies[index], "host")


def split(node: Node, num_pages: int, node_id: int, head_refs: int) -> Node:
    """Cut `node` after `num_pages`: a new node takes the head, `node` keeps the tail end and all who hold or await it.

    `head_refs` is the number of direct page references on the head's pages, which stop counting for the tail end.
    """
    parent = node.parent
    if parent is None or not 0 < num_pages < node.num_pages:
        raise ValueError(f"node {node.node_id} cannot be split after {num_pages} pages")
    page_bytes = len(node.key)
    cut = num_pages * page_bytes
    head = Node(node_id, parent, node.tokens[:cut], num_pages, page_bytes, node.last_used_s)
    head.pages, node.pages = node.pages[:num_pages], node.pages[num_pages:]
    head.copies, node.copies = node.copies[:num_pages], node.copies[num_pages:]
    head.on_device = node.on_device
    if node.page_numbers is not None:
        head.page_numbers, node.page_numbers = node.page_numbers[:num_pages], node.page_numbers[num_pages:]
    head.locks = node.locks
    head.retains = node.retains
    head.fence = node.fence
    head.was_found = node.was_found
    parent.children[head.key] = head
    node.tokens = node.tokens[cut:]
    node.key = node.tokens[:page_bytes]
    node.num_pages -= num_pages
    node.locks -= head_refs
    node.parent = head
    head.children[node.key] = node
    head.device_children = int(node.on_device)
    return head


def join_child(node: Node) -> bool:
    """Undo a `split` where only the host has both parts and nothing is attached between them: the child takes over the
    run of its parent, which is no node any more. False, and no change, where that is not so.

    A run that is given up page by page would otherwise stay in as many nodes.
    """
    if len(node.children) != 1 or node.parent is None or node.waits or node.locks or node.on_device:
        return False
    (child,) = node.children.values()
    if (
        child.is_tail
        or child.on_device
        or node.in_flight
        or node.open_tails
        or child.was_found != node.was_found
        or child.retains != node.retains
    ):
        return False
    first, rest = node.page_numbers, child.page_numbers
    child.page_numbers = None if first is None or rest is None else np.concatenate((first, rest))
    child.tokens = node.tokens + child.tokens
    child.key = node.key
    child.copies = node.copies + child.copies
    child.num_pages += node.num_pages
    child.fence = max(child.fence, node.fence)
    child.parent = node.parent
    node.parent.children[node.key] = child
    node.parent = None
    return True


def detach(node: Node) -> None:
    """Remove a node from its parent."""
    parent = node.parent
    if parent is None:
        raise ValueError("a root cannot be removed")
    del parent.children[node.key]
    parent.device_children -= int(node.on_device)
    node.parent = None


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
