"""`TieredPages`: pages of both tiers, who holds them, and which are given up when they run out.

Owns the pools, the locks on tree nodes, and the copies that the step being built must carry. Knows nodes, but not which
tokens lead to them. Called by `weft.cache` alone.

A run of pages is given up from its end, in the order of `Candidates`. If the host has a copy of it, nothing moves. If
not, and the host has or can make room, the run is copied there (a *swap-out* in the step being built) as far as the
step's budget of copies goes. Beyond that it is ranked again, as one that would be forgotten. So on every path from the
root, runs on the device come before runs that only the host has; what is forgotten takes those behind it with it. A
host copy stays valid when its run comes back to the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from weft.cache.candidates import Candidates
from weft.cache.copies import StepCopies
from weft.cache.given_up import PER_PAGE, GivenUpPrefixes
from weft.cache.nodes import Node, Wait, children_first, move_waits, run_before
from weft.cache.pages import PagePool
from weft.cache.radix import join_child
from weft.cache.run_uses import Observe, RunUses
from weft.cache.runs import Ranker
from weft.cache.shares import FairShares

UNLIMITED = 1 << 60
"""A budget of copies that no step uses up."""


class TieredPages:
    """Device and host pages and the locks on the nodes that index them."""

    def __init__(
        self,
        num_device_pages: int,
        num_host_pages: int,
        page_size: int,
        rank: Ranker,
        split: Callable[[Node, int], Node],
        detach: Callable[[Node], None],
        idle_root: Callable[[Node], None],
    ):
        self.device = PagePool(num_device_pages)
        self.host = PagePool(num_host_pages)
        self.node_of: list[Node | None] = [None] * num_device_pages
        """The node that indexes a device page."""
        self.indexed_pages: Counter[str] = Counter()
        """Device pages in the prefix index by tenant, in use or not; what sequences share counts once."""
        self.retained_pages: Counter[str] = Counter()
        """Pages that are retained, in either tier, by tenant; what several retains share counts once."""
        self.num_evictable = 0
        """Device pages of nodes without locks, but for those of `num_movable`."""
        self.num_movable = 0
        """Of explicit nodes without locks, the device pages that have no host copy: they take as many of the host."""
        self.movable_pages: Counter[str] = Counter()
        """Those by tenant."""
        self.num_kept = 0
        """Host pages of explicit nodes: nothing else gets them."""
        self.evictable_pages: Counter[str] = Counter()
        """Pages of `num_evictable` by tenant."""
        self.num_evicted = 0
        """Device pages evicted so far, demoted ones included."""
        self.uses = RunUses()
        """What is told of runs that are found, or go."""
        self.given_up = GivenUpPrefixes(page_size, PER_PAGE * (num_device_pages + num_host_pages))
        """What the index had and neither tier has any more."""
        self.candidates = Candidates(rank, page_size, num_device_pages)
        """Runs on the device that can be given up."""
        self.host_candidates = Candidates(rank, page_size, num_host_pages)
        """Runs that only the host has."""
        self._spare_copies: dict[int, Node] = {}
        """Nodes on the device that have a host copy too, by number, the oldest first."""
        self.copy_budget = UNLIMITED
        """Pages that the step being built may still move between the tiers."""
        self.num_reshaped = 0
        """Grows when a node is cut, joined with another or forgotten: a `Match` from before may name it."""
        self._split = split
        self._detach = detach
        self._idle_root = idle_root
        self.copies = StepCopies()

    # Steps

    def begin_step(self, copy_budget: int) -> None:
        """A step is being built, which may move `copy_budget` pages between the tiers."""
        self.copy_budget = copy_budget
        self.candidates.begin()
        self.host_candidates.begin()

    def step_completed(self, step_id: int) -> None:
        """All steps up to `step_id` are done on the device."""
        self.copies.completed_steps(step_id)
        self.device.complete(step_id)
        self.host.complete(step_id)

    # Locks

    def lock(self, node: Node, count: int = 1) -> None:
        """Keep `node` and all above it from eviction."""
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                if current.on_device:
                    self._count_unlocked(current, -current.num_pages)
                    self.candidates.discard(current)
                else:
                    self.host_candidates.discard(current)
            current.locks += count
            current = current.parent

    def unlock(self, node: Node, now: float, fence: int | None = None) -> None:
        """Undo `lock`. What becomes free of locks may be given up once step `fence` is done, by default the last one
        that was launched."""
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks < 0:
                raise ValueError(f"node {current.node_id} unlocked more often than it was locked")
            current.last_used_s = now
            if current.locks == 0:
                self.became_unlocked(current, self.copies.launched if fence is None else fence)
            current = current.parent

    def became_unlocked(self, node: Node, fence: int) -> None:
        """`node` has just lost its last lock, and step `fence` is the last that may name its pages."""
        if node.parent is None:
            self._idle_root(node)
            return
        node.fence = max(node.fence, fence)
        if node.on_device:
            self._count_unlocked(node, node.num_pages)
        self.offer(node)

    def _count_unlocked(self, node: Node, num_pages: int) -> None:
        if node.is_explicit and not node.copies:
            self.num_movable += num_pages
            self.movable_pages[node.owner] += num_pages
        else:
            self.num_evictable += num_pages
            self.evictable_pages[node.owner] += num_pages

    def offer(self, node: Node) -> None:
        """Enter `node` among the candidates of its tier if it is an unlocked leaf there; otherwise it is none. The host
        gives explicit nodes up to nothing."""
        if node.parent is None or (node.is_explicit and not node.on_device):
            return
        candidates = self.candidates if node.on_device else self.host_candidates
        if node.locks or (node.device_children if node.on_device else node.children):
            candidates.discard(node)
        else:
            candidates.add(node)

    def rank_by(self, rank: Ranker, num_private: Callable[[], Mapping[str, int]], observe: Observe) -> None:
        """Give runs up in another order from now on. `num_private` says how many device pages outside of the prefix
        index the sequences of each tenant have. `observe` is told for how long runs were unused."""
        self.candidates.rank = self.host_candidates.rank = rank
        self.uses.observe = observe

        def held() -> dict[str, int]:
            pages = dict(num_private())
            for tenant, indexed in self.indexed_pages.items():
                pages[tenant] = pages.get(tenant, 0) + indexed
            return pages

        self.shares.count_held = held

    # Shares of tenants

    @property
    def shares(self) -> FairShares:
        """What tenants hold of the device."""
        return self.candidates.shares

    def num_kept_for_shares(self, now: float, but: str | None = None) -> int:
        """Evictable device pages that are kept for the shares of tenants, but for tenant `but`. An estimate, which is
        right once `allocate` has found that no others are left."""
        return self.candidates.num_kept(self.evictable_pages + self.movable_pages, now, but)

    def excess_in_use(self, tenant: str) -> float:
        """Device pages beyond its share that a tenant holds and that cannot be evicted; negative: there are none."""
        return self.shares.excess(tenant) - self.evictable_pages[tenant]

    def end_wait(self, wait: Wait) -> None:
        """What the wait stands for waits no longer."""
        end = wait.end
        wait.detach()
        if end is not None:
            self.wait_changed(end)

    def wait_changed(self, end: Node) -> None:
        """A wait at the end of `end` has changed, begun or ended: those who rank runs by it see it."""
        self.offer(end)
        node: Node | None = end
        while node is not None and not node.on_device:
            node = node.parent
        if node is not None and node is not end:
            self.offer(node)

    # Pages

    @property
    def num_available(self) -> int:
        """Device pages that `allocate` could hand out, fences aside."""
        return self.device.num_free + self.num_evictable + min(self.num_movable, self.host_room)

    @property
    def num_awaited(self) -> int:
        """Device pages without locks up to the ends of runs for which something waits that does not wait for the
        device; pages that several of these runs share count once."""
        return self.candidates.awaited_pages(self.num_evictable + self.num_movable)

    @property
    def host_room(self) -> int:
        """Host pages that explicit nodes can get."""
        return self.host.num_pages - self.num_kept

    def allocate(self, count: int, now: float, *, spares_kept: bool = False) -> list[int] | None:
        """`count` device pages with one reference each, given up by others as needed; None when there are not so
        many, or, with `spares_kept`, only with those that are kept for the shares of tenants."""
        if self.device.num_free < count:
            if self.num_available < count:
                return None
            self._give_up_device(count, now, spares_kept=spares_kept)
            if self.device.num_free < count:
                return None
        return self.device.allocate(count)

    def free_ahead(self, count: int, now: float) -> None:
        """Have `count` device pages free, as far as `allocate` could: those who ask for one page after the other find
        them. Nothing that is kept for the shares of tenants goes."""
        if self.device.num_free < count <= self.num_available:
            self._give_up_device(count, now, spares_kept=True)

    def drop_ref(self, page: int, now: float, fence: int | None = None) -> None:
        """Give up a direct reference on a device page. Step `fence` is the last that may name it, by default the last
        one launched."""
        node = self.node_of[page]
        self.device.drop(page, self.copies.fence("device", page, self.copies.launched if fence is None else fence))
        if node is not None:
            self.unlock(node, now, fence)

    def share_ref(self, page: int) -> None:
        """Take a direct reference on a device page, indexed or not."""
        self.device.share((page,))
        node = self.node_of[page]
        if node is not None:
            self.lock(node)

    def promote(self, node: Node, now: float, *, spares_kept: bool = False) -> bool:
        """Bring a locked node that only the host has, and whose parent is on the device, to the device. False when
        there is no room, as `allocate` has it."""
        pages = self.allocate(node.num_pages, now, spares_kept=spares_kept)
        if pages is None:
            return False
        for host_page, page in zip(node.copies, pages, strict=True):
            self.copies.copy_in(host_page, page)
        self.copy_budget -= node.num_pages
        self.put_on_device(node, pages)
        node.fence = self.copies.building
        return True

    def put_on_device(self, node: Node, pages: list[int]) -> None:
        """A locked node that only the host has gets device pages with one reference each, whose KV is that of its
        tokens."""
        self.indexed_pages[node.owner] += len(pages)
        for page in pages:
            self.device.index(page)
            self.node_of[page] = node
        node.pages = pages
        node.on_device = True
        if not node.is_explicit:
            self._spare_copies[node.node_id] = node
        if node.parent is not None:
            node.parent.device_children += 1
            self.offer(node.parent)

    def copy_out(self, node: Node) -> bool:
        """Have the step being built copy a node on the device to the host. False when it cannot: too few host pages
        are free (no other copy goes for one made ahead), or the step fills the node itself."""
        if node.fence > self.copies.launched or self.host.num_free < node.num_pages:
            return False
        self._copy_out(node)
        if not node.is_explicit:
            self._spare_copies[node.node_id] = node
        self.candidates.got_copy(node)
        return True

    def demote(self, node: Node, now: float) -> bool:
        """Move an unlocked leaf of the device to the host now. False when that cannot be: there is no room, or the step
        being built fills it."""
        if node.fence > self.copies.launched:
            return False
        if not node.copies and not self._room_on_host(node.num_pages, now):
            return False
        self._demote(node)
        return True

    def forget(self, node: Node, *, is_replaced: bool = False) -> None:
        """Drop an unlocked subtree from both tiers. What is replaced, by pages with the same tokens and more, is not
        given up."""
        for one in children_first(node):
            self._forget_leaf(one, is_replaced=is_replaced)

    def _forget_leaf(self, node: Node, *, is_replaced: bool = False) -> None:
        parent = node.parent
        assert parent is not None, "a root is not forgotten"
        self.num_reshaped += 1
        move_waits(node, parent)
        if not is_replaced:
            self.given_up.add(node, 0)
        if node.on_device:
            self.candidates.discard(node)
            self._count_evictable(node, -node.num_pages)
            self.num_evicted += 0 if is_replaced else node.num_pages
        else:
            self.host_candidates.discard(node)
        if node.retains:
            self.retained_pages[node.owner] -= node.num_pages
        self._detach(node)
        self._drop_device(node, 0)
        self._drop_copies(node, 0)

    def take_back(self, node: Node) -> list[int]:
        """The pages of a locked explicit node on the device are its holder's again, with one reference each. Its host
        copies end, since the pages may be written."""
        for page in node.pages:
            self.node_of[page] = None
            self.device.unindex_held(page)
        self.indexed_pages[node.owner] -= len(node.pages)
        pages, node.pages = node.pages, []
        self._drop_copies(node, 0)
        return pages

    def drop(self, node: Node) -> None:
        """Give up both tiers' pages of an explicit node, which is locked where it is on the device."""
        self._drop_device(node, 0)
        self._drop_copies(node, 0)

    def _lose(self, node: Node) -> None:
        """Forget a subtree to make room, and count its pages."""
        for one in children_first(node):
            self.uses.moved(one, one.num_pages, "nowhere")
            self._forget_leaf(one)

    def was_split(self, head: Node, node: Node) -> None:
        """`head` now has the first pages that `node` had."""
        self.num_reshaped += 1
        if head.on_device:
            for page in head.pages:
                self.node_of[page] = head
        if node.node_id in self._spare_copies:
            self._spare_copies[head.node_id] = head
        self.offer(head)
        self.offer(node)

    # Giving up

    def _give_up_device(self, count: int, now: float, *, spares_kept: bool) -> None:
        """Give up runs until `count` pages are free, or there are none left, but for those that are kept."""
        while self.device.num_free < count:
            node = self.candidates.first(now)
            if node is None:
                return
            place = self.candidates.first_place
            if place.is_kept and spares_kept:
                return
            if node.fence > self.copies.completed:
                # Its pages would not be free before a step in flight is done, or the one being built that brings them.
                self.candidates.skip(node)
                continue
            wanted = min(count - self.device.num_free, node.num_pages)
            before = run_before(node)
            num_moved = 0
            if node.copies and (place.moves or node.is_explicit):
                num_moved = wanted
            elif place.moves or node.is_explicit:
                num_moved = min(wanted, self.copy_budget, self.host_room)
            rest: Node | None = None
            if num_moved > 0 and (node.copies or self._room_on_host(num_moved, now, breaks_pins=node.is_explicit)):
                rest = self._split(node, node.num_pages - num_moved) if num_moved < node.num_pages else before
                self._demote(node)
            elif node.is_explicit:
                self.candidates.skip(node)
            elif place.moves:
                self.candidates.cannot_move(node)
            else:
                self.uses.moved(node, wanted, "nowhere")
                rest = node if wanted < node.num_pages else before
                self._cut(node, node.num_pages - wanted, now)
            if rest is not None and rest.row >= 0:
                self.candidates.keep_place(rest, place if rest is not before else place._replace(forgotten=math.nan))

    def _count_evictable(self, node: Node, num_pages: int) -> None:
        self.num_evictable += num_pages
        self.evictable_pages[node.owner] += num_pages

    def _copy_out(self, node: Node) -> None:
        """Copy an unlocked node to free host pages."""
        node.copies = self.host.allocate(node.num_pages)
        if node.is_explicit:
            self.num_movable -= node.num_pages
            self.movable_pages[node.owner] -= node.num_pages
            self._count_evictable(node, node.num_pages)
            self.num_kept += node.num_pages
        for page, host_page in zip(node.pages, node.copies, strict=True):
            self.copies.copy_out(page, host_page)
            self.host.index(host_page)
        self.copy_budget -= node.num_pages

    def _demote(self, node: Node) -> None:
        """Give up the device pages of an unlocked leaf whose KV the host has or gets."""
        parent = node.parent
        self.uses.moved(node, node.num_pages, "host")
        self.candidates.discard(node)
        if not node.copies:
            # The swap-out is the first thing its step does, so the pages may be written by that same step.
            self._copy_out(node)
        self._spare_copies.pop(node.node_id, None)
        self._drop_device(node, 0)
        self._count_evictable(node, -node.num_pages)
        self.num_evicted += node.num_pages
        node.on_device = False
        if join_child(node):
            self.num_reshaped += 1
        else:
            self.offer(node)
        if parent is not None:
            parent.device_children -= 1
            self.offer(parent)

    def _cut(self, node: Node, keep: int, now: float) -> None:
        """Forget the pages of `node` past the first `keep`, and everything below."""
        for child in list(node.children.values()):
            self._lose(child)
        parent = node.parent
        self.uses.gave_up(node, keep, now)
        if keep == 0:
            self.forget(node)
            if parent is not None:
                self.offer(parent)
            return
        removed = node.num_pages - keep
        if node.retains:
            self.retained_pages[node.owner] -= removed
        self.given_up.add(node, keep)
        self._drop_device(node, keep)
        self._drop_copies(node, keep)
        node.tokens = node.tokens[: keep * len(node.key)]
        node.page_numbers = None if node.page_numbers is None else node.page_numbers[:keep]
        node.num_pages = keep
        node.depth_pages -= removed
        self._count_evictable(node, -removed)
        self.num_evicted += removed
        self.offer(node)

    def _drop_device(self, node: Node, keep: int) -> None:
        self.indexed_pages[node.owner] -= len(node.pages) - keep if node.pages else 0
        for page in node.pages[keep:]:
            self.node_of[page] = None
            self.device.unindex(page, self.copies.fence("device", page, node.fence))
        del node.pages[keep:]

    def _drop_copies(self, node: Node, keep: int) -> None:
        for page in node.copies[keep:]:
            self.host.unindex(page, self.copies.fence("host", page, 0))
        self.num_kept -= len(node.copies) - keep if node.is_explicit and node.copies else 0
        del node.copies[keep:]
        if not keep:
            self._spare_copies.pop(node.node_id, None)

    def _room_on_host(self, count: int, now: float, *, breaks_pins: bool = False) -> bool:
        """Whether the host has, or gets by forgetting, `count` free pages: first what is not worth a copy any more.
        Then the first in the order of what only the host has, or the oldest second copy of what is on the device,
        whichever was used longer ago: without its copy, what is given up next on the device would have to be copied
        again, or be forgotten where the link is slow.

        The part of a pin on the host stays there, unless `breaks_pins`: for explicit pages, which can go nowhere else,
        all of `host_room` counts as available."""
        if count > self.host_room:
            return False
        while self.host.num_free < count:
            wanted = count - self.host.num_free
            node = self.host_candidates.first(now)
            spare = next((node for node in self._spare_copies.values() if not self._is_moving(node)), None)
            if spare is not None and not self._goes_before(node, spare):
                if wanted < spare.num_pages:
                    spare = self._split(spare, wanted)  # the end of a run is what goes first the next time
                self._drop_copies(spare, 0)
                if spare.row >= 0:
                    self.offer(spare)
                continue
            if node is None:
                return False
            if self._is_moving(node) or (_weight(node) == math.inf and not breaks_pins):
                self.host_candidates.skip(node)
                continue
            keep = max(node.num_pages - wanted, 0)
            place = self.host_candidates.first_place
            rest = self._split(node, keep) if keep else run_before(node)
            parent = node.parent
            self.uses.gave_up(node, keep, now)
            self._lose(node)
            if parent is not None:
                self.offer(parent)
                if parent is rest and not parent.on_device and parent.row >= 0:
                    self.host_candidates.keep_place(parent, place)
        return True

    def _goes_before(self, node: Node | None, spare: Node) -> bool:
        """Whether `node`, the first of what only the host has, goes before the second copy of `spare`. What is retained
        does not: without a second copy nothing is lost."""
        if node is None or self._is_moving(node) or _weight(node):
            return False
        return node.last_used_s < spare.last_used_s or not self.host_candidates.first_place.moves

    def _is_moving(self, node: Node) -> bool:
        """Whether a step that is not done copies the node to or from the host."""
        return self.copies.uses("host", node.copies[0])


def _weight(leaf: Node) -> float:
    """The greatest weight of the retains that end at a leaf; 0: there are none."""
    return max([wait.weight for wait in leaf.waits.values()], default=0.0)
