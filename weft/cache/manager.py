"""`KVCache`: page tables of sequences, and the prefixes they share.

Owns the mapping from tokens to pages: lookup, reuse, copy-on-write, commit into the prefix index, forks. What is kept
beyond its use is the matter of `retention`. Knows no scheduling: callers decide who gets pages and when; `now` is an
argument everywhere. Called by `weft.sched`.

A page enters the index when it is full, its tokens are known on the host and its write is done (`commit`). A page that
duplicates one already indexed stays private to its sequence; a live page table is never rewritten, except that the
owner of a shared page gets a copy of its own before it writes.
"""

from __future__ import annotations

import itertools
from array import array
from typing import NamedTuple

from weft.cache.nodes import Node, OpenTail, Wait
from weft.cache.page_table import PageTable
from weft.cache.radix import InFlightPrefix, Match, Partial, RadixTree, common_tokens, detach, split
from weft.cache.retention import Retention
from weft.cache.runs import Ranker, least_recently_used
from weft.cache.tiers import Copies, TieredPages
from weft.core.ids import TOKEN_BYTES


class Acquired(NamedTuple):
    """What a table got from the prefix index."""

    num_tokens: int
    """Tokens that have KV on the device now."""
    is_complete: bool
    """False: the host has more of the tokens, and the step's budget of copies is used up."""


