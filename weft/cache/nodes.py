"""What the prefix index consists of: `Node`, a run of pages, and what is attached to its end.

Plain data: `weft.cache.radix` owns the shape of the tree, `weft.cache.tiers` the pages and locks. A *wait* says that a
sequence, open or closed, waits for something other than the device and will need the KV up to the end of a node. Pages
are given up from the end of a sequence: its wait then points to the last node that is left, and nowhere when none is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from weft.core.ids import TOKEN_BYTES
from weft.core.step import U64
from weft.core.waits import WaitKind

Tier = Literal["device", "host"]

MAX_SIBLINGS_SCANNED = 32
"""Siblings looked at, newest first, for a page that begins with the same tokens."""
MAX_WAITS_PER_NODE = 8
"""Waits of closed sequences that end at the same node; the oldest is forgotten for a newer one."""


def least_common(page_size: int) -> int:
    """The common tokens that are worth waiting for while another sequence computes them: a quarter of a page. Waiting
    takes no time of the device while others run, and plans put calls that begin alike next to each other."""
    return max(1, page_size // 4)


class InFlightRuns:
    """Runs of whole pages that sequences at the end of a node are computing: sequence number -> tokens.

    Found by their first page, or by the first `least_common` tokens of it.
    """

    __slots__ = ("_by_start", "_runs")

    def __init__(self) -> None:
        self._runs: dict[int, tuple[bytes, bytes, bytes]] = {}
        """(tokens, first page, its beginning)."""
        self._by_start: dict[bytes, dict[int, None]] = {}

    def __contains__(self, seq: object) -> bool:
        return seq in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, seq: int, run: bytes, page_bytes: int) -> None:
        """A sequence computes a run of whole pages, which is not empty."""
        least = least_common(page_bytes // TOKEN_BYTES)
        self._runs[seq] = run, run[:page_bytes], run[: least * TOKEN_BYTES]
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
        """(sequence, tokens) of the newest runs with this first page or beginning, except that of sequence `but`."""
        for seq in itertools.islice(reversed(self._by_start.get(start, {})), MAX_SIBLINGS_SCANNED):
            if seq != but:
                yield seq, self._runs[seq][0]


class Node:
    """A run of pages. The root of a namespace has none, and counts as on the device."""

    __slots__ = (
        "children",
        "copies",
        "depth_pages",
        "device_children",
        "fence",
        "in_flight",
        "is_explicit",
        "is_tail",
        "key",
        "last_used_s",
        "locks",
        "node_id",
        "num_pages",
        "on_device",
        "open_tails",
        "owner",
        "page_numbers",
        "pages",
        "parent",
        "retains",
        "row",
        "tokens",
        "waits",
        "was_found",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        tokens: bytes,
        num_pages: int,
        page_bytes: int,
        now: float,
        owner: str = "",
    ):
        self.node_id = node_id
        self.owner: str = owner if parent is None else parent.owner
        """The tenant that its namespace belongs to."""
        self.parent = parent
        self.tokens = tokens
        self.key = tokens[:page_bytes]
        """The node among its parent's children: the tokens of its first page."""
        self.num_pages = num_pages
        self.is_tail = len(tokens) < num_pages * page_bytes
        """Whether its one page is not full. Lookups of whole pages do not find it: its key is shorter than theirs."""
        self.is_explicit: bool = parent is not None and parent.is_explicit
        """Whether its pages are those of a program (`weft.cache.explicit`): given up to the host alone."""
        self.pages: list[int] = []
        """Device pages: `num_pages`, or none."""
        self.copies: list[int] = []
        """Host pages: `num_pages`, or none. They stay valid while the node is on the device too: its pages do not
        change."""
        self.on_device = True
        """Whether it has device pages. On every path, nodes that have come before those that have not."""
        self.children: dict[bytes, Node] = {}
        self.device_children = 0
        self.locks = 0
        """Holders of this node or of any below it: sequences, pins, and direct references to its pages."""
        self.retains = 0
        """Retains that end at this node or below it."""
        self.last_used_s = now
        self.fence = 0
        """The last step that may have named these pages when they were last let go."""
        self.depth_pages: int = (parent.depth_pages if parent else 0) + num_pages
        self.in_flight = InFlightRuns()
        """In-flight prefixes of sequences at the end of this node."""
        self.open_tails: dict[int, OpenTail] = {}
        """Partial pages right below this node that open sequences write to, by sequence."""
        self.waits: dict[int, Wait] = {}
        """Who waits and will need the pages up to the end of this node, by number of the wait, oldest first."""
        self.page_numbers: U64 | None = None
        """[num_pages] numbers of the prefixes that end with each page (`weft.cache.given_up`); None: not made yet. Of a
        root, one: that of its namespace."""
        self.was_found = False
        """Whether a sequence other than the one that computed it has found it."""
        self.row = -1
        """The node's row among the candidates of its tier; -1: it is none."""


