"""What a schedule of model calls costs: Helium's token steps (section 5), exactly, in whole numbers.

The unit of scheduling is a `CallGroup`: one call, or several that follow each other in a fixed order. A
`ScheduleProblem` has the groups, the engine of each, and what each saves behind each other one. An order is a
permutation of the groups in which each one follows what it needs; every engine takes its own groups in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple


class CallGroup(NamedTuple):
    """Calls that are scheduled as one. Times are in ticks, of which `ScheduleProblem.ticks` make a token step."""

    usage: int
    """Token usage of all calls, if the first shares nothing with the call before the group."""
    needs: tuple[tuple[int, int], ...] = ()
    """(group, precedence delay): its calls start at least so long after those that they depend on complete."""
    engine: int = 0
    first: int | None = None
    """Usage up to the completion of the first calls, of those of one row; None: of all calls."""
    last: int = 0
    """Usage of the last row's calls, which is what is left to do when the last results that are needed arrive."""
    num_calls: int = 1


class ScheduleTiming(NamedTuple):
    """When the groups of a schedule run, in ticks."""

    starts: tuple[int, ...]
    """[groups]"""
    ends: tuple[int, ...]
    """[groups]"""
    makespan: int


class ScheduleProblem:
    """Groups to be ordered so that the last call completes early."""

    def __init__(self, groups: Sequence[CallGroup], savings: Sequence[Sequence[int]], ticks: int, num_engines: int = 1):
        """`savings` [groups, groups]: by how many ticks the second takes less if it follows the first on its engine."""
        self.groups = tuple(groups)
        self.savings = savings
        self.ticks = ticks
        self.num_engines = num_engines

    def timing(self, order: Sequence[int]) -> ScheduleTiming:
        """Each group as early as its engine and what it needs allow.

        Raises `ValueError` if `order` is no permutation of the groups or one precedes what it needs.
        """
        if sorted(order) != list(range(len(self.groups))):
            raise ValueError("an order has each group once")
        clocks = [0] * self.num_engines
        before: list[int | None] = [None] * self.num_engines
        starts, firsts, ends = ([-1] * len(self.groups) for _ in range(3))
        for group in order:
            usage, needs, engine, first, last, _ = self.groups[group]
            previous = before[engine]
            if previous is not None:
                usage -= self.savings[previous][group]
            start = clocks[engine]
            for need, delay in needs:
                if ends[need] < 0:
                    raise ValueError(f"group {group} precedes {need}, which it needs")
                start = max(start, firsts[need] + delay)
            end = start + usage
            if first is not None:
                end = max([end, *(ends[need] + delay + last for need, delay in needs)])
            starts[group], ends[group] = start, end
            firsts[group] = end if first is None else min(end, start + first)
            clocks[engine], before[engine] = end, group
        return ScheduleTiming(tuple(starts), tuple(ends), max(clocks))

    def token_steps(self, order: Sequence[int]) -> float:
        """The makespan in token steps: the objective T of section 5."""
        return self.timing(order).makespan / self.ticks

    def least_usages(self) -> list[int]:
        """[groups] usage behind the group that saves most, the first place of its engine included."""
        best = [0] * len(self.groups)
        for previous, row in enumerate(self.savings):
            engine = self.groups[previous].engine
            for group, saved in enumerate(row):
                if saved > best[group] and group != previous and self.groups[group].engine == engine:
                    best[group] = saved
        return [group.usage - saved for group, saved in zip(self.groups, best, strict=True)]

    def dependents(self) -> list[list[tuple[int, int]]]:
        """[groups] (group that needs it, delay)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        for number, group in enumerate(self.groups):
            for need, delay in group.needs:
                found[need].append((number, delay))
        return found

    def tails(self, usages: Sequence[int]) -> list[int]:
        """[groups] from the completion of a group to the end of the longest chain that depends on it, in ticks."""
        dependents = self.dependents()
        tails = [0] * len(self.groups)
        for number in reversed(topological([[need for need, _ in group.needs] for group in self.groups])):
            following = (delay + self._pace(to, usages) + tails[to] for to, delay in dependents[number])
            tails[number] = max(following, default=0)
        return tails

    def _pace(self, group: int, usages: Sequence[int]) -> int:
        """What a group adds to a chain at least: of one of several rows, the last row's calls."""
        return usages[group] if self.groups[group].first is None else min(usages[group], self.groups[group].last)


class PlannedCall(NamedTuple):
    """One call of a model."""

    path: tuple[int, ...]
    """Its prompt: the nodes of a tree of segments, from the root on. Calls share the prompts' common nodes."""
    output_tokens: int
    """Expected."""
    needs: tuple[int, ...] = ()
    """The calls whose outputs it depends on."""


def call_problem(segment_tokens: Sequence[int], calls: Sequence[PlannedCall], kv_tokens: int) -> ScheduleProblem:
    """The problem of Helium's section 5 for one engine of `kv_tokens` KV tokens: with alpha = 1 / kv_tokens, usage is
    (out x prompt tokens not shared with the call before + out (out + 1) / 2) / kv_tokens, the delay out."""
    prompts = [sum(segment_tokens[segment] for segment in call.path) for call in calls]
    groups = [
        CallGroup(
            usage=call.output_tokens * prompt + decode_usage(call.output_tokens),
            needs=tuple((need, kv_tokens * calls[need].output_tokens) for need in call.needs),
        )
        for call, prompt in zip(calls, prompts, strict=True)
    ]
    savings = [
        [after.output_tokens * _shared_tokens(segment_tokens, call.path, after.path) for after in calls]
        for call in calls
    ]
    return ScheduleProblem(groups, savings, kv_tokens)


def decode_usage(output_tokens: int) -> int:
    """u_d of section 5: the tokens that each decoding step adds to the context, over all steps."""
    return output_tokens * (output_tokens + 1) // 2


def ticks_of(kv_tokens: Sequence[int]) -> int:
    """Ticks of a token step with which the usage on each of these engines is whole."""
    return math.lcm(*kv_tokens)


def topological(needs: Sequence[Iterable[int]]) -> list[int]:
    """Numbers after what they need. Raises `graphlib.CycleError` where something needs itself."""
    return list(TopologicalSorter(dict(enumerate(needs))).static_order())


def _shared_tokens(segment_tokens: Sequence[int], one: Sequence[int], other: Sequence[int]) -> int:
    tokens = 0
    for segment, same in zip(one, other, strict=False):
        if segment != same:
            break
        tokens += segment_tokens[segment]
    return tokens
