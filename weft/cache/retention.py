"""`Retention`: KV that is to be kept although no sequence runs on it.

Owns who asked for what to be kept until when. A retain has a weight: its runs are given up after those without one, as
the policy values them. One of infinite weight is a *pin*: its part on the device is locked, until the scheduler breaks
the pin for a sequence that cannot go on otherwise; its part on the host goes for explicit pages alone. All retains
together may keep `max_pages` of the device; what several retains of a tenant share counts once, and what is on the host
counts too. Called by the scheduler.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from typing import Literal

from weft.cache.nodes import Node, Wait
from weft.cache.runs import PREFIX
from weft.cache.tiers import TieredPages
from weft.core.waits import WaitKind

RetainEnd = Literal[
    "released", "disconnected", "expired", "continued", "replaced", "broken", "displaced", "given_up", "reset"
]
"""Why a retain ended: by its client's command; the client is gone; its time was over; another sequence continued what
was held; the sequence was retained anew; a pin, for a sequence that could not go on otherwise; for the share of another
tenant; nothing was left of it; the index was emptied."""
HOLD_WEIGHT = 1.0
SWEEP = 64
"""Retains of which nothing is left are looked for when there are so many more than at the last time, or twice as
many."""


class RetainedRun:
    """One retain. `wait` marks the end of what it keeps; None while a sequence that it belongs to has its pages."""

    __slots__ = ("ended", "locked", "num_pages", "number", "tenant", "until_s", "wait", "weight")

    def __init__(self, number: int, tenant: str, weight: float, until_s: float, num_pages: int):
        self.number = number
        self.tenant = tenant
        self.weight = weight
        self.until_s = until_s
        self.num_pages = num_pages
        """What it was asked for with, what it shares with others included."""
        self.wait: Wait | None = None
        self.locked: Node | None = None
        """Of a pin: the last node of its part on the device."""
        self.ended = False

    @property
    def is_pin(self) -> bool:
        """Whether its part on the device stays there."""
        return self.weight == math.inf

    @property
    def num_left(self) -> int:
        """Pages up to where what it keeps ends, on the device and on the host; 0 while a sequence has them."""
        return 0 if self.wait is None or self.wait.end is None else self.wait.end.depth_pages

    def path(self) -> list[Node]:
        """The nodes on the device that it keeps, from the end."""
        node = None if self.wait is None else self.wait.end
        found = []
        while node is not None and node.parent is not None:
            if node.on_device:
                found.append(node)
            node = node.parent
        return found


class Retention:
    """All retains of a cache, by numbers of their own."""

    def __init__(self, tiers: TieredPages, max_pages: int):
        self._tiers = tiers
        self.max_pages = max_pages
        """Device pages that may be retained."""
        self._numbers = itertools.count(1)
        self._runs: dict[int, RetainedRun] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of (time, number)."""
        self._unmarked: Counter[str] = Counter()
        """Pages of retains without a wait, by tenant."""
        self._of_wait: dict[int, RetainedRun] = {}
        """The retains with a wait, by its number."""
        self.ended: Counter[RetainEnd] = Counter()
        """Retains that ended so."""
        self._num_pins = 0
        self._swept = 0
        """Retains there were after nothing was left of some."""

    @property
    def num_held(self) -> int:
        """How many sequences are held: given up by their programs, to be found again."""
        return sum(run.wait is not None and _is_held(run.wait) for run in self._runs.values())

    @property
    def num_pages(self) -> int:
        """Pages that retains keep, each counted once, on the device and on the host."""
        return sum(self._pages().values())

    @property
    def has_pins(self) -> bool:
        """Whether something is locked on the device by a pin."""
        return self._num_pins > 0 and any(run.locked is not None for run in self._runs.values())

    def add(self, end: Node, num_private: int, weight: float, until_s: float, now: float) -> RetainedRun | None:
        """Begin to retain what ends with `end` and has `num_private` pages behind it that are not indexed; `attach`
        follows once they are, or are given up.

        Where the retained share is used up, retains of tenants end first that have more than that of `end`. None when
        that is not enough.
        """
        self.expire(now)  # an engine without work ends none
        if not self._make_room(end, num_private, now):
            return None
        if len(self._runs) >= max(2 * self._swept, self._swept + SWEEP):
            self._sweep(now)
        run = RetainedRun(next(self._numbers), end.owner, weight, until_s, end.depth_pages + num_private)
        self._runs[run.number] = run
        self._unmarked[run.tenant] += run.num_pages
        self._num_pins += run.is_pin
        if until_s < math.inf:
            heapq.heappush(self._ends, (until_s, run.number))
        return run

    def attach(self, run: RetainedRun, wait: Wait) -> None:
        """What the retain keeps ends where `wait` points. Nothing, for a retain that has ended."""
        if run.ended:
            return
        run.wait = wait
        wait.weight = run.weight
        self._of_wait[wait.seq] = run
        self._unmarked[run.tenant] -= run.num_pages
        self._count(wait.end, 1)
        if wait.end is not None:
            self._tiers.wait_changed(wait.end)
        self.lock(run)

    def detach(self, run: RetainedRun, now: float) -> None:
        """A sequence has the pages again that its retain keeps."""
        self._unlock(run, now)
        if run.wait is not None and not run.ended:
            del self._of_wait[run.wait.seq]
            self._count(run.wait.end, -1)
            self._unmarked[run.tenant] += run.num_pages
        run.wait = None

    def retain_prefix(self, node: Node, weight: float, until_s: float, now: float) -> RetainedRun | None:
        """Retain an indexed prefix, which ends with `node`. None as `add`."""
        run = self.add(node, 0, weight, until_s, now)
        if run is not None:
            wait = prefix_wait(-run.number, node.owner, now)
            wait.attach(node)
            self.attach(run, wait)
        return run

    def lock(self, run: RetainedRun) -> None:
        """Lock what a pin has on the device, after more of it came there."""
        path = run.path() if run.is_pin else []
        if path and path[0] is not run.locked:
            self._tiers.lock(path[0])
            if run.locked is not None:
                self._tiers.unlock(run.locked, run.locked.last_used_s)
            run.locked = path[0]

    def lock_pins(self) -> None:
        """Lock what each pin has on the device, after pages came there."""
        if self._num_pins:
            for run in self._runs.values():
                self.lock(run)

    def end(self, run: RetainedRun, why: RetainEnd, now: float) -> None:
        """End a retain: what it keeps is as any other KV. Idempotent."""
        if run.ended:
            return
        run.ended = True
        is_lost = run.num_pages > 0 and run.wait is not None and run.wait.end is None
        self.ended["given_up" if is_lost else why] += 1
        del self._runs[run.number]
        self._num_pins -= run.is_pin
        self._unlock(run, now)
        wait = run.wait
        if wait is None:
            self._unmarked[run.tenant] -= run.num_pages
        else:
            wait.weight = 0.0
            del self._of_wait[wait.seq]
            self._count(wait.end, -1)
            if wait.kind == PREFIX:
                self._tiers.end_wait(wait)
            elif wait.end is not None:
                self._tiers.wait_changed(wait.end)

    def supersede(self, wait: Wait, now: float) -> None:
        """A sequence has continued what a wait stands for: the wait ends, and its hold."""
        run = self._of_wait.get(wait.seq)
        if run is not None:
            self.end(run, "continued", now)
        self._tiers.end_wait(wait)

    def end_all(self, now: float) -> None:
        """End every retain, pins too: nothing is kept for a later sequence."""
        for run in list(self._runs.values()):
            self.end(run, "reset", now)

    def expire(self, now: float) -> None:
        """End the retains whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            run = self._runs.get(heapq.heappop(self._ends)[1])
            if run is not None:
                self.end(run, "expired", now)

    def break_pin(self, missing: int, now: float) -> bool:
        """End one pin, because a sequence that cannot go on otherwise lacks `missing` pages. Whether there was one. Of
        those whose end frees as many, the one that frees fewest; if there is none, the one that frees most."""
        pins = [run for run in self._runs.values() if run.locked is not None]
        if not pins:
            return False
        self.end(min(pins, key=lambda run: _cost_of_break(run, missing)), "broken", now)
        return True

    def pinned(self) -> list[Node]:
        """The nodes that pins lock, for integrity checks."""
        return [run.locked for run in self._runs.values() if run.locked is not None]

    def ends(self) -> list[Node]:
        """The nodes that retains end at, for integrity checks."""
        return [run.wait.end for run in self._of_wait.values() if run.wait is not None and run.wait.end is not None]

    def _unlock(self, run: RetainedRun, now: float) -> None:
        if run.locked is not None:
            self._tiers.unlock(run.locked, now)
            run.locked = None

    def _sweep(self, now: float) -> None:
        for run in list(self._runs.values()):
            if run.wait is not None and run.wait.end is None:
                self.end(run, "given_up", now)
        self._swept = len(self._runs)
        self._ends = [entry for entry in self._ends if entry[1] in self._runs]
        heapq.heapify(self._ends)

    def _make_room(self, end: Node, num_private: int, now: float) -> bool:
        """Whether the tenant of `end` may retain so much more. Ends retains of the tenant with the most retained pages
        as long as it has more than that one would, those of the smallest weight first and of these the first to expire:
        so no tenant keeps another from a fair share."""
        tenant, num_new = end.owner, num_private
        node: Node | None = end
        while node is not None and not node.retains:
            num_new += node.num_pages
            node = node.parent
        order: list[tuple[float, float, int]] = []
        while True:
            pages = self._pages()
            if sum(pages.values()) + num_new <= self.max_pages:
                return True
            largest = max(pages, key=lambda other: (pages[other], other), default=tenant)
            if pages[largest] <= pages[tenant] + num_new:
                return False
            if not order or self._runs[order[-1][2]].tenant != largest:
                runs = (run for run in self._runs.values() if run.tenant == largest)
                order = sorted(((run.weight, run.until_s, run.number) for run in runs), reverse=True)
            self.end(self._runs[order.pop()[2]], "displaced", now)

    def _pages(self) -> Counter[str]:
        """Retained pages by tenant."""
        return self._tiers.retained_pages + self._unmarked

    def _count(self, node: Node | None, step: int) -> None:
        """One retain more or less ends at a node: count it there and above."""
        while node is not None:
            node.retains += step
            if node.retains == (step > 0):
                self._tiers.retained_pages[node.owner] += step * node.num_pages
            node = node.parent


def prefix_wait(number: int, tenant: str, now: float) -> Wait:
    """A mark at the end of a prefix that no sequence waits for. `number` is unique and negative."""
    return Wait(number, tenant, PREFIX, now, is_open=True)


def _is_held(wait: Wait) -> bool:
    return wait.kind == WaitKind.HOLD and wait.end is not None


def _cost_of_break(run: RetainedRun, missing: int) -> tuple[bool, int, float, int]:
    freed = 0
    node = run.locked
    while node is not None and node.locks == 1:
        freed += node.num_pages
        node = node.parent
    is_enough = freed >= missing
    return not is_enough, freed if is_enough else -freed, run.until_s, run.number