class KVCache:
    """All KV pages of an engine. `max_pinned_fraction` of the device pages may be pinned or held."""

    def __init__(
        self,
        num_device_pages: int,
        num_host_pages: int = 0,
        page_size: int = 16,
        rank: Ranker = least_recently_used,
        max_pinned_fraction: float = 0.5,
    ):
        self.page_size = page_size
        self.tiers = TieredPages(
            num_device_pages,
            num_host_pages,
            page_size,
            rank,
            self._split,
            self._detach,
            self._drop_if_empty,
        )
        self._page_bytes = page_size * TOKEN_BYTES
        self.half_page = max(1, page_size // 2)
        """Tokens that are worth waiting for."""
        self._trees: dict[str, RadixTree] = {}
        self._namespaces: dict[int, str] = {}
        self._ids = itertools.count(1)
        self.retention = Retention(self, int(num_device_pages * max_pinned_fraction))

    # Looking up

    def open_table(self, seq: int, namespace: str, tenant: str = "") -> PageTable:
        """An empty page table, which keeps the tree of its namespace until `close`. The namespace belongs to the first
        `tenant` that opens a table in it."""
        table = PageTable(seq, namespace, self._tree(namespace, tenant))
        self.tiers.lock(table.node)
        return table

    def lookup(self, table: PageTable, tokens: bytes, max_tokens: int) -> Match:
        """The longest indexed prefix of `tokens`, at most `max_tokens` of it, in whole pages. Changes nothing."""
        return table.tree.match(tokens, max_tokens // self.page_size)

    def in_flight(self, table: PageTable, match: Match, tokens: bytes, max_tokens: int) -> InFlightPrefix | None:
        """The in-flight prefix of the namespace that gives at least half a page more of `tokens[:max_tokens]` than
        `match` and a copy of the best page after it. None: there is nothing worth waiting for."""
        if not match.node.in_flight:
            return None
        found = table.tree.in_flight(match, tokens, max_tokens, table.seq)
        if found is None:
            return None
        limit = max_tokens - match.num_pages * self.page_size
        partial = table.tree.partial(match, tokens, limit)
        gain = min(found.num_tokens, limit) - (0 if partial is None else partial.num_tokens)
        return found if gain >= self.half_page else None

    def acquire_cost(self, match: Match, num_tokens: int) -> int:
        """Device pages that a table with `match` takes out of what is available as it grows to `num_tokens`."""
        on_device = 0
        idle = 0
        for node in match.path:
            if node.on_device:
                on_device += node.num_pages
                idle += node.num_pages if node.locks == 0 else 0
        if match.child is not None and match.child.on_device:
            on_device += match.child_pages
            idle += match.child_pages if match.child.locks == 0 else 0
        return -(-num_tokens // self.page_size) - on_device + idle

    def acquire(self, table: PageTable, match: Match, tokens: bytes, max_tokens: int, now: float) -> Acquired:
        """Give a table, whose pages are those of the beginning of `match`, the pages of the match, and a copy of a page
        that begins with the tokens that follow.

        Pages that only the host has are brought to the device as far as there is room and as the step's budget of
        copies goes. If the budget was used up, the rest may come with later steps: the result is not complete.
        """
        partial = table.tree.partial(match, tokens, max_tokens - match.num_pages * self.page_size)
        source = None if partial is None else partial.node
        target = self.node_for(match)  # of a run that this cuts, `source` keeps the part with the page
        self.tiers.lock(target)
        if source is not None:
            # Making room must not take the source: its page would be fenced until the step being built is done, and
            # without the copy that step may be empty and never be launched.
            self.tiers.lock(source)
        reached, is_complete = self._bring(table.node, target, now)
        if reached is not target:
            partial = None
            self.tiers.lock(reached)
            self.tiers.unlock(target, now)
        self.tiers.unlock(table.node, now)
        table.node = reached
        table.pages = _path_pages(reached)
        table.num_indexed = len(table.pages)
        count = table.num_indexed * self.page_size
        if partial is not None:
            count += self._acquire_partial(table, partial, now)
        if source is not None:
            self.tiers.unlock(source, now)
        return Acquired(count, is_complete)

    def _bring(self, start: Node, target: Node, now: float) -> tuple[Node, bool]:
        """Bring the nodes after `start` up to the locked `target` to the device, where they are not. Returns the last
        node that is there, and False if the budget of copies ended before `target`."""
        path = []
        node = target
        while node is not start:
            path.append(node)
            assert node.parent is not None, "a match begins with what its table has"
            node = node.parent
        for node in reversed(path):
            if node.on_device:
                start = node
                continue
            budget = self.tiers.copy_budget
            if budget <= 0:
                return start, False
            part = node if node.num_pages <= budget else self._split(node, budget)
            if not self.tiers.promote(part, now):
                return start, True
            start = part
            if part is not node:
                return start, False
        return start, True

    def announce(self, table: PageTable, tokens: bytes, end: int) -> None:
        """The table's sequence is about to compute the whole pages of `tokens[:end]` that it lacks: an in-flight
        prefix, which others may wait for."""
        start = table.num_indexed * self._page_bytes
        run = tokens[start : end // self.page_size * self._page_bytes]
        self._announce(table, run)

    def withdraw(self, table: PageTable) -> None:
        """The table's sequence computes its in-flight prefix no further. Idempotent."""
        if table.announced:
            table.announced = b""
            table.node.in_flight.discard(table.seq)

    # Writing

    @property
    def num_available(self) -> int:
        """Device pages that are free or evictable."""
        return self.tiers.num_available

    @property
    def num_soon(self) -> int:
        """Device pages that are available once the steps in flight are done."""
        return self.tiers.num_available + self.tiers.device.num_fenced

    def write_cost(self, table: PageTable, start: int, end: int) -> int:
        """How many pages `prepare_write` would have to allocate."""
        return self._fresh(table, end) + len(self._shared(table, start, end))

    def prepare_write(self, table: PageTable, start: int, end: int, now: float) -> bool:
        """Make tokens `start` to `end` writable: pages exist and belong to this table alone. False: out of pages, and
        nothing has changed."""
        first = start // self.page_size
        if first < table.num_indexed:
            raise ValueError(f"sequence {table.seq} would write token {start} into an indexed page")
        shared, fresh = self._shared(table, start, end), self._fresh(table, end)
        if not shared and not fresh:
            return True
        pages = self.tiers.allocate(fresh + len(shared), now)
        if pages is None:
            return False
        if shared:
            self.unpublish_tail(table)
        for index in shared:
            page = pages.pop()
            self.tiers.copy_page(table.pages[index], page)
            self.tiers.drop_ref(table.pages[index], now)
            table.pages[index] = page
        table.pages.extend(pages)
        return True

    def commit(self, table: PageTable, tokens: array[int], num_written: int, now: float) -> None:
        """Index the table's full pages among the first `num_written` tokens, whose KV is written and whose ids are
        `tokens`. Pages that a fork of the table has indexed already are adopted."""
        end = num_written // self.page_size
        if end <= table.num_indexed or not table.indexable:
            return
        self.unpublish_tail(table)
        begin, run = table.num_indexed, table.announced
        self.withdraw(table)
        while table.indexable and table.num_indexed < end:
            start = table.num_indexed
            written = tokens[start * self.page_size : end * self.page_size].tobytes()
            child = table.node.children.get(written[: self._page_bytes])
            if child is not None:
                self._adopt(table, child, end, now)
            elif self.tiers.node_of[table.pages[start]] is not None:
                table.indexable = False
            else:
                self._append_run(table, written, table.pages[start:end], now)
        if run:
            self._announce(table, run[(table.num_indexed - begin) * self._page_bytes :])

    def publish_tail(self, table: PageTable, tokens: array[int], num_written: int) -> None:
        """Let others find the table's last page, of which `tokens[:num_written]` are written, before it is full."""
        whole = num_written // self.page_size
        rest = tokens[whole * self.page_size : num_written].tobytes()
        if rest and table.num_indexed == whole and table.indexable:
            table.node.open_tails[table.seq] = OpenTail(rest, table.pages[whole])

    def unpublish_tail(self, table: PageTable) -> None:
        """The last page may change or go: sequences find it no longer. Idempotent."""
        table.node.open_tails.pop(table.seq, None)

    # Sharing and giving back

    def fork(self, table: PageTable, child_seq: int) -> PageTable:
        """A second table over the same pages."""
        child = PageTable(child_seq, table.namespace, table.tree)
        child.pages = list(table.pages)
        child.node, child.num_indexed, child.indexable = table.node, table.num_indexed, table.indexable
        self.tiers.lock(child.node)
        for page in child.pages[child.num_indexed :]:
            self.tiers.share_ref(page)
        return child

    def truncate(self, table: PageTable, num_tokens: int, now: float) -> None:
        """Give back the pages past the first `num_tokens` tokens. A page that stays in part is copied before the next
        write if it is shared or indexed."""
        keep = -(-num_tokens // self.page_size)
        whole = num_tokens // self.page_size
        self.withdraw(table)
        self.unpublish_tail(table)
        for page in table.pages[max(keep, table.num_indexed) :]:
            self.tiers.drop_ref(page, now)
        if whole < table.num_indexed:
            node = self._node_at(table, whole)
            if keep > whole:
                self.tiers.share_ref(table.pages[whole])
            self.tiers.lock(node)
            self.tiers.unlock(table.node, now)
            table.node, table.num_indexed = node, whole
        del table.pages[keep:]

    def free(
        self,
        table: PageTable,
        tokens: array[int],
        num_written: int,
        now: float,
        *,
        wait: Wait | None = None,
        fence: int | None = None,
    ) -> None:
        """Give everything back. The table is empty afterwards and may be used again.

        Full pages with KV of the first `num_written` tokens stay cached, and with a `wait` the last page, which is not
        full. The rest is free once step `fence`, the last that names it, is done: by default the last one launched.
        `wait` then points to the last page that stays.
        """
        self.withdraw(table)
        self.commit(table, tokens, num_written, now)
        self.unpublish_tail(table)
        self._merge(table, tokens, num_written, now)
        if wait is not None:
            self._keep_tail(table, tokens, num_written)
        for page in table.pages[table.num_indexed :]:
            self.tiers.drop_ref(page, now, fence)
        if wait is not None:
            wait.attach(table.node)
        self.tiers.lock(table.tree.root)
        self.tiers.unlock(table.node, now, fence)
        table.pages = []
        table.node, table.num_indexed, table.indexable = table.tree.root, 0, True

    def discard(self, table: PageTable, now: float, fence: int | None = None) -> None:
        """Give everything back, and forget what of it the prefix index has and nothing else uses or waits for. The
        table is empty afterwards and may be used again."""
        node = table.node
        self.free(table, array("i"), 0, now, fence=fence)
        while node.parent is not None and not (node.locks or node.children or node.waits):
            parent = node.parent
            self.tiers.forget(node)
            self.tiers.offer(parent)
            node = parent

    def copy_out(self, node: Node) -> bool:
        """Have the step being built copy the end of a run on the device to the host, as far as the budget of copies and
        free host pages go. False when nothing can be copied."""
        most = min(self.tiers.copy_budget, self.tiers.host.num_free)
        if most <= 0:
            return False
        if most < node.num_pages:
            self._split(node, node.num_pages - most)
        return self.tiers.copy_out(node)

    def move_out(self, node: Node, now: float) -> None:
        """Have the step being built move a run, and those before it that nothing else needs, to the host, as far as it
        has room."""
        while node.parent is not None and not (node.locks or node.device_children):
            if not self.tiers.demote(node, now):
                return
            node = node.parent

    def close(self, table: PageTable, now: float) -> None:
        """Give up an empty table: its namespace may be forgotten. A table with pages needs `free` first."""
        self.tiers.unlock(table.tree.root, now)

    # Emptying and views

    def reset(self) -> None:
        """Forget every cached page that nothing uses."""
        self.retention.end_holds()
        for tree in list(self._trees.values()):
            for node in list(tree.nodes()):
                if node.parent is not None and node.locks == 0:
                    parent = node.parent
                    self.tiers.forget(node)
                    self.tiers.offer(parent)

    def take_copies(self) -> Copies:
        """The copies that the step being built must carry."""
        return self.tiers.take_copies()

    def trees(self) -> dict[str, RadixTree]:
        """The namespaces' trees, for integrity checks and snapshots."""
        return self._trees

    # Inside

    def _tree(self, namespace: str, tenant: str) -> RadixTree:
        tree = self._trees.get(namespace)
        if tree is None:
            tree = self._trees[namespace] = RadixTree(namespace, tenant, self.page_size, self._ids)
            self._namespaces[tree.root.node_id] = namespace
        return tree

    def find(self, namespace: str, tokens: bytes) -> Match | None:
        """The longest indexed prefix of `tokens`; None when nothing of the namespace is known."""
        tree = self._trees.get(namespace)
        return tree.match(tokens, len(tokens) // self._page_bytes) if tree else None

    def allocate(self, count: int, now: float) -> list[int] | None:
        """`count` device pages that belong to no sequence, one reference each; None: out of pages."""
        return self.tiers.allocate(count, now)

    def _announce(self, table: PageTable, run: bytes) -> None:
        if run and table.indexable:
            table.announced = run
            table.node.in_flight.add(table.seq, run, self._page_bytes)

    def _acquire_partial(self, table: PageTable, partial: Partial, now: float) -> int:
        pages = self.tiers.allocate(1, now)
        if pages is None:
            return 0
        if partial.tier == "device":
            self.tiers.copy_page(partial.page, pages[0])
        else:
            self.tiers.copy_in(partial.page, pages[0])
        table.pages.append(pages[0])
        return partial.num_tokens

    def _merge(self, table: PageTable, tokens: array[int], num_written: int, now: float) -> None:
        """Index what `commit` has left out because another sequence computed the same pages: the table, which is given
        up, gets their place in the index, and what follows them is indexed."""
        end = num_written // self.page_size
        while table.num_indexed < end:
            start = table.num_indexed
            run = tokens[start * self.page_size : end * self.page_size].tobytes()
            child = table.node.children.get(run[: self._page_bytes])
            if child is None:
                if any(self.tiers.node_of[page] is not None for page in table.pages[start:end]):
                    return  # a page below another run of the index, which a fork has indexed
                self._append_run(table, run, table.pages[start:end], now)
                return
            count = common_tokens(child.tokens, run) * TOKEN_BYTES // self._page_bytes
            node = child if count == child.num_pages else self._split(child, count)
            own = table.pages[start : start + count]
            if not node.on_device and any(self.tiers.node_of[page] is not None for page in own):
                return
            self.tiers.lock(node)
            self.tiers.unlock(table.node, now)
            if node.on_device:
                for page in own:
                    self.tiers.drop_ref(page, now)
            else:
                self._put_on_device(node, own)
            table.pages[start : start + count] = node.pages
            table.node = node
            table.num_indexed += count

    def _put_on_device(self, node: Node, pages: list[int]) -> None:
        """Give a locked node that only the host has the caller's references on `pages`, which have its KV."""
        self.tiers.put_on_device(node, pages)
        others = sum(self.tiers.device.refs[page] for page in pages)
        if others:
            self.tiers.lock(node, others)

    def _keep_tail(self, table: PageTable, tokens: array[int], num_written: int) -> None:
        """Index the table's last page, which is not full."""
        whole = num_written // self.page_size
        rest = tokens[whole * self.page_size : num_written].tobytes()
        if not rest or table.num_indexed != whole:
            return
        page, node = table.pages[whole], table.node
        if rest in node.children or self.tiers.node_of[page] is not None:
            return
        tail = table.tree.add_child(node, rest, [page], node.last_used_s)
        tail.locks = 1  # the table's own; its ancestors count it already
        self._index_pages(tail, [page])
        table.node = tail
        table.num_indexed += 1

    def _append_run(self, table: PageTable, run: bytes, pages: list[int], now: float) -> None:
        """Index private pages below the table's node: in the node's own run where no other table stands there."""
        node = table.node
        alone = node.locks == 1 and node.parent is not None and not node.children and not node.copies
        if alone and not node.open_tails and not node.in_flight and not node.waits and not node.is_tail:
            table.tree.extend(node, run, pages)
        else:
            self._drop_tails(node, run[: self._page_bytes])
            node = table.tree.add_child(node, run, pages, now)
            node.locks = 1  # the table's own; its ancestors count it already
        self._index_pages(node, pages)
        table.node = node
        table.num_indexed += len(pages)

    def _drop_tails(self, node: Node, page: bytes) -> None:
        """Forget the tails below `node` that a full page begins with: it is found instead of them."""
        children = node.children
        if children:
            for size in range(TOKEN_BYTES, len(page), TOKEN_BYTES):
                tail = children.get(page[:size])
                if tail is not None and not tail.locks:
                    self.tiers.forget(tail)

    def _adopt(self, table: PageTable, child: Node, end: int, now: float) -> None:
        """Step down to `child` as far as it consists of the table's own pages, which a fork has indexed."""
        own = table.pages[table.num_indexed : end]
        count = 0
        while count < min(len(own), len(child.pages)) and own[count] == child.pages[count]:
            count += 1
        if count == 0 or not child.on_device:
            table.indexable = False
            return
        if count < len(child.pages):
            child = self._split(child, count)
        child.locks += 1  # the table's own; its ancestors count it already
        for page in own[:count]:
            self.tiers.drop_ref(page, now)
        table.node = child
        table.num_indexed += count

    def _fresh(self, table: PageTable, end: int) -> int:
        return max(0, -(-end // self.page_size) - len(table.pages))

    def _shared(self, table: PageTable, start: int, end: int) -> list[int]:
        """Places in the table, touched by tokens `start` to `end`, whose page is not the table's alone."""
        device = self.tiers.device
        last = min(len(table.pages), -(-end // self.page_size))
        return [
            index
            for index in range(start // self.page_size, last)
            if device.indexed[table.pages[index]] or device.refs[table.pages[index]] > 1
        ]

    def _index_pages(self, node: Node, pages: list[int]) -> None:
        """The index takes over the caller's references on `pages`; those of others become locks on the node."""
        others = 0
        if self.tiers.is_filling(pages):
            node.fence = self.tiers.building
        self.tiers.indexed_pages[node.owner] += len(pages)
        for page in pages:
            self.tiers.device.index(page)
            self.tiers.node_of[page] = node
            others += self.tiers.device.refs[page]
        if others:
            self.tiers.lock(node, others)

    def _node_at(self, table: PageTable, num_pages: int) -> Node:
        """The node on the table's path that ends after exactly `num_pages`, cut there if need be."""
        node = table.node
        while node.parent is not None and node.depth_pages - len(node.pages) >= num_pages:
            node = node.parent
        if node.depth_pages == num_pages:
            return node
        return self._split(node, num_pages - (node.depth_pages - len(node.pages)))

    def node_for(self, match: Match) -> Node:
        """The node that ends where the match does, cut there if need be."""
        if match.child is not None and match.child_pages:
            return self._split(match.child, match.child_pages)
        return match.node

    def _split(self, node: Node, num_pages: int) -> Node:
        head_refs = sum(self.tiers.device.refs[page] for page in node.pages[:num_pages])
        was_locked = node.locks > 0
        head = split(node, num_pages, next(self._ids), head_refs)
        if was_locked and node.locks == 0:
            self.tiers.became_unlocked(node, self.tiers.launched)
        self.tiers.was_split(head, node)
        return head

    def _detach(self, node: Node) -> None:
        parent = node.parent
        detach(node)
        if parent is not None:
            self._drop_if_empty(parent)

    def _drop_if_empty(self, root: Node) -> None:
        namespace = self._namespaces.get(root.node_id)
        if namespace is not None and not root.children and root.locks == 0:
            del self._namespaces[root.node_id]
            del self._trees[namespace]


def _path_pages(node: Node) -> list[int]:
    """The device pages from the root to the end of `node`."""
    runs = []
    current: Node | None = node
    while current is not None:
        runs.append(current.pages)
        current = current.parent
    return [page for run in reversed(runs) for page in run]
