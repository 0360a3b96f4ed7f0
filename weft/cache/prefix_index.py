"""`PrefixIndex`: the radix trees of all namespaces, over the pages of both tiers.

Owns which namespace has a tree, the numbers of nodes, and cuts of runs, which move locks and pages with them. The pages
themselves and who may give them up are the matter of `TieredPages`. Called by `weft.cache.manager`, and by the writer
and the retention of the same cache.
"""

from __future__ import annotations

import itertools

from weft.cache.nodes import Node
from weft.cache.page_table import PageTable
from weft.cache.radix import Match, RadixTree, detach, split
from weft.cache.runs import Ranker
from weft.cache.tiers import TieredPages
from weft.core.ids import TOKEN_BYTES


class PrefixIndex:
    """One tree per namespace that has cached pages or open tables."""

    def __init__(self, num_device_pages: int, num_host_pages: int, page_size: int, rank: Ranker):
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        """Bytes of the token ids of a page."""
        self.tiers = TieredPages(
            num_device_pages,
            num_host_pages,
            page_size,
            rank,
            self.split,
            self._detach,
            self._drop_if_empty,
        )
        self.trees: dict[str, RadixTree] = {}
        """By namespace."""
        self._namespaces: dict[int, str] = {}
        self._ids = itertools.count(1)

    def tree(self, namespace: str, tenant: str) -> RadixTree:
        """The tree of a namespace, which belongs to the first `tenant` that asks for it."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = RadixTree(namespace, tenant, self.page_size, self._ids)
            self._namespaces[tree.root.node_id] = namespace
        return tree

    def tree_of_run(self, tenant: str) -> RadixTree:
        """A tree of no namespace, for explicit pages of a tenant: no tokens lead to it."""
        tree = RadixTree("", tenant, self.page_size, self._ids)
        tree.root.is_explicit = True
        return tree

    def find(self, namespace: str, tokens: bytes) -> Match | None:
        """The longest indexed prefix of `tokens`; None when nothing of the namespace is known."""
        tree = self.trees.get(namespace)
        return tree.match(tokens, len(tokens) // self.page_bytes) if tree else None

    def node_for(self, match: Match) -> Node:
        """The node that ends where the match does, cut there if need be."""
        if match.child is not None and match.child_pages:
            return self.split(match.child, match.child_pages)
        return match.node

    def node_at(self, table: PageTable, num_pages: int) -> Node:
        """The node on the table's path that ends after exactly `num_pages`, cut there if need be."""
        node = table.node
        while node.parent is not None and node.depth_pages - len(node.pages) >= num_pages:
            node = node.parent
        if node.depth_pages == num_pages:
            return node
        return self.split(node, num_pages - (node.depth_pages - len(node.pages)))

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a run after `num_pages`. Returns the new node, which has the head; `node` keeps the rest."""
        head_refs = sum(self.tiers.device.refs[page] for page in node.pages[:num_pages])
        was_locked = node.locks > 0
        head = split(node, num_pages, next(self._ids), head_refs)
        if was_locked and node.locks == 0:
            self.tiers.became_unlocked(node, self.tiers.copies.launched)
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
            del self.trees[namespace]
