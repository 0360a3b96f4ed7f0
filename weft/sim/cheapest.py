"""What the waits of a simulation would waste if each were charged its cheapest choice, to compare waste with.

A wait is known in advance here. It is charged the least of preserving its KV, computing it again in chunks and, with a
host tier, moving it out and in (equations 2 to 4 of APIServe). Preserving is charged only while sequences wait for
pages, because the measured waste counts only then. No choice takes room away from another one. A recomputation is
charged whole, also where parts of it fall into other steps: no bound where these are most.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from weft.cache.runs import PageRuns
from weft.sched.policies.runs import Load
from weft.sched.policies.waste import RunSizes, recompute_waste, swap_waste, waste_preserve
from weft.sim.records import SessionRecord
from weft.sim.scripts import SessionScript, with_subagents

Intervals = Sequence[tuple[float, float]]
"""(begin, end) in seconds; ascending, and none overlaps another."""


def cheapest_waste(
    scripts: Iterable[SessionScript], records: Iterable[SessionRecord], pressed: Intervals, load: Load
) -> float:
    """Token-seconds. `pressed`: when sequences waited for pages. `load`: what ran meanwhile, on average."""
    by_number = {script.number: script for script in with_subagents(scripts)}
    covered = _Covered(pressed)
    contexts: list[int] = []
    waits_s: list[float] = []
    for record in records:
        lengths = by_number[record.number].contexts()
        for turn, after, length in zip(record.turns, record.turns[1:], lengths, strict=False):
            contexts.append(length - 1)  # the last token generated has no KV
            waits_s.append(covered.seconds(turn.end_s, after.due_s))
    if not contexts:
        return 0.0
    runs = _whole_contexts(np.array(contexts), load.page_size)
    sizes = RunSizes.of(runs, load)
    least = np.minimum(waste_preserve(np.array(waits_s), sizes.held), recompute_waste(sizes, load))
    if load.host_pages:
        least = np.minimum(least, swap_waste(runs, sizes, load))
    return float(least.sum())


class _Covered:
    """How much of a time lies in some intervals."""

    def __init__(self, intervals: Intervals):
        self._begins = [begin for begin, _ in intervals]
        self._ends = [end for _, end in intervals]
        self._before = [0.0, *accumulate(end - begin for begin, end in intervals)]

    def seconds(self, begin_s: float, end_s: float) -> float:
        """Of the time from `begin_s` to `end_s`."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, time_s: float) -> float:
        index = bisect.bisect_right(self._begins, time_s)
        if not index:
            return 0.0
        return self._before[index] - max(0.0, self._ends[index - 1] - time_s)


def _whole_contexts(contexts: np.ndarray, page_size: int) -> PageRuns:
    """Each context as one run without a copy on the host."""
    count = len(contexts)
    none, zeros = np.zeros(count, np.bool_), np.zeros(count)
    return PageRuns(
        since_s=zeros,
        expected_s=zeros,
        kind=np.zeros(count, np.int64),
        num_tokens=contexts,
        num_pages=-(-contexts // page_size),
        num_behind=np.zeros(count, np.int64),
        has_copy=none,
        over_share=none,
        weight=zeros,
        order=np.arange(count),
        tenant=np.zeros(count, np.int64),
        explicit=none,
    )
