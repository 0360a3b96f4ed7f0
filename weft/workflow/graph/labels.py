"""Labels: the names of nodes within a whole graph, bodies included. Plans, runs and statistics use the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from weft.workflow.graph.nodes import AnyNode, GraphNode, SwitchNode

_OUTER = re.compile(r"\w+")


def case_step(place: str) -> str:
    """How labels and paths name a body of a switch: `[x]` for the case `x`, `[]` for the default."""
    if place == "default":
        return "[]"
    name = place.removeprefix("cases[").removesuffix("]")
    return f"[{name}]" if name else '[""]'


def label_prefix(label: str, owner: GraphNode, place: str) -> str:
    """What the labels of the nodes of a body begin with; `label` is that of its owner.

    The label of a node is its id behind those of the nodes whose bodies it is in: `notes.summary`, and
    `which[x].answer` in a case of a switch. The path of a task is a label with items and rounds: `notes[3].summary`.
    """
    step = case_step(place) if isinstance(owner, SwitchNode) else ""
    return f"{label}{step}."


def outer_node(label: str) -> str:
    """The outermost node of a label."""
    found = _OUTER.match(label)
    return found[0] if found else label


def labelled_nodes(nodes: Iterable[AnyNode], prefix: str = "") -> Iterator[tuple[str, AnyNode]]:
    """These nodes and those of their bodies, each before those inside it, with their labels."""
    for node in nodes:
        label = prefix + node.id
        yield label, node
        for place, body in node.bodies.items():
            yield from labelled_nodes(body.nodes, label_prefix(label, node, place))
