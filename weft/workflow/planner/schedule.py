"""Cache-aware scheduling (Helium, algorithm 1), deterministic, on operators rather than calls.

The templated radix tree is gone through depth first, so that operators with a common prefix follow each other. Among
subtrees the one with the longest chain of work behind a schedulable operator comes first, then the one that can start
earliest, then the one that was made first. What is scheduled below a node whose prefix has a value of the row is one
group, which may run row by row. If nothing can start without waiting, the operator that can start earliest is forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.workflow.analysis.operators import Operator
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.planner.cost import topological
from weft.workflow.planner.groups import Costing, OperatorGroup


class _Pace(NamedTuple):
    """What an operator takes over all rows, in ticks."""

    total: int
    first: int
    last: int
    delay: int


def operator_groups(
    operators: Sequence[Operator], tree: PrefixTree, costing: Costing, rows: tuple[int, int]
) -> list[tuple[int, ...]]:
    """Groups of operators in the order in which they run on one engine with these rows, from and to (exclusive). None
    in a group depends on another in it."""
    return _Algorithm(operators, tree, costing, rows).run()


class _Node:
    """A node of the scheduling tree, which mirrors the prefix tree."""

    def __init__(self, has_value: bool):
        self.has_value = has_value
        self.children: list[_Node] = []
        self.leaves: list[int] = []
        self.below: list[int] = []
        """Operators of the subtree that are not scheduled."""


class _Algorithm:
    def __init__(self, operators: Sequence[Operator], tree: PrefixTree, costing: Costing, rows: tuple[int, int]):
        self._operators = operators
        self._paces = [
            _Pace(*costing.group(OperatorGroup((number,), rows)), costing.delay(number))
            for number in range(len(operators))
        ]
        self._tails = self._longest_chains()
        self._root = self._scheduling_tree(tree)
        self._clock = 0
        self._firsts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._groups: list[tuple[int, ...]] = []
        self._released: set[int] = set()
        """Operators of the groups."""
        self._buffer: list[int] = []

    def run(self) -> list[tuple[int, ...]]:
        while self._root.below:
            if not self._recurse(self._root, None, False):
                self._recurse(self._root, self._earliest(), False)
        return self._groups

    def _longest_chains(self) -> list[int]:
        """[operators] ticks from the start of an operator to the end of the longest chain that depends on it."""
        needs = [operator.needs for operator in self._operators]
        tails = [pace.last for pace in self._paces]
        for number in reversed(topological(needs)):
            for need in needs[number]:
                chain = self._paces[need].last + self._paces[need].delay + tails[number]
                tails[need] = max(tails[need], chain)
        return tails

    def _scheduling_tree(self, tree: PrefixTree) -> _Node:
        root = _Node(False)
        nodes = [_Node(node.placeholder is not None) for node in tree.nodes]
        for node, mirrored in zip(tree.nodes, nodes, strict=True):
            (root if node.parent is None else nodes[node.parent]).children.append(mirrored)
        for number, path in enumerate(tree.paths):
            (nodes[path[-1]] if path else root).leaves.append(number)
            for above in (root, *(nodes[step] for step in path)):
                above.below.append(number)
        return root

    def _recurse(self, node: _Node, forced: int | None, in_group: bool) -> bool:
        """Schedule what can start in this subtree, and `forced` first. Returns whether anything was scheduled."""
        moved = False
        opens = not in_group and (node.has_value or bool(node.leaves and not node.children))
        while node.below:
            best = self._select(node, forced)
            if best is None:
                break
            moved = True
            if isinstance(best, int):
                self._schedule(best)
                if not in_group and not opens:
                    self._release()
            else:
                self._recurse(best, forced, in_group or opens)
            node.below = [number for number in node.below if number not in self._ends]
            forced = None
        if opens:
            self._release()
        return moved

    def _select(self, node: _Node, forced: int | None) -> _Node | int | None:
        """The child or leaf to go on with."""
        best: tuple[int, int, int] | None = None
        chosen: _Node | int | None = None
        branches: list[_Node | int] = [*node.leaves, *node.children]
        for place, child in enumerate(branches):
            inside = [child] if isinstance(child, int) else child.below
            if forced is not None:
                if forced in inside:
                    return child
                continue
            ready = [number for number in inside if self._can_start(number)]
            if ready:
                key = (-max(self._tails[number] for number in ready), min(map(self._start, ready)), place)
                if best is None or key < best:
                    best, chosen = key, child
        return chosen

    def _can_start(self, number: int) -> bool:
        """Whether an operator waits for nothing: its engine never idles, and no group depends on itself."""
        if number in self._ends or not self._has_values(number):
            return False
        return self._start(number) <= self._clock

    def _has_values(self, number: int) -> bool:
        for need in self._operators[number].needs:  # noqa: SIM110 - a generator would take most of the time
            if need not in self._released:
                return False
        return True

    def _start(self, number: int) -> int:
        """The first tick from which an operator runs through all rows without waiting."""
        pace = self._paces[number]
        start = 0
        for need in self._operators[number].needs:
            delay = self._paces[need].delay
            start = max(start, self._firsts[need] + delay, self._ends[need] + delay + pace.last - pace.total)
        return start

    def _earliest(self) -> int:
        ready = [number for number in self._root.below if self._has_values(number)]
        return min(ready, key=lambda number: (self._start(number), -self._tails[number], number))

    def _schedule(self, number: int) -> None:
        pace = self._paces[number]
        start = max(self._clock, self._start(number))
        self._firsts[number] = start + pace.first
        self._clock = self._ends[number] = start + pace.total
        self._buffer.append(number)

    def _release(self) -> None:
        if self._buffer:
            self._groups.append(tuple(self._buffer))
            self._released.update(self._buffer)
            self._buffer = []
