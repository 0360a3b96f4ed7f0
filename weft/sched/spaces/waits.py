"""`SpaceWaits`: the pages of spaces while their programs wait for something other than the device.

A program that waits needs its pages again, unchanged, and nothing can compute them. While there is room they stay as
they are. When pages run short, its space *lends* them: from then on they are as the KV of any sequence that waits,
given up from the end in the order of the policy, but to the host alone. The next command of the program waits until all
of them are back, and then runs on the device pages that they have got. Pages that others share are not lent.

What is lent counts as held, so all pages of spaces fit the device together and can come back once sequences give way.
They come back within the budgets of as many steps as it takes, one space at a time in the order of commands: the others
hold nothing meanwhile, so that spaces which are back in part cannot stop each other.

Owns which spaces wait and what they have lent. Called by `Spaces`, and by `Interception` when pages run short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.core.waits import WaitKind, check_wait
from weft.core.wire import ExpectSpace
from weft.sched.interception import Interception
from weft.sched.spaces.pool import MakeRoom, SpacePool
from weft.sched.spaces.resources import LENT, Lent, Space
from weft.sched.wait_log import PastWait


class SpaceWaits:
    """Lends the pages of spaces, and has them brought back."""

    def __init__(self, cache: KVCache, pool: SpacePool, interception: Interception, make_room: MakeRoom):
        """`make_room` has sequences give pages up for those that come back."""
        self._cache = cache
        self._pool = pool
        self._interception = interception
        self._make_room = make_room
        self._waiting: dict[Space, None] = {}
        """Spaces whose programs wait and that have lent nothing yet."""
        self._lent: Counter[str] = Counter()
        """Pages by tenant."""
        self.num_missing = 0
        """Pages that the first of the spaces that return lacks."""

    # While programs wait

    def expect(self, space: Space, command: ExpectSpace, now: float) -> None:
        """Note what a program waits for. Raises `InvalidRequest`."""
        check_wait(command.kind, command.expected_in_s)
        expected_s = None if command.expected_in_s is None else now + command.expected_in_s
        wait = space.wait
        if wait is None:
            wait = space.wait = Wait(space.number, space.tenant, command.kind, now, is_open=True)
            self._waiting[space] = None
        wait.kind, wait.expected_s = command.kind, expected_s
        if wait.end is not None:
            self._cache.tiers.wait_changed(wait.end)

    def begin_step(self, now: float) -> None:
        """Act at the moment of interception, as the policies do that are not lazy. None discards explicit pages."""
        for space in [space for space in self._waiting if not space.num_pending]:
            wait = space.wait
            if wait is not None and self._interception.policy.at_start(wait.kind) == "swap":
                self._lend(space, wait, now)
                if wait.end is not None:
                    self._cache.move_out(wait.end, now)

    def lend(self, now: float) -> bool:
        """Pages run short: lend those of all spaces whose programs wait. Whether there were any."""
        idle = [(space, space.wait) for space in self._waiting if not space.num_pending]
        has_lent = [self._lend(space, wait, now) for space, wait in idle if wait is not None]
        return any(has_lent)

    def held(self) -> Mapping[str, int]:
        """Pages by tenant that spaces hold and have not lent."""
        return self._pool.held - self._lent

    # Returns

    def returned(self, space: Space, now: float) -> None:
        """A command has come, which waits until what was lent is back. At once, where nothing has moved."""
        wait, space.wait = space.wait, None
        if wait is None:
            return
        self._waiting.pop(space, None)
        if space.num_pending:
            return  # it has not begun to wait
        num_missing = 0 if space.lent is None else space.lent.run.num_missing
        if space.pages:
            announced_s = math.nan if wait.expected_s is None else wait.expected_s - wait.since_s
            log = self._interception.waits
            log.past.append(PastWait(space.tenant, wait.kind, now - wait.since_s, announced_s))
            log.returned(wait.kind, "host" if num_missing else "kept")
        if num_missing:
            wait.kind, wait.since_s, wait.expected_s = WaitKind.QUEUE, now, None
            if wait.end is not None:
                self._cache.tiers.wait_changed(wait.end)
        elif space.lent is not None:
            self._take_back(space, space.lent, now)

    def bring(self, spaces: Iterable[Space], now: float) -> list[Space]:
        """Bring pages back of spaces that return, in this order, as far as room and the budget of the step being built
        go. Returns those that have theirs again: not before the step after the last copy, as a forward does not wait
        for the link."""
        back = []
        explicit = self._cache.explicit
        self.num_missing = 0
        for space in spaces:
            lent = space.lent
            if lent is None:
                continue
            if not lent.run.num_missing:
                self._take_back(space, lent, now)
                back.append(space)
            elif self.num_missing:
                explicit.release(lent.run, now)
            else:
                self._bring(lent, now)
                self.num_missing = lent.run.num_missing
        return back

    def release(self, now: float) -> bool:
        """A sequence cannot go on otherwise: let it have what has been brought back in part. Whether there was any."""
        held = [run for run in self._cache.explicit.runs if run.held is not run.tree.root]
        for run in held:
            self._cache.explicit.release(run, now)
        return bool(held)

    def is_stuck(self, space: Space) -> bool:
        """Whether it has lent pages that the host has no room for."""
        tiers = self._cache.tiers
        nodes = [] if space.lent is None or tiers.num_movable <= tiers.host_room else space.lent.run.nodes()
        return any(node.on_device and not node.copies for node in nodes)

    def close(self, space: Space, now: float) -> None:
        """The space is given up, with what it has lent."""
        self._waiting.pop(space, None)
        space.wait = None
        if space.lent is not None:
            count = len(space.lent.pages)
            self._cache.explicit.drop(space.lent.run, now)
            self._pool.forget(space.tenant, count)
            self._lent[space.tenant] -= count
            space.lent = None

    # Inside

    def _lend(self, space: Space, wait: Wait, now: float) -> bool:
        del self._waiting[space]
        pages = [page for page in space.pages.values() if not self._pool.is_shared(page.page)]
        if not pages or not self._cache.tiers.host.num_pages:
            return False
        run = self._cache.explicit.lend([page.page for page in pages], wait, self._pool.last_step, now)
        for page in pages:
            page.page = LENT
        space.lent = Lent(run, pages)
        self._lent[space.tenant] += len(pages)
        return True

    def _bring(self, lent: Lent, now: float) -> None:
        explicit = self._cache.explicit
        explicit.hold(lent.run, now)
        count = min(lent.run.num_missing, self._cache.tiers.copy_budget)
        if count > 0 and self._make_room(count, now):
            explicit.bring(lent.run, now)

    def _take_back(self, space: Space, lent: Lent, now: float) -> None:
        for page, number in zip(lent.pages, self._cache.explicit.take_back(lent.run, now), strict=True):
            page.page = number
        self._lent[space.tenant] -= len(lent.pages)
        space.lent = None
