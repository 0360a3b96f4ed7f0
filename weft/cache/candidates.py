"""`Candidates`: the runs of pages of one tier that can be given up, and which goes first.

Owns a table with one row for each candidate, and their order. The order is that of a `Ranker`, which sees all
candidates at once as arrays: a policy over thousands of them costs some vectorised operations, not a call for each, and
not in every step. Called by `weft.cache.tiers` alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from weft.cache.nodes import Node, Wait, parts_behind
from weft.cache.runs import PREFIX, UNUSED, PageRuns, Ranker
from weft.cache.shares import FairShares
from weft.core.step import F64, I64, Bool
from weft.core.waits import OTHER, WaitKind

Entry = tuple[float, int, int, int]
"""A candidate in the order: (value, order between equals, row, ticket)."""
FIRST_AWAITED = 3
"""Number of the first kind for which something waits that does not wait for the device."""
MAX_KINDS = 256
"""Kinds of waits that are told apart; further ones count as one more."""
FEW_TENANTS = 64
"""Up to so many names, tenants without a candidate keep their numbers."""
_OPEN, _COPIED, _MOVES, _KEPT, _EXPLICIT, _SPARED = range(6)
"""Rows of the table of truth values: there is a candidate; it has a copy on the host; as the policy says, it is worth
one, and it is kept for its tenant's share; its pages are a program's own; as the policy says, it is spared from
newcomers."""
CHUNK = 64
"""Rows that a table has at first."""
ORDERED = 256
"""Candidates that are put in order at once, the first of all."""
ORDER_S = 0.25
"""For how long the order of `MANY` candidates or more holds; that of n holds for n / `MANY` of it. What comes or
changes meanwhile gets its place when it does. Few waits are so short that it matters for how much longer they go on,
and an order costs as much as the rest of a decision."""
MANY = 64
"""The order of fewer holds for less long, in proportion: the fewer there are, the more a wrong place counts."""


class _Names:
    """Texts as small numbers."""

    def __init__(self, *first: str, most: int | None = None):
        """With `most`, further names than so many have the number of `OTHER`, which must be among the `first`."""
        self._numbers = {name: number for number, name in enumerate(first)}
        self._num_first = len(first)
        self._most = most
        self.names: tuple[str, ...] = first

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    @property
    def is_full(self) -> bool:
        """Whether further names have the number of `OTHER`."""
        return self._most is not None and len(self._numbers) >= self._most

    def keep(self, used: Collection[int]) -> I64:
        """Forget all names but the first ones and those with a number in `used`. Returns the new number of each old
        one; 0 for what is forgotten."""
        kept = [number for number in range(len(self.names)) if number < self._num_first or number in used]
        numbers = np.zeros(len(self.names), np.int64)
        numbers[kept] = np.arange(len(kept))
        self.names = tuple(self.names[number] for number in kept)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        return numbers

    def number(self, name: str) -> int:
        """The number of a name, a new one for a new name."""
        found = self._numbers.get(name)
        if found is None:
            if self.is_full:
                return self._numbers[OTHER]
            found = self._numbers[name] = len(self._numbers)
            self.names = (*self.names, name)
        return found


class RunPlace(NamedTuple):
    """What a policy says of a candidate."""

    value: float
    """The smallest goes first."""
    moves: bool
    """Whether it is worth a copy on the host, and can get one in this step."""
    is_kept: bool
    """Whether it is kept for its tenant's share."""
    is_spared: bool
    """Whether it is spared from newcomers."""
    forgotten: float
    """Its value where it cannot get one; nan: not known yet."""
    for_step: bool
    """Whether it has this place in this step alone, which can make no more copies: the next one ranks it anew."""


def _announced_s(wait: Wait | None) -> float:
    """The announced time of return; nan where none was announced."""
    return math.nan if wait is None or wait.expected_s is None else wait.expected_s


