"""What a cache recomputes that knows how long all waits of each kind take, but not how long a single one does.

Between the offline optimum, which knows every return, and a policy of an engine, which has to learn: an order by kind
and time waited alone, with the waits of the whole trace as the samples. It says how much of the gap between plain
prefix caching and the optimum such a policy can close on a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weft.core.step import F64
from weft.sim.bounds import CacheReplay, Replayed, TimedTurn, least_recently_used


def replay_by_kind(turns: Sequence[TimedTurn], num_pages: int, page_size: int) -> Replayed:
    """Replay a trace (`bounds.replay`), giving up first what has the least chance of a return, divided by the median
    time to it.

    Chance and median are those of the trace's waits of the same kind that lasted as long as the one in question.
    """
    return _ReplayByKind(turns, num_pages, page_size).run()


class _ReplayByKind(CacheReplay):
    def __init__(self, turns: Sequence[TimedTurn], num_pages: int, page_size: int):
        super().__init__(turns, num_pages, page_size, least_recently_used)
        self._kinds = sorted({turn.wait_kind for turn in turns})
        numbers = {kind: number for number, kind in enumerate(self._kinds)}
        self._kind = np.array([numbers[turn.wait_kind] for turn in turns])
        waits_s = np.array([turn.next_s - turn.end_s for turn in turns])
        self._waits_s = [np.sort(waits_s[self._kind == number]) for number in range(len(self._kinds))]
        """Of each kind, those that do not end as infinity."""

    def first_key(self) -> int | str:
        """The least chance per second; of equals, what was used first."""
        runs = list(self.idle.values())
        orders = np.array([run.order for run in runs])
        last_s = np.array([run.last_s for run in runs])
        values = np.full(len(runs), np.inf)  # a shared prompt is needed again soon
        kinds = np.where(orders % 2, -1, self._kind[orders // 2])
        for kind in np.unique(kinds[kinds >= 0]).tolist():
            rows = kinds == kind
            values[rows] = _chance_per_s(self._waits_s[kind], self.now_s - last_s[rows])
        return list(self.idle)[int(np.lexsort((last_s, values))[0])]


def _chance_per_s(waits_s: F64, waited_s: F64) -> F64:
    """[n] the part of the waits that lasted as long which ends, divided by the median of what was still to come."""
    first = np.searchsorted(waits_s, waited_s)
    lasted, ending = len(waits_s) - first, np.searchsorted(waits_s, math.inf) - first
    middle = waits_s[np.minimum(first + ending // 2, len(waits_s) - 1)] - waited_s
    return np.where(ending > 0, ending / np.maximum(lasted, 1) / np.maximum(middle, 1e-6), 0.0)
