"""The order in which calls of models leave: what it follows from, and the one without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from weft.workflow.graph.labels import label_prefix
from weft.workflow.graph.nodes import AnyNode, WorkflowGraph
from weft.workflow.run.calls import CallAdvice


class CallSite(NamedTuple):
    """Where in a run a call stands."""

    row: int
    label: str
    """Of the node (`weft.workflow.graph.labels`)."""
    rounds: tuple[int, ...] = ()
    """Of the loops around it, the outermost first, from 0."""
    items: tuple[int, ...] = ()
    """Of the maps around it, the outermost first, from 0."""


Order = Callable[[CallSite], tuple[Any, ...]]
"""What calls are sorted by. Among equal ones rounds come in order, then items."""


class CallHints(NamedTuple):
    """What is told of a call beside its body."""

    fields: Mapping[str, Any] = {}
    """Fields of its request that say when and where it is to run."""
    advice: CallAdvice = CallAdvice()


Hints = Callable[[CallSite], CallHints]


class NodePlaces:
    """Where nodes stand in a graph, by label: the number of a node, after those of the nodes whose bodies it is in."""

    def __init__(self, nodes: Iterable[AnyNode]):
        self._places: dict[str, tuple[int, ...]] = {}
        self._count = 0
        for node in nodes:
            self.add(node)

    def __getitem__(self, label: str) -> tuple[int, ...]:
        return self._places[label]

    def add(self, node: AnyNode) -> None:
        """Append a node of the graph."""
        self._note(node, "", (self._count,))
        self._count += 1

    def _note(self, node: AnyNode, prefix: str, place: tuple[int, ...]) -> None:
        label = prefix + node.id
        self._places[label] = place
        for at, body in node.bodies.items():
            for number, inner in enumerate(body.nodes):
                self._note(inner, label_prefix(label, node, at), (*place, number))


def no_hints(site: CallSite) -> CallHints:
    """Calls run as those of any client."""
    return CallHints()


def row_by_row(graph: WorkflowGraph) -> Order:
    """By row, then by the order of the graph's nodes."""
    places = NodePlaces(graph.nodes)
    return lambda site: (site.row, *places[site.label])