class Candidates:
    """Nodes without locks that nothing of the same tier hangs below."""

    def __init__(self, rank: Ranker, page_size: int, num_pages: int):
        """`num_pages`: of the tier."""
        self.rank = rank
        self._page_size = page_size
        self._kinds = _Names(PREFIX, UNUSED, WaitKind.QUEUE, OTHER, most=MAX_KINDS)
        self._tenants = _Names("")
        self._renumber_tenants_at = FEW_TENANTS
        """The number of a new tenant from which on those without a candidate are looked for again."""
        self._floats = np.zeros((4, CHUNK))
        self._ints = np.zeros((6, CHUNK), np.int64)
        self._forgotten = np.zeros(CHUNK)
        """By row: as `RunPlace` has it."""
        self._bools = np.zeros((6, CHUNK), np.bool_)
        self._nodes: list[Node | None] = [None] * CHUNK
        self._free = list(range(CHUNK - 1, -1, -1))
        self._tickets = 0
        self._renumber_at = 0
        """Changes from which on unused kinds are looked for again."""
        self._ticket = [0] * CHUNK
        """By row: changes when another node takes it, or the same one anew."""
        self._order: list[Entry] = []
        """A heap of the first candidates, and of those that came since."""
        self._is_checked = False
        """Whether the order is known to hold for this step."""
        self._until_s = -math.inf
        """Until when it holds."""
        self._was_shared = False
        """Whether several tenants held pages when it was made."""
        self._over: frozenset[str] = frozenset()
        """The tenants over their share then."""
        self._rest = 0
        """Candidates that were left out of the order when it was made."""
        self._least = math.inf
        """No value of theirs is smaller."""
        self._is_renewed = False
        """Whether the order was made anew in this step because of that."""
        self._passed: set[int] = set()
        """Rows passed over until the next step."""
        self._back: list[tuple[Entry, bool]] = []
        """Entries of the order that have another place in this step, or none, and their own again in the next; and
        whether they are then worth a copy again."""
        self._lowered: dict[int, int] = {}
        """Row -> ticket of candidates whose place is `for_step`."""
        self._late: list[tuple[int, int]] = []
        """(row, ticket) of candidates that came after it was made."""
        self.shares = FairShares(num_pages)

    def __len__(self) -> int:
        return len(self._nodes) - len(self._free)

    def awaited_pages(self, num_unlocked: int) -> int:
        """Of all `num_unlocked` pages without locks, those up to the ends of runs for which something waits that does
        not wait for the device; pages that several of these runs share count once.

        Takes time in proportion to the candidates that something waits for, or to the others, whichever are fewer."""
        is_open = self._bools[_OPEN]
        is_awaited = is_open & (self._ints[0] >= FIRST_AWAITED)
        awaited = is_awaited.nonzero()[0].tolist()
        if 2 * len(awaited) <= len(self):
            return sum([node.num_pages for node in self._up_to(awaited)])
        rows = (is_open & ~is_awaited).nonzero()[0].tolist()
        others = [node for row in rows if (node := self._nodes[row]) is not None]
        num_left: dict[Node, int] = {}
        """Children on the device below which something waits, as far as is known."""
        for node in others:
            num_unlocked -= node.num_pages
            parent = node.parent
            assert parent is not None, "a root is no candidate"
            num_left[parent] = num_left.get(parent, parent.device_children) - 1
            if not num_left[parent] and not parent.locks and parent.parent is not None:
                others.append(parent)
        return num_unlocked

    @property
    def num_changes(self) -> int:
        """Grows when a candidate comes or changes."""
        return self._tickets

    def nodes(self) -> list[Node]:
        """All candidates, in no order."""
        return [node for node in self._nodes if node is not None]

    def begin(self) -> None:
        """A new step: whether the order still holds is looked at when it is next asked for."""
        self._is_checked = self._is_renewed = False
        self._passed.clear()
        self.shares.counted = None

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
        youngest = soonest = None
        weight = 0.0
        has_returned = False
        behind = parts_behind(node) if node.children else []
        for wait in itertools.chain(node.waits.values(), *[one.waits.values() for one in behind]):
            weight = max(weight, wait.weight)
            has_returned |= wait.num_returns > 0
            if wait.kind == PREFIX:
                continue
            if wait.expected_s is None:
                if youngest is None or wait.since_s >= youngest.since_s:
                    youngest = wait
            elif soonest is None or wait.expected_s < _announced_s(soonest):
                soonest = wait
        floats, ints, bools = self._floats, self._ints, self._bools
        tenant = self._tenants.number(node.owner)
        if tenant >= self._renumber_tenants_at:
            tenant = self._renumber_tenants(tenant)
        chosen = youngest or soonest
        if chosen is None:
            floats[:, row] = node.last_used_s, np.nan, weight, np.nan
            kind = int(not node.was_found)
        else:
            other_s = np.nan if chosen is soonest else _announced_s(soonest)
            floats[:, row] = chosen.since_s, _announced_s(chosen), weight, other_s
            kind = self._number(WaitKind.QUEUE if has_returned else chosen.group or chosen.kind)
        num_behind = sum([one.num_pages for one in behind]) if behind else 0
        ints[:, row] = kind, node.depth_pages, node.num_pages, node.node_id, tenant, num_behind
        bools[:, row] = True, bool(node.copies), False, False, node.is_explicit, False
        self._late.append((row, self._tickets))

    def got_copy(self, node: Node) -> None:
        """The node, if it is a candidate, has a copy on the host now. It keeps its place until the order is made anew:
        it could only go earlier."""
        if node.row >= 0:
            self._bools[_COPIED, node.row] = True

    def discard(self, node: Node) -> None:
        """The node is no candidate any more. Idempotent."""
        row = node.row
        if row >= 0:
            node.row = -1
            self._nodes[row] = None
            self._ticket[row] = 0
            self._bools[_OPEN, row] = False
            self._passed.discard(row)
            self._free.append(row)

    def first(self, now: float) -> Node | None:
        """The candidate that goes first; it stays one. None: there is none."""
        if not self._is_checked:
            self._check_order(now)
        if self._late:
            self._rank_late(now)
        while self._order:
            value, _, row, ticket = self._order[0]
            if self._ticket[row] != ticket:
                heapq.heappop(self._order)
            elif value > self._least and not self._is_renewed:
                self._is_renewed = True
                break
            else:
                return self._nodes[row]
        if self._rest:
            self._make_order(now)
            return self.first(now)
        return None

    def num_spared(self, tenant: str, now: float) -> int:
        """Evictable pages of a tenant's runs that are spared from newcomers, and of the runs before them."""
        if self.first(now) is None or tenant not in self._tenants:
            return 0
        is_spared = self._bools[_OPEN] & self._bools[_SPARED] & (self._ints[4] == self._tenants.number(tenant))
        return sum(node.num_pages for node in self._up_to(is_spared.nonzero()[0].tolist()))

    @property
    def first_place(self) -> RunPlace:
        """What the policy says of the candidate that `first` has returned."""
        value, _, row, _ = self._order[0]
        moves, is_kept, is_spared = self._bools[[_MOVES, _KEPT, _SPARED], row].tolist()
        for_step = self._lowered.get(row) == self._ticket[row]
        return RunPlace(value, moves, is_kept, is_spared, float(self._forgotten[row]), for_step)

    def num_kept(self, evictable: Mapping[str, int], now: float, but: str | None) -> int:
        """Pages that are kept for the shares of tenants, but for one. `evictable`: by tenant, those without locks.

        An estimate as long as runs go that are not kept: what they uncover may be kept too. Once the first one is kept,
        all are, and the number is exact but for what they would uncover, which counts as kept."""
        if not self.shares.is_shared:
            return 0
        if self.first(now) is not None and self.first_place.is_kept:
            passed = self._passed_pages()
            return sum(pages - passed[name] for name, pages in evictable.items() if name != but)
        is_open, is_kept = self._bools[_OPEN], self._bools[_KEPT]
        kept, others = (is_open & is_kept).nonzero()[0], (is_open & ~is_kept).nonzero()[0]
        tenants, num = self._ints[4], len(self._tenants.names)
        depths = np.bincount(tenants[kept], self._ints[1, kept], num).tolist()
        rests = np.bincount(tenants[others], self._ints[2, others], num).tolist()
        by_tenant = zip(self._tenants.names, depths, rests, strict=True)
        return int(sum([min(n, evictable[name] - rest) for name, n, rest in by_tenant if n and name != but]))

    def _passed_pages(self) -> Counter[str]:
        """Evictable pages of the candidates that were passed over in this step and of the runs before them, by
        tenant."""
        found: Counter[str] = Counter()
        for node in self._up_to(self._passed):
            found[node.owner] += node.num_pages
        return found

    def _up_to(self, rows: Iterable[int]) -> Iterator[Node]:
        """The nodes without locks of candidates, and those before them, each once."""
        seen: set[int] = set()
        for row in rows:
            node = self._nodes[row]
            while node is not None and node.parent is not None and not node.locks and node.node_id not in seen:
                seen.add(node.node_id)
                yield node
                node = node.parent

    def keep_place(self, node: Node, place: RunPlace) -> None:
        """A candidate that has just been entered has the place of another: it is what is left of that one, was part of
        it, or lies before it and nothing else needs it. A step that takes page after page of one sequence ranks it
        once."""
        row, ticket = self._late.pop()
        assert row == node.row, "no other candidate has come since"
        self._bools[[_MOVES, _KEPT, _SPARED], row] = place.moves, place.is_kept, place.is_spared
        self._forgotten[row] = place.forgotten
        if place.for_step:
            self._lowered[row] = ticket
        heapq.heappush(self._order, (place.value, int(self._ints[3, row]), row, ticket))

    def cannot_move(self, node: Node) -> None:
        """The first candidate is worth a copy on the host, which the step cannot make any more: from now on it has the
        place of one that would be forgotten."""
        entry = _, number, row, ticket = self._order[0]
        assert row == node.row, "only the first candidate was to move"
        forgotten = float(self._forgotten[row])
        if math.isnan(forgotten):
            heapq.heappop(self._order)
            self._late.append((row, ticket))
            return
        self._back.append((entry, True))
        self._lowered[row] = ticket
        self._bools[_MOVES, row] = False
        heapq.heapreplace(self._order, (forgotten, number, row, ticket))

    def skip(self, node: Node) -> None:
        """Pass over a candidate for the rest of the step."""
        assert self._order[0][2] == node.row, "only the first candidate is passed over"
        self._back.append((heapq.heappop(self._order), bool(self._bools[_MOVES, node.row])))
        self._passed.add(node.row)

    def worth_copies(self, count: int, now: float) -> list[Node]:
        """Of the `count` candidates that go next, in order, those that are worth a copy on the host and have none."""
        if self.first(now) is None:
            return []
        entries = sorted(self._order)[:count]
        rows = [row for value, _, row, ticket in entries if self._ticket[row] == ticket and value < np.inf]
        is_wanted = self._bools[_MOVES, rows] & ~self._bools[_COPIED, rows]
        nodes = (self._nodes[row] for row, wanted in zip(rows, is_wanted.tolist(), strict=True) if wanted)
        return [node for node in nodes if node is not None]

    def _number(self, kind: str) -> int:
        """The number of a kind of wait. Where all numbers are taken, those of kinds that no candidate has are used
        again; that is tried once for as many changes as there are kinds."""
        if self._kinds.is_full and kind not in self._kinds and self._tickets >= self._renumber_at:
            self._renumber_at = self._tickets + MAX_KINDS
            numbers = self._kinds.keep(np.unique(self._ints[0, self._bools[_OPEN]]).tolist())
            self._ints[0] = numbers[self._ints[0]]
        return self._kinds.number(kind)

    def _renumber_tenants(self, newest: int) -> int:
        """Forget the tenants that no candidate has, but for `newest`: each time that there are twice as many as were
        left before. Returns its new number."""
        numbers = self._tenants.keep({newest, *self._ints[4, self._bools[_OPEN]].tolist()})
        self._ints[4] = numbers[self._ints[4]]
        self._renumber_tenants_at = max(FEW_TENANTS, 2 * len(self._tenants.names))
        return int(numbers[newest])

    def _check_order(self, now: float) -> None:
        """Make the order anew unless it holds for this step too."""
        self._is_checked = True
        shares = self.shares
        is_other = shares.is_shared != self._was_shared
        is_other |= not shares.clearly_over <= self._over <= shares.nearly_over
        if now >= self._until_s or is_other:
            self._make_order(now)
            return
        for (value, number, row, ticket), moves in self._back:
            if self._ticket[row] == ticket:
                self._bools[_MOVES, row] = moves
                heapq.heappush(self._order, (value, number, row, self._anew(row)))
        self._late += [(row, self._anew(row)) for row, ticket in self._lowered.items() if self._ticket[row] == ticket]
        self._back.clear()
        self._lowered.clear()

    def _anew(self, row: int) -> int:
        """A new ticket for a candidate: its entries in the order are of no effect."""
        self._tickets += 1
        self._ticket[row] = self._tickets
        return self._tickets

    def _make_order(self, now: float) -> None:
        is_open = self._bools[_OPEN]
        if self._passed:
            is_open = is_open.copy()
            is_open[list(self._passed)] = False
        rows = is_open.nonzero()[0]
        self._until_s = now + ORDER_S * min(len(rows) / MANY, 1.0)
        self._was_shared, self._over = self.shares.is_shared, self.shares.over
        self._late.clear()
        self._lowered.clear()
        self._back = [back for back in self._back if back[0][2] in self._passed]
        self._rest, self._least, self._order = 0, math.inf, []
        if not len(rows):
            return
        values = self._say(rows, now)
        if len(rows) > ORDERED:
            last = np.partition(values, ORDERED - 1)[ORDERED - 1]
            chosen = values <= last
            self._rest = len(rows) - int(np.count_nonzero(chosen))
            self._least = float(last) if self._rest else math.inf
            rows, values = rows[chosen], values[chosen]
        self._push(rows, values, [])

    def _rank_late(self, now: float) -> None:
        late = [row for row, ticket in self._late if self._ticket[row] == ticket]
        self._late.clear()
        if late:
            rows = np.array(late, np.int64)
            self._push(rows, self._say(rows, now), self._order)

    def _say(self, rows: I64, now: float) -> F64:
        ranking = self.rank(self._runs(rows), now)
        self._bools[_MOVES, rows], self._bools[_KEPT, rows] = ranking.moves, ranking.kept
        self._bools[_SPARED, rows] = ranking.spared
        self._forgotten[rows] = ranking.forgotten
        return ranking.values

    def _push(self, rows: I64, values: F64, order: list[Entry]) -> None:
        numbers = self._ints[3, rows].tolist()
        for value, number, row in zip(values.tolist(), numbers, rows.tolist(), strict=True):
            order.append((value, number, row, self._ticket[row]))
        heapq.heapify(order)
        self._order = order

    def _runs(self, rows: I64) -> PageRuns:
        floats, ints, bools = self._floats[:, rows], self._ints[:, rows], self._bools[:, rows]
        tenants = self._tenants.names
        return PageRuns(
            since_s=floats[0],
            expected_s=floats[1],
            sooner_s=floats[3],
            kind=ints[0],
            num_tokens=ints[1] * self._page_size,
            num_pages=ints[2],
            num_behind=ints[5] * self._page_size,
            has_copy=bools[_COPIED],
            over_share=self._over_share(ints[4]),
            weight=floats[2],
            order=ints[3],
            tenant=ints[4],
            explicit=bools[_EXPLICIT],
            kinds=self._kinds.names,
            tenants=tenants,
            is_shared=self.shares.is_shared,
        )

    def _over_share(self, tenants: I64) -> Bool:
        """[n] for numbers of tenants, whether each holds more than its share."""
        if not self.shares.over:
            return np.zeros(len(tenants), np.bool_)
        over = np.zeros(len(self._tenants.names), np.bool_)
        over[[self._tenants.number(name) for name in self.shares.over if name in self._tenants]] = True
        return over[tenants]

    def _grow(self) -> None:
        size = len(self._nodes)
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)], axis=1)
        self._bools = np.concatenate([self._bools, np.zeros_like(self._bools)], axis=1)
        self._forgotten = np.concatenate([self._forgotten, np.zeros_like(self._forgotten)])
        self._nodes += [None] * size
        self._ticket += [0] * size
        self._free += range(2 * size - 1, size - 1, -1)
