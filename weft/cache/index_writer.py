"""`IndexWriter`: how the pages of tables enter the prefix index.

Owns the rules by which a table's full pages are indexed, duplicates are adopted or left private, the last page of a
sequence that waits stays findable, and an in-flight prefix is announced. Decides nothing: `KVCache` calls it.
"""

from __future__ import annotations

from array import array

from weft.cache.nodes import Node, OpenTail
from weft.cache.page_table import PageTable
from weft.cache.prefix_index import PrefixIndex
from weft.cache.radix import common_tokens
from weft.core.ids import TOKEN_BYTES


class IndexWriter:
    """Writes tables into one prefix index."""

    def __init__(self, index: PrefixIndex):
        self._page_size = index.page_size
        self._page_bytes = index.page_bytes
        self._index = index
        self._tiers = index.tiers

    def announce(self, table: PageTable, tokens: bytes, end: int) -> None:
        """Publish the whole pages of `tokens[:end]` (packed ids) that the table lacks as its in-flight prefix
        (`KVCache.announce`)."""
        start = table.num_indexed * self._page_bytes
        run = tokens[start : end // self._page_size * self._page_bytes]
        self._announce(table, run)

    def withdraw(self, table: PageTable) -> None:
        """Remove the table's in-flight prefix, so that nobody waits for it. Idempotent (`KVCache.withdraw`)."""
        if table.announced:
            table.announced = b""
            table.node.in_flight.discard(table.seq)

    def commit(self, table: PageTable, tokens: array[int], num_written: int, now: float) -> None:
        """Index the full pages among the first `num_written` of `tokens` (`KVCache.commit`). The table must be
        indexable, and at least one more of its pages full."""
        end = num_written // self._page_size
        self.unpublish_tail(table)
        begin, run = table.num_indexed, table.announced
        self.withdraw(table)
        while table.indexable and table.num_indexed < end:
            start = table.num_indexed
            written = tokens[start * self._page_size : end * self._page_size].tobytes()
            child = table.node.children.get(written[: self._page_bytes])
            if child is not None:
                self._adopt(table, child, end, now)
            elif self._tiers.node_of[table.pages[start]] is not None:
                table.indexable = False
            else:
                self._append_run(table, written, table.pages[start:end], now)
        if run:
            self._announce(table, run[(table.num_indexed - begin) * self._page_bytes :])

    def publish_tail(self, table: PageTable, tokens: array[int], num_written: int) -> None:
        """Let others find the last, partial page, of which `tokens[:num_written]` are written. Does nothing while full
        pages of the table are still to be indexed (`KVCache.publish_tail`)."""
        whole = num_written // self._page_size
        rest = tokens[whole * self._page_size : num_written].tobytes()
        if rest and table.num_indexed == whole and table.indexable:
            table.node.open_tails[table.seq] = OpenTail(rest, table.pages[whole])

    def unpublish_tail(self, table: PageTable) -> None:
        """The last page may change or go: sequences find it no longer. Idempotent."""
        table.node.open_tails.pop(table.seq, None)

    def merge(
        self, table: PageTable, tokens: array[int], num_written: int, now: float, fence: int | None = None
    ) -> None:
        """Index what `commit` has left out because another sequence computed the same pages: the table, which is given
        up, gets their place in the index, and what follows them is indexed."""
        end = num_written // self._page_size
        while table.num_indexed < end:
            start = table.num_indexed
            run = tokens[start * self._page_size : end * self._page_size].tobytes()
            child = table.node.children.get(run[: self._page_bytes])
            if child is None:
                if any(self._tiers.node_of[page] is not None for page in table.pages[start:end]):
                    return  # a page below another run of the index, which a fork has indexed
                self._append_run(table, run, table.pages[start:end], now)
                return
            count = common_tokens(child.tokens, run) * TOKEN_BYTES // self._page_bytes
            node = child if count == child.num_pages else self._index.split(child, count)
            own = table.pages[start : start + count]
            if not node.on_device and any(self._tiers.node_of[page] is not None for page in own):
                return
            self._stand_at(table, node, now, fence)

    def _stand_at(self, table: PageTable, node: Node, now: float, fence: int | None) -> None:
        """A table that is given up stands at `node`, a child of its own, whose pages have the tokens of its next ones:
        these go, or are those of the node where only the host has it. `fence`: as for `KVCache.free`."""
        start = table.num_indexed
        own = table.pages[start : start + node.num_pages]
        self._tiers.lock(node)
        self._tiers.unlock(table.node, now, fence)
        others = 0
        if node.on_device:
            for page in own:
                self._tiers.drop_ref(page, now, fence)
        else:
            others = self._put_on_device(node, own)
        table.pages[start : start + node.num_pages] = node.pages
        table.node = node
        table.num_indexed += node.num_pages
        if others:
            self.split_behind_references(node)

    def split_behind_references(self, node: Node) -> None:
        """References of tables on pages of a node lock all of it: it ends with the last of these pages, so that what
        follows, which no table but that of the node uses, can be given up."""
        refs = self._tiers.device.refs
        used = max((count for count, page in enumerate(node.pages, 1) if refs[page]), default=0)
        if 0 < used < node.num_pages:
            self._index.split(node, used)

    def keep_tail(
        self, table: PageTable, tokens: array[int], num_written: int, now: float, fence: int | None = None
    ) -> None:
        """Index the last page, which is not full, of a table that is given up. Not where another table has it too."""
        whole = num_written // self._page_size
        rest = tokens[whole * self._page_size : num_written].tobytes()
        if not rest or table.num_indexed != whole:
            return
        page, node = table.pages[whole], table.node
        if self._tiers.node_of[page] is not None:
            return
        same = node.children.get(rest)
        if self._tiers.device.refs[page] > 1 and (same is None or not same.on_device):
            # A fork that goes on writes to the page. Once indexed, the fork would have to copy it, and a pool with the
            # pages of one context has none for the copy.
            return
        if same is not None:
            self._stand_at(table, same, now, fence)
            return
        tail = table.tree.add_child(node, rest, [page], node.last_used_s)
        tail.locks = 1  # the table's own; its ancestors count it already
        self._index_pages(tail, [page])
        table.node = tail
        table.num_indexed += 1

    def _announce(self, table: PageTable, run: bytes) -> None:
        if run and table.indexable:
            table.announced = run
            table.node.in_flight.add(table.seq, run, self._page_bytes)

    def _append_run(self, table: PageTable, run: bytes, pages: list[int], now: float) -> None:
        """Index private pages below the table's node: in the node's own run where no other table stands there."""
        node = table.node
        alone = node.locks == 1 and node.parent is not None and not node.children and not node.copies
        if alone and not node.open_tails and not node.in_flight and not node.waits and not node.is_tail:
            table.tree.extend(node, run, pages)
            self._tiers.num_reshaped += 1  # a match that ends here would have the new pages too
        else:
            self._drop_tails(node, run[: self._page_bytes])
            node = table.tree.add_child(node, run, pages, now)
            node.locks = 1  # the table's own; its ancestors count it already
        table.node = node
        table.num_indexed += len(pages)
        if self._index_pages(node, pages):
            self.split_behind_references(node)

    def _drop_tails(self, node: Node, page: bytes) -> None:
        """Forget the tails below `node` that a full page begins with: it is found instead of them."""
        children = node.children
        if children:
            for size in range(TOKEN_BYTES, len(page), TOKEN_BYTES):
                tail = children.get(page[:size])
                if tail is not None and not tail.locks:
                    self._tiers.forget(tail, is_replaced=True)

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
            child = self._index.split(child, count)
        child.locks += 1  # the table's own; its ancestors count it already
        for page in own[:count]:
            self._tiers.drop_ref(page, now)
        table.node = child
        table.num_indexed += count

    def _put_on_device(self, node: Node, pages: list[int]) -> int:
        """Give a locked node that only the host has the caller's references on `pages`, which have its KV. Returns the
        number of those of others."""
        self._tiers.put_on_device(node, pages)
        others = sum(self._tiers.device.refs[page] for page in pages)
        if others:
            self._tiers.lock(node, others)
        return others

    def _index_pages(self, node: Node, pages: list[int]) -> int:
        """The index takes over the caller's references on `pages`; those of others become locks on the node. Returns
        their number."""
        others = 0
        if self._tiers.copies.is_filling(pages):
            node.fence = self._tiers.copies.building
        self._tiers.indexed_pages[node.owner] += len(pages)
        for page in pages:
            self._tiers.device.index(page)
            self._tiers.node_of[page] = node
            others += self._tiers.device.refs[page]
        if others:
            self._tiers.lock(node, others)
        return others
