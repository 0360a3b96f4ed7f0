"""The invariants of the cache, written once. Run after every step in tests, under random sequences of operations.

No page is lost, owned twice, or freed while shared; every lock and reference has a holder; on every path device runs
come before host runs. All of it holds for the explicit runs of programs that wait, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.abi.errors import WeftError
from weft.cache.manager import KVCache
from weft.cache.nodes import Node
from weft.cache.page_table import PageTable
from weft.cache.radix import RadixTree
from weft.core.ids import TOKEN_BYTES


class IntegrityError(WeftError):
    """An invariant does not hold: a bug in Weft."""


def check_integrity(cache: KVCache, tables: Iterable[PageTable], others: Counter[int] | None = None) -> None:
    """Raise `IntegrityError` unless every invariant holds. `tables` are all open tables of the cache, `others` how
    often each device page is held outside of any table."""
    tables = list(tables)
    nodes = _check_trees(cache)
    _check_pages(cache, nodes, tables, others or Counter())
    _check_locks(cache, nodes, tables)
    _check_open_tails(cache, tables)
    _check_candidates(cache, nodes)
    _check_retains(cache, nodes)
    _check_in_flight(cache, tables)
    for table in tables:
        _check_table(cache, table)


def _fail(message: str) -> None:
    raise IntegrityError(message)


def _check_trees(cache: KVCache) -> list[Node]:
    found: list[Node] = []
    unlocked = Counter[bool]()
    """By whether they must move to the host to be given up."""
    evictable = Counter[str]()
    page_bytes = cache.page_size * TOKEN_BYTES
    for name, tree in cache.trees().items():
        if not tree.root.children and not tree.root.locks:
            _fail(f"namespace {name!r} is empty and unused, but kept")
    for tree in _trees(cache):
        for node in tree.nodes():
            found.append(node)
            parent = node.parent
            if parent is None or parent.children.get(node.tokens[:page_bytes]) is not node:
                _fail(f"node {node.node_id} is not its parent's child")
                continue
            if node.key != node.tokens[:page_bytes] or len(node.pages) != node.num_pages * node.on_device:
                _fail(f"node {node.node_id} has {len(node.pages)} of {node.num_pages} pages, or a wrong key")
            if len(node.copies) != node.num_pages and (node.copies or not node.on_device):
                _fail(f"node {node.node_id} has {len(node.copies)} of {node.num_pages} pages on the host")
            if node.is_tail:
                if node.num_pages != 1 or not 0 < len(node.tokens) < page_bytes or node.children or parent.is_tail:
                    _fail(f"node {node.node_id} is no leaf with a page that is not full")
            elif not node.num_pages or len(node.tokens) != node.num_pages * page_bytes:
                _fail(f"node {node.node_id} has {node.num_pages} pages and {len(node.tokens)} token bytes")
            if node.depth_pages != parent.depth_pages + node.num_pages:
                _fail(f"node {node.node_id} states a wrong depth")
            if node.on_device and not parent.on_device:
                _fail(f"device node {node.node_id} below a host node")
            if not node.on_device and node.locks:
                _fail(f"host node {node.node_id} is locked")
            if any(wait.end is not node for wait in node.waits.values()):
                _fail(f"node {node.node_id} has a wait that points elsewhere")
            if node.on_device and node.locks == 0:
                must_move = node.is_explicit and not node.copies
                unlocked[must_move] += node.num_pages
                evictable[node.owner] += 0 if must_move else node.num_pages
        for node in [tree.root, *tree.nodes()]:
            if node.device_children != sum(child.on_device for child in node.children.values()):
                _fail(f"node {node.node_id} miscounts its device children")
    owned = Counter({n.owner: 0 for n in found})
    for node in found:
        owned[node.owner] += len(node.pages)
    if +owned != +cache.tiers.indexed_pages:
        _fail(f"tenants have {dict(owned)} pages in the index, {dict(cache.tiers.indexed_pages)} counted")
    counted = {False: cache.tiers.num_evictable, True: cache.tiers.num_movable}
    if any(unlocked[must_move] != count for must_move, count in counted.items()):
        _fail(f"{dict(unlocked)} pages can be given up (True: only to the host), {counted} counted")
    kept = sum(len(node.copies) for node in found if node.is_explicit)
    if kept != cache.tiers.num_kept:
        _fail(f"explicit nodes have {kept} host pages, {cache.tiers.num_kept} counted")
    if +evictable != +cache.tiers.evictable_pages:
        _fail(f"tenants have {dict(evictable)} evictable pages, {dict(cache.tiers.evictable_pages)} counted")
    return found


def _trees(cache: KVCache) -> list[RadixTree]:
    """Those of namespaces, and of explicit runs."""
    return [*cache.trees().values(), *(run.tree for run in cache.explicit.runs)]


def _check_pages(cache: KVCache, nodes: list[Node], tables: list[PageTable], others: Counter[int]) -> None:
    direct: Counter[int] = Counter(others)
    for table in tables:
        direct.update(table.pages[table.num_indexed :])
    for tier, pool in (("device", cache.tiers.device), ("host", cache.tiers.host)):
        indexed = [page for node in nodes for page in (node.pages if tier == "device" else node.copies)]
        if len(indexed) != len(set(indexed)):
            _fail(f"a {tier} page is indexed twice")
        if set(indexed) != {page for page in range(pool.num_pages) if pool.indexed[page]}:
            _fail(f"{tier} pages marked as indexed are not those in the trees")
        held = direct if tier == "device" else Counter[int]()
        idle = pool.free_pages() + pool.fenced_pages()
        if len(idle) != len(set(idle)):
            _fail(f"a {tier} page is free twice")
        used = set(indexed) | set(held)
        if used & set(idle):
            _fail(f"{tier} pages {sorted(used & set(idle))} are free and in use")
        if len(used) + len(idle) != pool.num_pages:
            _fail(f"{pool.num_pages - len(used) - len(idle)} {tier} pages are lost")
        for page in range(pool.num_pages):
            if pool.refs[page] != held[page]:
                _fail(f"{tier} page {page} counts {pool.refs[page]} references and has {held[page]}")


def _check_locks(cache: KVCache, nodes: list[Node], tables: list[PageTable]) -> None:
    targets = [table.node for table in tables] + cache.retention.pinned()
    targets += [run.held for run in cache.explicit.runs]
    owner = {page: node for node in nodes for page in node.pages}
    for page, node in owner.items():
        if cache.tiers.node_of[page] is not node:
            _fail(f"page {page} names the wrong node")
        targets.extend([node] * cache.tiers.device.refs[page])
    locks: Counter[int] = Counter()
    for target in targets:
        current: Node | None = target
        while current is not None:
            locks[current.node_id] += 1
            current = current.parent
    for node in nodes + [tree.root for tree in _trees(cache)]:
        if node.locks != locks[node.node_id]:
            _fail(f"node {node.node_id} counts {node.locks} locks and has {locks[node.node_id]}")


def _check_open_tails(cache: KVCache, tables: list[PageTable]) -> None:
    own = {(t.seq, t.node.node_id, t.pages[t.num_indexed]) for t in tables if len(t.pages) > t.num_indexed}
    for tree in cache.trees().values():
        for node in [tree.root, *tree.nodes()]:
            for seq, tail in node.open_tails.items():
                if (seq, node.node_id, tail.page) not in own:
                    _fail(f"node {node.node_id} offers page {tail.page}, which no table keeps there")


def _check_candidates(cache: KVCache, nodes: list[Node]) -> None:
    tiers = cache.tiers
    leaves = {node.node_id for node in nodes if node.on_device and not node.locks and not node.device_children}
    host_leaves = {node.node_id for node in nodes if not (node.on_device or node.children or node.is_explicit)}
    for candidates, expected in ((tiers.candidates, leaves), (tiers.host_candidates, host_leaves)):
        entered = {node.node_id for node in candidates.nodes()}
        if entered != expected:
            _fail(f"nodes {sorted(entered ^ expected)} are candidates for giving up, or should be")


def _check_retains(cache: KVCache, nodes: list[Node]) -> None:
    retains: Counter[int] = Counter()
    for end in cache.retention.ends():
        current: Node | None = end
        while current is not None:
            retains[current.node_id] += 1
            current = current.parent
    pages: Counter[str] = Counter()
    for node in nodes:
        if node.retains != retains[node.node_id]:
            _fail(f"node {node.node_id} counts {node.retains} retains and has {retains[node.node_id]}")
        pages[node.owner] += node.num_pages * (node.retains > 0)
    if +pages != +cache.tiers.retained_pages:
        _fail(f"tenants retain {dict(pages)} pages, {dict(cache.tiers.retained_pages)} counted")


def _check_in_flight(cache: KVCache, tables: list[PageTable]) -> None:
    announced = [table for table in tables if table.announced]
    for table in announced:
        if table.seq not in table.node.in_flight:
            _fail(f"sequence {table.seq} has an in-flight prefix that its node does not list")
    nodes = [node for tree in cache.trees().values() for node in (tree.root, *tree.nodes())]
    if sum(len(node.in_flight) for node in nodes) != len(announced):
        _fail("a node has an in-flight prefix of no open sequence")


def _check_table(cache: KVCache, table: PageTable) -> None:
    path: list[int] = []
    node: Node | None = table.node
    while node is not None and node.parent is not None:
        if not node.on_device:
            _fail(f"sequence {table.seq} stands on a host node")
        path = node.pages + path
        node = node.parent
    if path != table.pages[: table.num_indexed]:
        _fail(f"sequence {table.seq}: its first {table.num_indexed} pages are not its path in the index")
    if len(set(table.pages)) != len(table.pages):
        _fail(f"sequence {table.seq} lists a page twice")
