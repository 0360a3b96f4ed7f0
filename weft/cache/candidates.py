"""`Candidates`: the runs of pages of one tier that can be given up, and which goes first.

Owns a table with one row for each candidate, and the order of a step. The order is that of a `Ranker`, which sees all
candidates at once as arrays: a policy over thousands of them costs some vectorised operations per step, not a call for
each. Called by `weft.cache.tiers` alone.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.cache.nodes import PREFIX, Node

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHUNK = 64
"""Candidates that are put in order at once, the first of all."""


class Runs(NamedTuple):
    """A frozen snapshot of runs of pages that can be given up, one row each. All arrays have the shape [rows]."""

    last_used_s: F64
    """When a sequence last let go of the run."""
    since_s: F64
    """When the youngest of the waits for the run began; `last_used_s` where nothing waits for it. Of several waits the
    youngest counts, because it is expected to end first."""
    expected_s: F64
    """The announced time of return; nan: none was announced."""
    kind: I64
    """What is waited for, as an index into `kinds`; 0: nothing is known to wait."""
    num_tokens: I64
    """The context: tokens from the start of the sequence to the end of the run."""
    num_pages: I64
    """Pages that giving up the whole run frees."""
    has_copy: Bools
    """Whether the host has a valid copy."""
    over_share: Bools
    """Whether the tenant holds more than its fair share of the pages that wait."""
    weight: F64
    """Of a retain; 0: none."""
    order: I64
    """Numbers that differ, to decide between equals: smaller goes first."""
    tenant: I64
    """An index into `tenants`; 0: unknown."""
    kinds: tuple[str, ...]
    tenants: tuple[str, ...]


class Ranker(Protocol):
    """Values runs: the one with the smallest value is given up first."""

    def __call__(self, runs: Runs, now: float) -> F64:
        """A value for each run. Must depend on the arguments alone."""
        ...


def least_recently_used(runs: Runs, now: float) -> F64:
    """Runs that are retained after all others, then by last use."""
    return np.where(runs.weight > 0, 1e18, 0.0) + runs.last_used_s


class _Names:
    """Texts as small numbers."""

    def __init__(self, first: str):
        self._numbers = {first: 0}
        self.names: tuple[str, ...] = (first,)

    def number(self, name: str) -> int:
        """The number of a name, a new one for a new name."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self._numbers)
            self.names = (*self.names, name)
        return found