class OpenTail(NamedTuple):
    """A page that is not full and belongs to an open sequence."""

    tokens: bytes
    """Those whose KV is written, fewer than a page's."""
    page: int


class Wait:
    """Who waits, for what, since when. Of kind `PREFIX` it is the mark of a retain or a move, at which nobody waits."""

    __slots__ = (
        "active_s",
        "cohort",
        "end",
        "expected_s",
        "first_s",
        "group",
        "has_ended",
        "is_open",
        "kind",
        "num_kv",
        "num_returns",
        "num_tokens",
        "request_id",
        "seq",
        "since_s",
        "tenant",
        "was_cut",
        "weight",
    )

    def __init__(
        self,
        seq: int,
        tenant: str,
        kind: str,
        since_s: float,
        *,
        is_open: bool,
        expected_s: float | None = None,
        weight: float = 0.0,
        num_tokens: int = 0,
        num_kv: int = 0,
        first_s: float = 0.0,
        active_s: float = 0.0,
        request_id: str = "",
        cohort: str = "",
        group: str = "",
    ):
        self.seq = seq
        self.tenant = tenant
        self.kind = kind
        self.since_s = since_s
        self.is_open = is_open
        """Whether the sequence is open; the wait of a closed one ends when another request extends its tokens."""
        self.expected_s = expected_s
        """When it is announced to return; None: nothing was announced."""
        self.weight = weight
        """Of a retain: runs of smaller weight are given up first."""
        self.num_tokens = num_tokens
        """Of a closed sequence: all its tokens, with and without KV."""
        self.num_kv = num_kv
        """Of a closed sequence: its tokens that had KV."""
        self.request_id = request_id
        """Of a closed sequence, for lists."""
        self.first_s = first_s
        self.active_s = active_s
        """Of a closed sequence: its age (`QueuePlace`), which the sequence that continues it inherits."""
        self.cohort = cohort
        """Of a closed sequence: kind and cohort, to learn from (`weft.core.waits.of_cohort`); empty: the kind alone."""
        self.group = group
        """Of a closed sequence: from which waits this one is estimated; empty: those of its kind."""
        self.was_cut = False
        """Whether some of its KV is gone."""
        self.num_returns = 0
        """Of a closed sequence: those that continue it and wait for the device."""
        self.has_ended = False
        """Of a closed sequence: whether a request has continued it."""
        self.end: Node | None = None
        """Where its KV ends; None: nothing is left of it."""

    def attach(self, node: Node) -> None:
        """Point to the end of `node`, and no longer to where it did. Nowhere, where `node` is a root."""
        self.detach()
        if node.parent is None:
            return
        self.end = node
        node.waits[self.seq] = self
        if len(node.waits) > MAX_WAITS_PER_NODE:
            oldest = next((w for w in node.waits.values() if not w.is_open and not w.weight), None)
            if oldest is not None:
                oldest.detach()

    def detach(self) -> None:
        """Remove the wait from the node where its pages end. Idempotent."""
        if self.end is not None:
            del self.end.waits[self.seq]
            self.end = None


def children_first(node: Node) -> Iterator[Node]:
    """The nodes of a subtree. Conversations may branch deeper than Python's stack."""
    nodes = [node]
    for one in nodes:
        nodes += one.children.values()
    return reversed(nodes)


def parts_behind(node: Node) -> list[Node]:
    """The runs below one that is a leaf on its tier, which only the host has. Of many some of the last that came."""
    parts = [node]
    for part in parts:
        parts += itertools.islice(reversed(part.children.values()), MAX_SIBLINGS_SCANNED)
        if len(parts) > MAX_SIBLINGS_SCANNED:
            break
    return parts[1 : 1 + MAX_SIBLINGS_SCANNED]


def run_before(node: Node) -> Node | None:
    """The run before `node`, if it may take the place of `node`: it has no other child, no wait of its own, and a copy
    on the host exactly if `node` has one. If no wait needs `node`, it must not have been used later, nor been found
    where `node` was not. None: it has to be ranked."""
    parent = node.parent
    if parent is None or parent.waits or len(parent.children) > 1 or bool(parent.copies) != bool(node.copies):
        return None
    for one in (node, *parts_behind(node)) if node.children else (node,):
        for wait in one.waits.values():
            if wait.kind != WaitKind.PREFIX.value:
                return parent
    is_same = parent.last_used_s <= node.last_used_s and parent.was_found == node.was_found
    return parent if is_same else None


def move_waits(source: Node, target: Node) -> None:
    """`source` is about to go: what points to it points to `target`, its parent."""
    for wait in list(source.waits.values()):
        wait.attach(target)
