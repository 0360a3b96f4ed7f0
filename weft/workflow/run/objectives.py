"""What the calls of a session are to be fast at, and how that is told to an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.core.objectives import LEAST_DEADLINE_S, MAX_DEADLINE_S
from weft.workflow.analysis.objectives import CallObjective, WantedCall, call_objectives
from weft.workflow.criteria import Criterion, is_stricter
from weft.workflow.graph.digest import free_references
from weft.workflow.graph.labels import outer_node
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, LlmNode, MapNode
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
    """Objectives of the outer nodes of a graph that grows. What is in the body of a node has that of the node."""

    def __init__(self, plan: BodyPlan):
        self._plan = plan
        self._wanted: dict[str, Criterion] = {}
        """Seconds of deadlines are times."""
        self._found: dict[str, CallObjective] = {}

    def of(self, label: str) -> CallObjective | None:
        """The objective of a node by its label; seconds of a deadline are a time."""
        return self._found.get(outer_node(label))

    def want(self, node: str, criterion: Criterion, now: float, settled: Collection[str]) -> bool:
        """A value is asked for at `now`, in seconds. Of several criteria for one value the strictest counts. Returns
        whether objectives may have changed."""
        due = None if criterion.seconds is None else now + criterion.seconds
        criterion = criterion._replace(seconds=due)
        known = self._wanted.get(node)
        if node in settled or (known is not None and not is_stricter(criterion, known)):
            return False
        self._wanted[node] = criterion
        self._wanted = {name: each for name, each in self._wanted.items() if name not in settled}
        self._deduce(now, settled)
        return True

    def _deduce(self, now: float, settled: Collection[str]) -> None:
        cone = self._cone(settled)
        numbers: dict[str, int] = {}
        made_from: dict[str, frozenset[int]] = {}
        calls: list[WantedCall] = []
        for node in cone:
            needs = frozenset[int]().union(*(made_from.get(need, frozenset()) for need in _needs(node)))
            if any(isinstance(inner, LlmNode) for inner in all_nodes((node,))):
                numbers[node.id] = len(calls)
                made_from[node.id] = frozenset([len(calls)])
                calls.append(WantedCall(tuple(sorted(needs)), isinstance(node, MapNode)))
            else:
                made_from[node.id] = needs
        wanted: dict[int, Criterion] = {}
        for name, criterion in self._wanted.items():
            left = None if criterion.seconds is None else max(criterion.seconds - now, 0.0)
            for number in made_from[name]:
                if number not in wanted or is_stricter(criterion._replace(seconds=left), wanted[number]):
                    wanted[number] = criterion._replace(seconds=left)
        found = call_objectives(calls, wanted)
        for name, number in numbers.items():
            objective = found[number]
            due = None if objective.seconds is None else objective.seconds + now
            self._found[name] = objective._replace(seconds=due)

    def _cone(self, settled: Collection[str]) -> list[AnyNode]:
        """What is wanted and all that it needs and is still to come, each after what it needs."""
        order: dict[str, None] = {}
        for name in self._wanted:
            pending = [(name, False)]
            while pending:
                name, is_ready = pending.pop()
                if name in order or name in settled or name not in self._plan.nodes:
                    continue
                if is_ready:
                    order[name] = None
                    continue
                pending.append((name, True))
                pending += [(need, False) for need in _needs(self._plan.nodes[name])]
        return [self._plan.nodes[name] for name in order]


def _needs(node: AnyNode) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reference.name for reference in free_references(node)))


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