class Candidates:
    """Nodes without locks that nothing of the same tier hangs below."""

    def __init__(self, rank: Ranker, page_size: int):
        self.rank = rank
        self._page_size = page_size
        self._kinds = _Names(PREFIX)
        self._tenants = _Names("")
        self._floats = np.zeros((4, CHUNK))
        self._ints = np.zeros((5, CHUNK), np.int64)
        self._bools = np.zeros((2, CHUNK), np.bool_)
        self._nodes: list[Node | None] = [None] * CHUNK
        self._free = list(range(CHUNK - 1, -1, -1))
        self._tickets = 0
        self._ticket = [0] * CHUNK
        """By row: changes when another node takes it, or the same one anew."""
        self._order: list[tuple[float, int, int, int]] = []
        """The first candidates as a heap of (value, order, row, ticket)."""
        self._is_ranked = False
        self._rest = 0
        """Candidates that were left out of the order when it was made."""
        self._passed: set[int] = set()
        """Rows passed over until the next step."""
        self._late: list[tuple[int, int]] = []
        """(row, ticket) of candidates that came after it was made."""
        self.over_share: frozenset[str] = frozenset()
        """Tenants that hold more than their share, as of the last `begin`."""

    def __len__(self) -> int:
        return len(self._nodes) - len(self._free)

    def nodes(self) -> list[Node]:
        """All candidates, in no order."""
        return [node for node in self._nodes if node is not None]

    def begin(self, over_share: frozenset[str]) -> None:
        """A new step: the order is made anew when it is next asked for."""
        self._is_ranked = False
        self._passed.clear()
        self.over_share = over_share

    def add(self, node: Node) -> None:
        """Enter a node, or note that it has changed."""
        if node.row >= 0:
            self.discard(node)
        if not self._free:
            self._grow()
        row = node.row = self._free.pop()
        self._nodes[row] = node
        self._tickets += 1
        self._ticket[row] = self._tickets
        youngest = None
        weight = 0.0
        for wait in node.waits.values():
            weight = max(weight, wait.weight)
            if youngest is None or wait.since_s >= youngest.since_s:
                youngest = wait
        floats, ints, bools = self._floats, self._ints, self._bools
        if youngest is None:
            floats[:, row] = node.last_used_s, node.last_used_s, np.nan, 0.0
            ints[:, row] = 0, node.depth_pages, node.num_pages, node.node_id, 0
        else:
            expected_s = np.nan if youngest.expected_s is None else youngest.expected_s
            floats[:, row] = node.last_used_s, youngest.since_s, expected_s, weight
            kind, tenant = self._kinds.number(youngest.kind), self._tenants.number(youngest.tenant)
            ints[:, row] = kind, node.depth_pages, node.num_pages, node.node_id, tenant
        bools[:, row] = True, node.on_device and bool(node.copies)
        self._late.append((row, self._tickets))

    def discard(self, node: Node) -> None:
        """The node is no candidate any more. Idempotent."""
        row = node.row
        if row >= 0:
            node.row = -1
            self._nodes[row] = None
            self._ticket[row] = 0
            self._bools[0, row] = False
            self._passed.discard(row)
            self._free.append(row)

    def first(self, now: float) -> Node | None:
        """The candidate that goes first; it stays one. None: there is none."""
        if not self._is_ranked:
            self._make_order(now)
        if self._late:
            self._rank_late(now)
        while self._order:
            _, _, row, ticket = self._order[0]
            if self._ticket[row] == ticket:
                return self._nodes[row]
            heapq.heappop(self._order)
        if self._rest:
            self._make_order(now)
            return self.first(now)
        return None

    def skip(self, node: Node) -> None:
        """Pass over a candidate for the rest of the step."""
        assert self._order[0][2] == node.row, "only the first candidate is passed over"
        heapq.heappop(self._order)
        self._passed.add(node.row)

    def upcoming(self, count: int, now: float) -> tuple[list[Node], Runs]:
        """Up to `count` of the candidates that go next, in order, and their snapshot."""
        if self.first(now) is None:
            empty = np.zeros(0, np.int64)
            return [], self._runs(empty)
        entries = heapq.nsmallest(count, self._order)
        rows = [row for _, _, row, ticket in entries if self._ticket[row] == ticket]
        nodes = [node for row in rows if (node := self._nodes[row]) is not None]
        return nodes, self._runs(np.array(rows, np.int64))

    def _make_order(self, now: float) -> None:
        is_open = self._bools[0].copy()
        is_open[list(self._passed)] = False
        rows = np.flatnonzero(is_open)
        self._is_ranked = True
        self._late.clear()
        self._rest = 0
        if not len(rows):
            self._order = []
            return
        values = self.rank(self._runs(rows), now)
        if len(rows) > CHUNK:
            last = np.partition(values, CHUNK - 1)[CHUNK - 1]
            chosen = values <= last
            self._rest = len(rows) - int(np.count_nonzero(chosen))
            rows, values = rows[chosen], values[chosen]
        self._push(rows, values, [])

    def _rank_late(self, now: float) -> None:
        late = [row for row, ticket in self._late if self._ticket[row] == ticket]
        self._late.clear()
        if late:
            rows = np.array(late, np.int64)
            self._push(rows, self.rank(self._runs(rows), now), self._order)

    def _push(self, rows: I64, values: F64, order: list[tuple[float, int, int, int]]) -> None:
        numbers = self._ints[3, rows].tolist()
        for value, number, row in zip(values.tolist(), numbers, rows.tolist(), strict=True):
            order.append((value, number, row, self._ticket[row]))
        heapq.heapify(order)
        self._order = order

    def _runs(self, rows: I64) -> Runs:
        floats, ints, bools = self._floats[:, rows], self._ints[:, rows], self._bools[:, rows]
        tenants = self._tenants.names
        over = np.array([name in self.over_share for name in tenants], np.bool_)
        return Runs(
            last_used_s=floats[0],
            since_s=floats[1],
            expected_s=floats[2],
            kind=ints[0],
            num_tokens=ints[1] * self._page_size,
            num_pages=ints[2],
            has_copy=bools[1],
            over_share=over[ints[4]],
            weight=floats[3],
            order=ints[3],
            tenant=ints[4],
            kinds=self._kinds.names,
            tenants=tenants,
        )

    def _grow(self) -> None:
        size = len(self._nodes)
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)], axis=1)
        self._bools = np.concatenate([self._bools, np.zeros_like(self._bools)], axis=1)
        self._nodes += [None] * size
        self._ticket += [0] * size
        self._free += range(2 * size - 1, size - 1, -1)
