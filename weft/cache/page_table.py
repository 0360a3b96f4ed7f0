"""`PageTable`: the pages of one sequence. `KVCache` alone changes it; the scheduler reads `pages` and `announced`, and
sets `spares_kept`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.cache.nodes import Node
from weft.cache.radix import RadixTree


class PageTable:
    """The pages of one sequence: `pages[:num_indexed]` are kept alive by a lock on `node`, each of the rest by a
    reference of its own."""

    __slots__ = ("announced", "indexable", "namespace", "node", "num_indexed", "pages", "seq", "spares_kept", "tree")

    def __init__(self, seq: int, namespace: str, tree: RadixTree):
        self.seq = seq
        self.namespace = namespace
        self.tree = tree
        self.pages: list[int] = []
        self.node = tree.root
        self.num_indexed = 0
        self.indexable = True
        """False once a full page duplicated an indexed one, or lost its lineage: later pages stay private."""
        self.announced = b""
        """Tokens of the in-flight prefix that others find at `node`; empty: there is none."""
        self.spares_kept = False
        """It gets no pages that are kept for the shares of tenants (`Ranking.kept`)."""


def pages_of_tables(tables: Iterable[PageTable], others: Iterable[PageTable], node_of: Sequence[Node | None]) -> int:
    """Device pages that `tables` hold and `others` do not, each counted once. `node_of`: the node of each indexed
    page."""
    nodes: set[Node] = set()
    private: set[int] = set()

    def add(added: Iterable[PageTable]) -> int:
        num_indexed, num_private = 0, len(private)
        for table in added:
            ends: list[Node | None] = [table.node]
            for page in table.pages[table.num_indexed :]:
                if node_of[page] is None:
                    private.add(page)
                else:  # the table was truncated within this page
                    ends.append(node_of[page])
            for node in ends:
                while node is not None and node not in nodes:
                    nodes.add(node)
                    num_indexed += node.num_pages
                    node = node.parent
        return num_indexed + len(private) - num_private

    add(others)
    return add(tables)
