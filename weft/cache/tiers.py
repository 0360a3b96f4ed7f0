"""`TieredPages`: pages of both tiers, who holds them, and what is evicted when they run out.

Owns the pools, the locks on tree nodes, the order of eviction, and the copies that the step being built must carry.
Knows nodes, but not which tokens lead to them. Called by `weft.cache.manager` alone.

Eviction takes the tail of the lowest-ranked leaf first. With a host tier, evicted pages are demoted to it (a swap-out
in the step being built) as long as it has, or can make, room; otherwise they are forgotten. So on every path from the
root, device runs come before host runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from weft.cache.evict import EvictionPolicy, NodeView
from weft.cache.pages import PagePool
from weft.cache.radix import Node, Tier


class Copies(NamedTuple):
    """What a step must move before its forward. Pairs of page ids, source first."""

    swap_outs: list[tuple[int, int]]
    page_copies: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]


class TieredPages:
    """Device and host pages and the locks on the nodes that index them."""

    def __init__(
        self,
        num_device_pages: int,
        num_host_pages: int,
        policy: EvictionPolicy,
        split: Callable[[Node, int], Node],
        detach: Callable[[Node], None],
        idle_root: Callable[[Node], None],
    ):
        self.device = PagePool(num_device_pages)
        self.host = PagePool(num_host_pages)
        self.node_of: list[Node | None] = [None] * num_device_pages
        """The node that indexes a device page."""
        self.num_evictable = 0
        """Device pages of nodes without locks."""
        self.num_evicted = 0
        """Device pages evicted so far, demoted ones included."""
        self._policy = policy
        self._split = split
        self._detach = detach
        self._idle_root = idle_root
        self._candidates: dict[Tier, list[tuple[tuple[float, ...], int, Node]]] = {"device": [], "host": []}
        self._pushes = 0
        self._copies = Copies([], [], [])
        self._filled_from: dict[int, tuple[Tier, int]] = {}
        """Device pages that the step being built fills, and from where."""
        self._busy: dict[tuple[Tier, int], int] = {}
        """Pages that a step copies from or to, not to be handed out again before it is done."""
        self.launched = 0
        self.completed = 0

    # Steps

    @property
    def building(self) -> int:
        """The id of the step being built."""
        return self.launched + 1

    def take_copies(self) -> Copies:
        """The copies of the step being built, which is about to be launched."""
        copies, self._copies = self._copies, Copies([], [], [])
        self._filled_from.clear()
        return copies

    @property
    def has_copies(self) -> bool:
        """Whether the step being built has anything to copy."""
        return any(self._copies)

    def step_launched(self, step_id: int) -> None:
        """Step ids grow by one."""
        self.launched = step_id

    def step_completed(self, step_id: int) -> None:
        """All steps up to `step_id` are done on the device."""
        self.completed = step_id
        self.device.complete(step_id)
        self.host.complete(step_id)
        if self._busy:
            self._busy = {key: step for key, step in self._busy.items() if step > step_id}

    # Locks

    def lock(self, node: Node, count: int = 1) -> None:
        """Keep `node` and all above it from eviction."""
        current: Node | None = node
        while current is not None:
            if current.locks == 0 and current.tier == "device":
                self.num_evictable -= len(current.pages)
            current.locks += count
            current = current.parent

    def unlock(self, node: Node, now: float, count: int = 1) -> None:
        """Undo `lock`. What becomes free of locks may be evicted from now on."""
        current: Node | None = node
        while current is not None:
            current.locks -= count
            if current.locks < 0:
                raise ValueError(f"node {current.node_id} unlocked more often than it was locked")
            current.last_used_s = now
            if current.locks == 0:
                self.became_unlocked(current)
            current = current.parent

    def became_unlocked(self, node: Node) -> None:
        """`node` has just lost its last lock."""
        if node.parent is None:
            self._idle_root(node)
            return
        node.fence = max(node.fence, self.launched)
        if node.tier == "device":
            self.num_evictable += len(node.pages)
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Enter `node` among the candidates of its tier if it is an unlocked leaf there."""
        if node.locks or node.parent is None or not node.pages:
            return
        if node.device_children if node.tier == "device" else node.children:
            return
        self._pushes += 1
        heapq.heappush(self._candidates[node.tier], (self._rank(node), self._pushes, node))

    # Pages

    @property
    def num_available(self) -> int:
        """Device pages that `allocate` could hand out, fences aside."""
        return self.device.num_free + self.num_evictable

    def allocate(self, count: int) -> list[int] | None:
        """`count` device pages with one reference each, evicting as needed; None when there are not so many."""
        if self.device.num_free < count:
            if self.num_available < count:
                return None
            self._evict_device(count - self.device.num_free)
            if self.device.num_free < count:
                return None
        return self.device.allocate(count)

    def drop_ref(self, page: int, now: float) -> None:
        """Give up a direct reference on a device page."""
        node = self.node_of[page]
        self.device.drop(page, self._fence("device", page, self.launched))
        if node is not None:
            self.unlock(node, now)

    def share_ref(self, page: int) -> None:
        """Take a direct reference on a device page, indexed or not."""
        self.device.share((page,))
        node = self.node_of[page]
        if node is not None:
            self.lock(node)

    def copy_page(self, source: int, destination: int) -> None:
        """Have the step being built copy a device page, as it will be when that step begins.

        All copies of a step read before any of them is visible to another, so a page that the same step fills is
        replaced by what it is filled from.
        """
        origin = self._filled_from.get(source, ("device", source))
        self._fill(origin, destination)

    def copy_in(self, host_page: int, device_page: int) -> None:
        """Have the step being built copy a host page to the device."""
        self._fill(("host", host_page), device_page)

    def keep_readable(self, tier: Tier, page: int) -> None:
        """The step being built reads `page`, so the page is not handed out again before that step is done."""
        self._busy[tier, page] = self.building

    def _fill(self, origin: tuple[Tier, int], destination: int) -> None:
        copies = self._copies.page_copies if origin[0] == "device" else self._copies.swap_ins
        copies.append((origin[1], destination))
        self._filled_from[destination] = origin
        self.keep_readable(*origin)
        self.keep_readable("device", destination)

    def promote(self, node: Node) -> bool:
        """Bring a locked host node, whose parent is on the device, to the device. False when there is no room."""
        pages = self.allocate(len(node.pages))
        if pages is None:
            return False
        for host_page, page in zip(node.pages, pages, strict=True):
            self.copy_in(host_page, page)
            self.host.unindex(host_page, self.building)
            self.device.index(page)
            self.node_of[page] = node
        node.pages = pages
        node.tier = "device"
        node.fence = self.building
        if node.parent is not None:
            node.parent.device_children += 1
        return True

    def forget(self, node: Node) -> None:
        """Drop an unlocked subtree from the tier it is in."""
        for child in list(node.children.values()):
            self.forget(child)
        self._detach(node)
        if node.tier == "device":
            self.num_evictable -= len(node.pages)
            self.num_evicted += len(node.pages)
        self._unindex(node, 0)
        node.pages = []

    # Eviction

    def _evict_device(self, count: int) -> None:
        """Evict until `count` more pages are free, or nothing is left to evict."""
        target = self.device.num_free + count
        while self.device.num_free < target:
            node = self._pop("device")
            if node is None:
                return
            missing = target - self.device.num_free
            if self.host.num_pages and self._room_on_host(min(missing, len(node.pages))):
                if missing < len(node.pages):
                    self._split(node, len(node.pages) - missing)
                self._demote(node)
            else:
                self._cut(node, max(0, len(node.pages) - missing))

    def _demote(self, node: Node) -> None:
        parent = node.parent
        host_pages = self.host.allocate(len(node.pages))
        for page, host_page in zip(node.pages, host_pages, strict=True):
            self._copies.swap_outs.append((page, host_page))
            self._busy["host", host_page] = self.building
            self.node_of[page] = None
            # The swap-out is the first thing its step does, so the page may be written by that same step.
            self.device.unindex(page, self._fence("device", page, node.fence))
            self.host.index(host_page)
        self.num_evictable -= len(node.pages)
        self.num_evicted += len(node.pages)
        node.pages = host_pages
        node.tier = "host"
        self.offer(node)
        if parent is not None:
            parent.device_children -= 1
            self.offer(parent)

    def _cut(self, node: Node, keep: int) -> None:
        """Forget the pages of `node` past the first `keep`, and everything below."""
        for child in list(node.children.values()):
            self.forget(child)
        parent = node.parent
        if keep == 0:
            self.forget(node)
            if parent is not None:
                self.offer(parent)
            return
        removed = len(node.pages) - keep
        page_bytes = len(node.tokens) // len(node.pages)
        self._unindex(node, keep)
        node.tokens = node.tokens[: keep * page_bytes]
        del node.pages[keep:]
        node.depth_pages -= removed
        self.num_evictable -= removed
        self.num_evicted += removed
        self.offer(node)

    def _unindex(self, node: Node, start: int) -> None:
        for page in node.pages[start:]:
            if node.tier == "device":
                self.node_of[page] = None
                self.device.unindex(page, self._fence("device", page, node.fence))
            else:
                self.host.unindex(page, self._fence("host", page, node.fence))

    def _room_on_host(self, count: int) -> bool:
        while self.host.num_free < count:
            node = self._pop("host")
            if node is None:
                return False
            parent = node.parent
            self.forget(node)
            if parent is not None:
                self.offer(parent)
        return True

    def _pop(self, tier: Tier) -> Node | None:
        """The candidate with the lowest rank that is still one. A run that the step being built brings to the device
        cannot leave it by the same step."""
        heap = self._candidates[tier]
        arriving = []
        found = None
        while heap and found is None:
            rank, _, node = entry = heapq.heappop(heap)
            if node.locks or node.parent is None or node.tier != tier or not node.pages:
                continue
            if node.device_children if tier == "device" else node.children:
                continue
            if rank != self._rank(node):
                self.offer(node)
            elif tier == "device" and node.fence > self.launched:
                arriving.append(entry)
            else:
                found = node
        for entry in arriving:
            heapq.heappush(heap, entry)
        return found

    def _rank(self, node: Node) -> tuple[float, ...]:
        return self._policy.rank(
            NodeView(node.node_id, len(node.pages), node.depth_pages, node.last_used_s, node.expected_at_s)
        )

    def _fence(self, tier: Tier, page: int, fence: int) -> int:
        return max(fence, self._busy.get((tier, page), 0))
