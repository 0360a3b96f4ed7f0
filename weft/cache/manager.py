"""`KVCache`: page tables of sequences, and the prefixes they share.

Owns the mapping from tokens to pages: lookup, reuse, copy-on-write, forks. The trees are those of `PrefixIndex`,
`IndexWriter` enters tables into them, and what is kept beyond its use is the matter of `Retention`. Knows no
scheduling: callers decide who gets pages and when; `now` is an argument everywhere. Called by `weft.sched`.

A page enters the index when it is full, its tokens are known on the host and its write is done (`commit`). A page that
duplicates one already indexed stays private to its sequence; a live page table is never rewritten, except that the
owner of a shared page gets a copy of its own before it writes.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from weft.cache.copies import Copies
from weft.cache.explicit import ExplicitRuns
from weft.cache.given_up import prefix_numbers
from weft.cache.index_writer import IndexWriter
from weft.cache.nodes import Node, Wait, least_common
from weft.cache.page_table import PageTable
from weft.cache.prefix_index import PrefixIndex
from weft.cache.radix import InFlightPrefix, Match, RadixTree
from weft.cache.retention import Retention
from weft.cache.runs import Ranker, least_recently_used
from weft.core.step import U64


class Acquired(NamedTuple):
    """What a table got from the prefix index."""

    num_tokens: int
    """Tokens that have KV on the device now."""
    num_from_host: int
    """Of the tokens in full pages, the last so many are brought from the host by the step being built."""


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
        self.index = PrefixIndex(num_device_pages, num_host_pages, page_size, rank)
        self.tiers = self.index.tiers
        self._writer = IndexWriter(self.index)
        self.least_common = least_common(page_size)
        """Tokens that are worth waiting for."""
        self.explicit = ExplicitRuns(self.index)
        self.retention = Retention(self.tiers, int(num_device_pages * max_pinned_fraction))

    # Looking up

    def open_table(self, seq: int, namespace: str, tenant: str = "") -> PageTable:
        """An empty page table, which keeps the tree of its namespace until `close`. The namespace belongs to the first
        `tenant` that opens a table in it."""
        table = PageTable(seq, namespace, self.index.tree(namespace, tenant))
        self.tiers.lock(table.node)
        return table

    def lookup(self, table: PageTable, tokens: bytes, max_tokens: int) -> Match:
        """The longest indexed prefix of `tokens`, at most `max_tokens` of it, in whole pages. Changes nothing."""
        return table.tree.match(tokens, max_tokens // self.page_size)

    def num_found(self, table: PageTable, match: Match, tokens: bytes, max_tokens: int) -> int:
        """How many of `tokens[:max_tokens]` have KV: those of `match`, and of a copy of the best page after it."""
        count = match.num_pages * self.page_size
        partial = table.tree.partial(match, tokens, max_tokens - count)
        return count if partial is None else count + partial.num_tokens

    def in_flight(
        self, table: PageTable, match: Match, tokens: bytes, max_tokens: int, num_own: int
    ) -> InFlightPrefix | None:
        """The in-flight prefix of the namespace that gives at least `least_common` more of `tokens[:max_tokens]` than
        `match` and a copy of the best page after it, and than the `num_own` tokens with KV that the table has. None:
        there is nothing worth waiting for."""
        if not match.node.in_flight:
            return None
        found = table.tree.in_flight(match, tokens, max_tokens, table.seq)
        if found is None:
            return None
        num_known = max(self.num_found(table, match, tokens, max_tokens), num_own)
        gain = min(match.num_pages * self.page_size + found.num_tokens, max_tokens) - num_known
        return found if gain >= self.least_common else None

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

    def prefix_numbers(self, table: PageTable, tokens: bytes) -> U64:
        """[n + 1] numbers of the prefixes of n tokens in the table's namespace, the empty one included
        (`weft.cache.given_up`)."""
        root = table.tree.root.page_numbers
        assert root is not None, "a root has its number from the start"
        return np.concatenate((root, prefix_numbers(tokens, 0, int(root[0]))))

    def acquire(
        self, table: PageTable, match: Match, tokens: bytes, max_tokens: int, now: float, *, is_own: bool = False
    ) -> Acquired:
        """Give a table, whose pages are those of the beginning of `match`, the pages of the match, and a copy of a page
        that begins with the tokens that follow, if the device had it before the step being built.

        Pages that only the host has are brought to the device as far as there is room and as the step's budget of
        copies goes. If the budget was used up, the rest may come with later steps: the result is not complete.
        `is_own`: the table's sequence has computed the pages itself.
        """
        partial = table.tree.partial(match, tokens, max_tokens - match.num_pages * self.page_size)
        if partial is not None and (partial.tier == "host" or self.tiers.copies.is_filling([partial.page])):
            partial = None
        source = None if partial is None else partial.node
        target = self.index.node_for(match)  # of a run that this cuts, `source` keeps the part with the page
        if not is_own and target.parent is not None:
            self.tiers.uses.found(target, now)
        self.tiers.lock(target)
        if source is not None:
            # Making room must not take the source: its page would be fenced until the step being built is done, and
            # without the copy that step may be empty and never be launched.
            self.tiers.lock(source)
        reached, num_brought = self._bring(table, target, now)
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
            pages = self.tiers.allocate(1, now, spares_kept=table.spares_kept)
            if pages is not None:
                self.tiers.copies.copy_page(partial.page, pages[0])
                table.pages += pages
                count += partial.num_tokens
        if source is not None:
            self.tiers.unlock(source, now)
        return Acquired(count, num_brought * self.page_size)

    def is_arriving(self, match: Match) -> bool:
        """Whether the step being built brings the last page of `match` from the host: for another sequence."""
        node = match.node if match.child is None else match.child
        return self.tiers.copies.is_filling(node.pages[:1])  # a step brings a node as a whole

    def bring_partial(self, table: PageTable, match: Match, tokens: bytes, max_tokens: int, now: float) -> bool:
        """Have the step being built bring the page after `match` that begins with the tokens that follow, if only the
        host has it, the match is on the device, and the page is a tail or has `least_common` of the tokens. Returns
        whether the page arrives with that step. `acquire` finds it on the device in the next step, whose forward need
        not wait for the link then."""
        partial = table.tree.partial(match, tokens, max_tokens - match.num_pages * self.page_size)
        node = None if partial is None else partial.node
        if partial is None or node is None or match.on_host:
            return False
        if not node.is_tail and partial.num_tokens < self.least_common:
            return False
        if node.on_device:
            return self.tiers.copies.is_filling([partial.page])
        if self.tiers.copy_budget <= 0:
            return False
        page = node if node.num_pages == 1 else self.index.split(node, 1)
        self.tiers.lock(page)
        is_brought = self.tiers.promote(page, now, spares_kept=table.spares_kept)
        if is_brought:
            self.retention.lock_pins()
        self.tiers.unlock(page, now)
        return is_brought

    def _bring(self, table: PageTable, target: Node, now: float) -> tuple[Node, int]:
        """Bring the nodes after those of a table up to the locked `target` to the device, where they are not. Returns
        the last node that is there, and the number of pages brought."""
        path = []
        start, num_brought = table.node, 0
        node = target
        while node is not start:
            path.append(node)
            assert node.parent is not None, "a match begins with what its table has"
            node = node.parent
        for node in reversed(path):
            if node.on_device:
                start = node
                continue
            budget = min(self.tiers.copy_budget, self.tiers.num_available)
            if budget <= 0:
                break
            part = node if node.num_pages <= budget else self.index.split(node, budget)
            if not self.tiers.promote(part, now, spares_kept=table.spares_kept):
                # What is free, where nothing else can be given up before a part of this is back.
                free = self.tiers.device.num_free
                if not 0 < free < part.num_pages:
                    break
                part = self.index.split(part, free)
                if not self.tiers.promote(part, now, spares_kept=table.spares_kept):
                    break
            num_brought += part.num_pages
            start = part
            if part is not node:
                break
        if num_brought:
            self.retention.lock_pins()
        return start, num_brought

    # Writing

    def announce(self, table: PageTable, tokens: bytes, end: int) -> None:
        """The table's sequence is about to compute the whole pages of `tokens[:end]` that it lacks: an in-flight
        prefix, which others may wait for."""
        if end // self.page_size > table.num_indexed:
            self._writer.announce(table, tokens, end)

    def withdraw(self, table: PageTable) -> None:
        """The table's sequence computes its in-flight prefix no further. Idempotent."""
        self._writer.withdraw(table)

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
        shared, fresh = self._missing(table, start, end)
        return fresh + len(shared)

    def prepare_write(self, table: PageTable, start: int, end: int, now: float) -> bool:
        """Make tokens `start` to `end` writable: pages exist and belong to this table alone. False: out of pages that
        the table may have, and nothing has changed."""
        first = start // self.page_size
        if first < table.num_indexed:
            raise ValueError(f"sequence {table.seq} would write token {start} into an indexed page")
        shared, fresh = self._missing(table, start, end)
        if not shared and not fresh:
            return True
        pages = self.tiers.allocate(fresh + len(shared), now, spares_kept=table.spares_kept)
        if pages is None:
            return False
        if shared:
            self._writer.unpublish_tail(table)
        for index in shared:
            page = pages.pop()
            self.tiers.copies.copy_page(table.pages[index], page)
            self.tiers.drop_ref(table.pages[index], now)
            table.pages[index] = page
        table.pages.extend(pages)
        return True

    def commit(self, table: PageTable, tokens: array[int], num_written: int, now: float) -> None:
        """Index the table's full pages among the first `num_written` tokens, whose KV is written and whose ids are
        `tokens`. Pages that a fork of the table has indexed already are adopted."""
        if table.indexable and num_written // self.page_size > table.num_indexed:
            self._writer.commit(table, tokens, num_written, now)

    def publish_tail(self, table: PageTable, tokens: array[int], num_written: int) -> None:
        """Let others find the table's last page, of which `tokens[:num_written]` are written, before it is full."""
        self._writer.publish_tail(table, tokens, num_written)

    def allocate(self, count: int, now: float) -> list[int] | None:
        """`count` device pages that belong to no sequence, one reference each; None: out of pages."""
        return self.tiers.allocate(count, now)

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
        if table.announced:
            self._writer.withdraw(table)
        if table.node.open_tails:
            self._writer.unpublish_tail(table)
        if len(table.pages) <= keep and whole >= table.num_indexed:
            return
        dropped = table.pages[max(keep, table.num_indexed) :]
        for page in dropped:
            self.tiers.drop_ref(page, now)
        if dropped and keep > table.num_indexed:
            shared = self.tiers.node_of[table.pages[keep - 1]]
            if shared is not None:
                self._writer.split_behind_references(shared)
        if whole < table.num_indexed:
            node = self.index.node_at(table, whole)
            if keep > whole:
                # Its page alone: a reference locks the whole run that the page is in.
                cut = self.tiers.node_of[table.pages[whole]]
                if cut is not None and cut.num_pages > 1:
                    self.index.split(cut, 1)
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
        self._writer.withdraw(table)
        self.commit(table, tokens, num_written, now)
        self._writer.unpublish_tail(table)
        self._writer.merge(table, tokens, num_written, now, fence)
        if wait is not None:
            self._writer.keep_tail(table, tokens, num_written, now, fence)
        for page in table.pages[table.num_indexed :]:
            self.tiers.drop_ref(page, now, fence)
        if wait is not None:
            wait.attach(table.node)
        self.tiers.lock(table.tree.root)
        self.tiers.unlock(table.node, now, fence)
        table.pages = []
        table.node, table.num_indexed, table.indexable = table.tree.root, 0, True

    def discard(self, table: PageTable, now: float, fence: int | None = None) -> int:
        """Give everything back, and forget what of it the prefix index has and nothing else uses or waits for. The
        table is empty afterwards and may be used again. Returns how many pages of the index were forgotten."""
        node = table.node
        num_pages = node.depth_pages
        self.free(table, array("i"), 0, now, fence=fence)
        return num_pages - self.forget_after(node, 0).depth_pages

    def forget_after(self, end: Node, num_pages: int, wait: Wait | None = None) -> Node:
        """Forget the pages past the first `num_pages` of those up to `end`, as far as nothing uses them, and nothing
        but `wait` waits for them. Returns the last node that is left, to which `wait` points then."""
        node = end
        while node.parent is not None and node.depth_pages > num_pages:
            parent, begin = node.parent, node.depth_pages - node.num_pages
            if begin < num_pages:
                parent = self.index.split(node, num_pages - begin)
            if node.locks or node.children or any(other is not wait for other in node.waits.values()):
                break
            self.tiers.forget(node)
            self.tiers.offer(parent)
            node = parent
        return node

    def copy_out(self, node: Node) -> bool:
        """Have the step being built copy the end of a run on the device to the host, as far as the budget of copies and
        free host pages go. False when nothing can be copied."""
        most = min(self.tiers.copy_budget, self.tiers.host.num_free)
        if most <= 0:
            return False
        if most < node.num_pages:
            self.index.split(node, node.num_pages - most)
        return self.tiers.copy_out(node)

    def move_out(self, node: Node, now: float) -> None:
        """Have the step being built move a run, and those before it that nothing else needs, to the host, as far as it
        has room."""
        parent = node.parent
        while parent is not None and not (node.locks or node.device_children):
            # A turn that came twice finds its last page where the first one's went.
            if node.on_device and not self.tiers.demote(node, now):
                return
            node, parent = parent, parent.parent

    def close(self, table: PageTable, now: float) -> None:
        """Give up an empty table: its namespace may be forgotten. A table with pages needs `free` first."""
        self.tiers.unlock(table.tree.root, now)

    # Emptying and views

    def reset(self, now: float) -> None:
        """Forget every cached page that no sequence uses, retained ones too."""
        self.retention.end_all(now)
        for tree in list(self.index.trees.values()):
            for node in list(tree.nodes()):
                if node.parent is not None and node.locks == 0:
                    parent = node.parent
                    self.tiers.forget(node)
                    self.tiers.offer(parent)

    def take_copies(self) -> Copies:
        """The copies that the step being built must carry."""
        return self.tiers.copies.take()

    def trees(self) -> dict[str, RadixTree]:
        """The namespaces' trees, for integrity checks and snapshots."""
        return self.index.trees

    # Inside

    def _missing(self, table: PageTable, start: int, end: int) -> tuple[list[int], int]:
        """Places in the table, touched by tokens `start` to `end`, whose page is not the table's alone; and how many
        pages there are too few."""
        pages, device = table.pages, self.tiers.device
        indexed, refs = device.indexed, device.refs
        first, last = start // self.page_size, -(-end // self.page_size)
        fresh = last - len(pages)
        if fresh <= 0:
            fresh = 0
        else:
            last -= fresh
        shared: list[int] = []
        for index in range(first, last):
            if indexed[pages[index]] or refs[pages[index]] > 1:
                shared.append(index)
        return shared, fresh


def _path_pages(node: Node) -> list[int]:
    """The device pages from the root to the end of `node`."""
    runs = []
    current: Node | None = node
    while current is not None:
        runs.append(current.pages)
        current = current.parent
    return [page for run in reversed(runs) for page in run]
