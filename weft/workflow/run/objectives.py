"""What the calls of a session are to be fast at, and how that is told to an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from weft.core.objectives import LEAST_DEADLINE_S, MAX_DEADLINE_S
from weft.workflow.analysis.objectives import CallObjective, WantedCall, call_objectives
from weft.workflow.criteria import Criterion, is_stricter
from weft.workflow.graph.digest import free_references
from weft.workflow.graph.labels import outer_node
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import LlmNode, MapNode
from weft.workflow.run.frames import BodyPlan

PRIORITIES: Mapping[str, int] = {
    "latency": -10,
    "ttft": -10,
    "group": -5,
    "deadline": -5,
    "throughput": 10,
    "batch": 10,
}
"""The `priority` of requests; `group` is a task group's. Lower runs earlier; plain requests have 0."""


class SessionObjectives:
    """Objectives of the outer nodes of a graph that grows. What is in the body of a node has that of the node. They are
    deduced when one is asked for: many values may be wanted before."""

    def __init__(self, plan: BodyPlan, settled: Collection[str]):
        """`settled`: the nodes that have a value or have failed, by now."""
        self._plan = plan
        self._settled = settled
        self._wanted: dict[str, Criterion] = {}
        """Seconds of deadlines are times."""
        self._changed_s: float | None = None
        """When a value was wanted last; None: nothing is to be deduced."""
        self._found: dict[str, CallObjective] = {}
        self._facts: dict[str, _Facts] = {}
        """By node; no node changes."""

    def of(self, label: str) -> CallObjective | None:
        """The objective of a node by its label; seconds of a deadline are a time."""
        if self._changed_s is not None:
            now, self._changed_s = self._changed_s, None
            self._deduce(now)
        return self._found.get(outer_node(label))

    def want(self, node: str, criterion: Criterion, now: float) -> bool:
        """A value is asked for at `now`, in seconds. Of several criteria for one value the strictest counts. Returns
        whether objectives may have changed."""
        due = None if criterion.seconds is None else now + criterion.seconds
        criterion = criterion._replace(seconds=due)
        known = self._wanted.get(node)
        if node in self._settled or (known is not None and not is_stricter(criterion, known)):
            return False
        self._wanted[node] = criterion
        self._changed_s = now
        return True

    def _deduce(self, now: float) -> None:
        self._wanted = {name: each for name, each in self._wanted.items() if name not in self._settled}
        numbers: dict[str, int] = {}
        made_from: dict[str, frozenset[int]] = {}
        calls: list[WantedCall] = []
        for name in self._cone():
            facts = self._facts_of(name)
            needs = frozenset[int]().union(*(made_from.get(need, frozenset()) for need in facts.needs))
            if facts.has_call:
                numbers[name] = len(calls)
                made_from[name] = frozenset([len(calls)])
                calls.append(WantedCall(tuple(sorted(needs)), isinstance(self._plan.nodes[name], MapNode)))
            else:
                made_from[name] = needs
        wanted: dict[int, Criterion] = {}
        for name, criterion in self._wanted.items():
            left = None if criterion.seconds is None else max(criterion.seconds - now, 0.0)
            for number in made_from[name]:
                if number not in wanted or is_stricter(criterion._replace(seconds=left), wanted[number]):
                    wanted[number] = criterion._replace(seconds=left)
        found = call_objectives(calls, wanted)
        self._found = {}
        for name, number in numbers.items():
            objective = found[number]
            due = None if objective.seconds is None else objective.seconds + now
            self._found[name] = objective._replace(seconds=due)

    def _cone(self) -> Iterable[str]:
        """What is wanted and all that it needs and is still to come, each after what it needs."""
        order: dict[str, None] = {}
        for name in self._wanted:
            pending = [(name, False)]
            while pending:
                name, is_ready = pending.pop()
                if name in order or name in self._settled or name not in self._plan.nodes:
                    continue
                if is_ready:
                    order[name] = None
                    continue
                pending.append((name, True))
                pending += [(need, False) for need in self._facts_of(name).needs]
        return order

    def _facts_of(self, name: str) -> _Facts:
        known = self._facts.get(name)
        if known is None:
            node = self._plan.nodes[name]
            needs = tuple(dict.fromkeys(reference.name for reference in free_references(node)))
            known = self._facts[name] = _Facts(needs, any(isinstance(each, LlmNode) for each in all_nodes((node,))))
        return known


class _Facts(NamedTuple):
    """What of a node matters here."""

    needs: tuple[str, ...]
    has_call: bool
    """Of a model, its body included."""


def urgency(objective: CallObjective | None) -> int:
    """What calls of a session are sorted by: smaller leaves earlier."""
    if objective is None:
        return 0
    return PRIORITIES["group" if objective.group is not None else objective.name]


def hints_of(objective: CallObjective | None, now: float) -> dict[str, Any]:
    """Fields of a request that tell the objective; seconds of a deadline are a time. `priority` orders the calls of a
    session among requests of the same objective."""
    if objective is None:
        return {}
    return {"priority": urgency(objective), **objective_fields(objective, now)}


def objective_fields(objective: CallObjective, now: float) -> dict[str, Any]:
    """As `hints_of`, without `priority`."""
    fields: dict[str, Any] = {"objective": objective.name}
    if objective.seconds is not None:
        fields["deadline_s"] = min(max(objective.seconds - now, LEAST_DEADLINE_S), MAX_DEADLINE_S)
    return fields
