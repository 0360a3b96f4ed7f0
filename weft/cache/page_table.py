"""`PageTable`: the pages of one sequence. `KVCache` alone changes it; the scheduler reads `pages` and `announced`, and
sets `spares_kept`."""

from __future__ import annotations

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
