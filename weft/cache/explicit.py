"""`ExplicitRuns`: the pages that programs have filled themselves, while their programs wait.

Such pages have no lineage: nothing can compute them again, and nothing else finds them. A program that waits lends them
to the tiers as one run, in a tree of its own, so that they are given up in the same order as all other KV, from the end
of the run, but to the host alone. Their holder takes all of them back before it touches one.

Owns the trees of these runs. The spaces of the scheduler hold the pages before and after.
"""

from __future__ import annotations

from weft.cache.nodes import Node, Wait
from weft.cache.prefix_index import PrefixIndex
from weft.cache.radix import RadixTree


class ExplicitRun:
    """Pages of one holder that waits."""

    __slots__ = ("held", "tree", "wait")

    def __init__(self, tree: RadixTree, wait: Wait):
        self.tree = tree
        """Of one path."""
        self.wait = wait
        """Its end is that of the run."""
        self.held = tree.root
        """The last node that is locked, as are all before it."""

    def nodes(self) -> list[Node]:
        """From the first page on."""
        return list(self.tree.nodes())

    @property
    def num_missing(self) -> int:
        """Pages that only the host has."""
        return sum(node.num_pages for node in self.nodes() if not node.on_device)


class ExplicitRuns:
    """The runs of one cache."""

    def __init__(self, index: PrefixIndex):
        self._index = index
        self._tiers = index.tiers
        self.runs: dict[ExplicitRun, None] = {}
        """All of them, in order of `lend`."""

    def lend(self, pages: list[int], wait: Wait, fence: int, now: float) -> ExplicitRun:
        """Let others have device pages, each of which the caller alone holds, as far as the host can take them. Step
        `fence` is the last that may name them; `wait` says what their holder waits for."""
        tiers, tree = self._tiers, self._index.tree_of_run(wait.tenant)
        node = tree.add_child(tree.root, bytes(len(pages) * self._index.page_bytes), pages, now)
        for page in pages:
            tiers.device.index(page)
            tiers.node_of[page] = node
        tiers.indexed_pages[node.owner] += len(pages)
        wait.attach(node)
        tiers.lock(tree.root)
        tiers.became_unlocked(node, fence)
        run = ExplicitRun(tree, wait)
        self.runs[run] = None
        return run

    def hold(self, run: ExplicitRun, now: float) -> None:
        """What is on the device stays there until `release`."""
        on_device = [node for node in run.nodes() if node.on_device]
        if on_device:
            self._lock(run, on_device[-1], now)

    def bring(self, run: ExplicitRun, now: float) -> bool:
        """Have the step being built bring pages from the host, from the first one on, as far as its budget of copies
        and free pages go. Returns whether all are on the device then."""
        self.hold(run, now)
        tiers = self._tiers
        for node in run.nodes():
            if node.on_device:
                continue
            budget = min(tiers.copy_budget, tiers.num_available)
            if budget <= 0:
                return False
            part = node if node.num_pages <= budget else self._index.split(node, budget)
            tiers.lock(part)
            is_brought = tiers.promote(part, now)
            if is_brought:
                self._lock(run, part, now)
            tiers.unlock(part, now)
            if not is_brought or part is not node:
                return False
        return True

    def release(self, run: ExplicitRun, now: float) -> None:
        """Its holder goes on waiting: what was brought may be given up again. Idempotent."""
        self._lock(run, run.tree.root, now)

    def take_back(self, run: ExplicitRun, now: float) -> list[int]:
        """End a run all of which is on the device: the holder has its pages again, in order, one reference each."""
        self._end(run, now)
        return [page for node in run.nodes() for page in self._tiers.take_back(node)]

    def drop(self, run: ExplicitRun, now: float) -> None:
        """End a run whose holder is gone: give up its pages."""
        self._end(run, now)
        for node in run.nodes():
            self._tiers.drop(node)

    def _end(self, run: ExplicitRun, now: float) -> None:
        self.hold(run, now)  # no candidate any more
        run.wait.detach()
        del self.runs[run]

    def _lock(self, run: ExplicitRun, node: Node, now: float) -> None:
        """Have the locks of the run end at `node`."""
        if node is not run.held:
            self._tiers.lock(node)
            self._tiers.unlock(run.held, now)
            run.held = node
