"""Better orders by a fixed number of deterministic moves: no clock decides when to stop."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

from weft.workflow.planner.cost import ScheduleProblem

MAX_STEPS = 40_000
"""Groups timed in all, a bound that does not depend on the machine."""
LONGEST_RUN = 3
"""Groups that move together."""
SMALLEST_DISTURBED = 4
STRIDE = 7919
"""A prime, so that disturbances that follow each other are in different places."""
_Score = tuple[int, int]
"""Makespan, and the sum of all groups' ends by their calls, which tells apart orders of the same makespan. Were it the
plain sum, shorter parts of what is alike would come before longer ones."""
_Move = Callable[[tuple[int, ...]], tuple[int, ...]]


def improve(
    problem: ScheduleProblem,
    orders: Sequence[Sequence[int]],
    exchanges: Sequence[Mapping[int, int]] = (),
    max_steps: int = MAX_STEPS,
) -> tuple[int, ...]:
    """The best order that descents find within `max_steps`: from these orders, from lists by priority, and from the
    best order after it was disturbed; never worse than the best of them. `exchanges` are further moves: groups that
    take each other's places, such as those of two rows.

    Raises `ValueError` where an order precedes what a group needs.
    """
    search = _Search(problem, exchanges, max_steps)
    distinct = dict.fromkeys(tuple(order) for order in (*orders, *_lists(problem)))
    starts = sorted((search.score(order), number, order) for number, order in enumerate(distinct))
    best, _, order = starts[0]
    for score, _, start in starts:
        found, changed = search.descend(start, score, max_steps // (2 * len(starts)))
        if found < best:
            best, order = found, changed
    for number in range(max_steps if len(order) >= SMALLEST_DISTURBED else 0):
        if search.left <= 0:
            break
        disturbed = _disturbed(order, number)
        possible = search.score_within(disturbed)
        if possible is not None:
            found, changed = search.descend(disturbed, possible, search.left)
            if found < best:
                best, order = found, changed
    return order


class _Search:
    def __init__(self, problem: ScheduleProblem, exchanges: Sequence[Mapping[int, int]], max_steps: int):
        self._problem = problem
        self._exchanges: list[_Move] = [functools.partial(_exchange, other) for other in exchanges]
        self._num_calls = [group.num_calls for group in problem.groups]
        self.left = max_steps

    def score(self, order: tuple[int, ...]) -> _Score:
        timing = self._problem.timing(order)
        return timing.makespan, sum(map(operator.mul, timing.ends, self._num_calls))

    def descend(self, order: tuple[int, ...], score: _Score, steps: int) -> tuple[_Score, tuple[int, ...]]:
        """Take every move that helps, in a fixed succession, until none does or the steps are used up."""
        end = self.left - steps
        unhelpful = False
        while not unhelpful:
            unhelpful = True
            for move in itertools.chain(self._exchanges, _moves(len(order))):
                if self.left <= end:
                    return score, order
                changed = move(order)
                found = self._score(changed, score[0])
                if found is not None and found < score:
                    score, order, unhelpful = found, changed, False
        return score, order

    def score_within(self, order: tuple[int, ...]) -> _Score | None:
        """As `score`; None if the order is impossible."""
        return self._score(order, None)

    def _score(self, order: Sequence[int], most: int | None) -> _Score | None:
        """As `score`; None if the order is impossible or its makespan above `most`."""
        self.left -= len(order)
        groups, savings = self._problem.groups, self._problem.savings
        clocks = [0] * self._problem.num_engines
        before = [-1] * self._problem.num_engines
        firsts = [-1] * len(order)
        ends = [-1] * len(order)
        for group in order:
            usage, needs, engine, first, last, _ = groups[group]
            previous = before[engine]
            start = clocks[engine]
            end = 0
            for need, delay in needs:
                ready = firsts[need]
                if ready < 0:
                    return None
                ready += delay
                if ready > start:
                    start = ready
                if first is not None and ends[need] + delay + last > end:
                    end = ends[need] + delay + last
            busy = start + (usage if previous < 0 else usage - savings[previous][group])
            if busy > end:
                end = busy
            if most is not None and end > most:
                return None
            ends[group] = clocks[engine] = end
            firsts[group] = end if first is None or start + first > end else start + first
            before[engine] = group
        return max(clocks), sum(map(operator.mul, ends, self._num_calls))


def _moves(size: int) -> Iterator[_Move]:
    """A run of groups to another place, near ones first; two groups that change places."""
    for distance in range(1, size):
        for length in range(1, LONGEST_RUN + 1):
            for at in range(size - length + 1 - distance):
                yield functools.partial(_shift, at, length, at + distance)
                yield functools.partial(_shift, at + distance, length, at)
        for at in range(size - distance):
            yield functools.partial(_swap, at, at + distance)


def _shift(at: int, length: int, to: int, order: tuple[int, ...]) -> tuple[int, ...]:
    rest = order[:at] + order[at + length :]
    return rest[:to] + order[at : at + length] + rest[to:]


def _swap(at: int, to: int, order: tuple[int, ...]) -> tuple[int, ...]:
    return (*order[:at], order[to], *order[at + 1 : to], order[at], *order[to + 1 :])


def _exchange(other: Mapping[int, int], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(other.get(group, group) for group in order)


def _disturbed(order: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The order with two neighbouring runs exchanged: which, and how long, goes by `number` through all of them."""
    size = len(order)
    number, start = divmod(number * STRIDE, size - 2)
    first = 1 + number % (size - start - 1)
    second = 1 + number // 3 % (size - start - first)
    middle, end = start + first, start + first + second
    return order[:start] + order[middle:end] + order[start:middle] + order[end:]


def _lists(problem: ScheduleProblem) -> list[tuple[int, ...]]:
    """Orders made group by group from those that could start earliest: the longest chain of work first, or the largest
    saving."""
    usages = problem.least_usages()
    tails = problem.tails(usages)
    savings = problem.savings

    def by_chain(group: int, last: int | None) -> tuple[int, int]:
        return -tails[group], 0 if last is None else -savings[last][group]

    def by_saving(group: int, last: int | None) -> tuple[int, int]:
        return 0 if last is None else -savings[last][group], -tails[group]

    def by_end(group: int, last: int | None) -> tuple[int, int]:
        return usages[group] - tails[group], 0

    return [_list(problem, key) for key in (by_chain, by_saving, by_end)]


def _list(problem: ScheduleProblem, key: Callable[[int, int | None], tuple[int, int]]) -> tuple[int, ...]:
    groups = problem.groups
    needed = [{need for need, _ in group.needs} for group in groups]
    users: list[list[int]] = [[] for _ in groups]
    for number, needs in enumerate(needed):
        for need in needs:
            users[need].append(number)
    ends: dict[int, int] = {}
    clocks = [0] * problem.num_engines
    before: list[int | None] = [None] * problem.num_engines
    # Groups whose needs have their places, and when the last of these ends.
    ready = {number: 0 for number, needs in enumerate(needed) if not needs}
    while ready:
        start, _, number = min(
            (max(clocks[groups[number].engine], earliest), key(number, before[groups[number].engine]), number)
            for number, earliest in ready.items()
        )
        del ready[number]
        group = groups[number]
        last = before[group.engine]
        ends[number] = start + group.usage - (0 if last is None else problem.savings[last][number])
        clocks[group.engine], before[group.engine] = ends[number], number
        for user in users[number]:
            needed[user].discard(number)
            if not needed[user]:
                ready[user] = max(ends[need] + delay for need, delay in groups[user].needs)
    assert len(ends) == len(groups), "the needs of groups have a cycle"
    return tuple(ends)
