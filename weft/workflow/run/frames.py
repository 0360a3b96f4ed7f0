"""Frames: one evaluation of a graph or a body, with the values that its nodes have by now.

Owns which node waits for which. A frame knows nothing of what nodes do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from weft.workflow.graph.determinism import is_deterministic
from weft.workflow.graph.digest import asked_around, free_references, goals
from weft.workflow.graph.labels import label_prefix
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, Body, FunctionNode, GraphNode, LoopNode, MapNode, ProgramNode, uses
from weft.workflow.graph.templates import Reference

OUTPUTS = ""
"""Stands for the outputs of a frame among the names of its nodes."""


class RowFailure(NamedTuple):
    """Why a value will never be there. What depends on it fails with the same."""

    node: str
    """The path of the node where it began."""
    error: Exception


class BodyPlan:
    """What all frames of a body have in common."""

    def __init__(self, body: Body, owner: GraphNode | None, prefix: str = "", around: BodyPlan | None = None):
        """`prefix`: what the labels of its nodes begin with. `around`: the plan of the body that has the owner."""
        self.body = body
        self.owner = owner
        self.labels: dict[str, str] = {}
        self.nodes: dict[str, AnyNode] = {}
        self.wanted = goals(body.outputs, owner)
        self.needs = {OUTPUTS: _names(self.wanted)}
        self.ahead: dict[str, tuple[str, ...]] = {}
        """By map and loop, what is asked for before its body begins."""
        self.effects: set[str] = set()
        """Nodes whose values take a call that may do something else too: of a program, or a function that is not pure,
        in the node or in what it needs."""
        self.plans: dict[tuple[str, str], BodyPlan] = {}
        self._prefix = prefix
        self._around = around
        for node in body.nodes:
            self.add(node)

    def add(self, node: AnyNode) -> None:
        """Append a node. Of a graph that grows: all its references are to nodes that are here, or that follow before
        it is asked for."""
        self.nodes[node.id] = node
        self.labels[node.id] = label = self._prefix + node.id
        self.needs[node.id] = _names(use.reference for use in uses(node))
        needs = {reference.name for reference in free_references(node)}
        if any(map(_has_effect, all_nodes((node,)))) or any(map(self._takes_effect, needs)):
            self.effects.add(node.id)
        if isinstance(node, (MapNode, LoopNode)):
            # A list may be empty: a call of a model for it is one too many, but harmless, and mostly saves time.
            asked = asked_around(node)
            harmless = (each for each in asked.by_items if not self._takes_effect(each.name))
            self.ahead[node.id] = _names((*asked.always, *harmless))
        for place, inner in node.bodies.items():
            self.plans[node.id, place] = BodyPlan(inner, node, label_prefix(label, node, place), self)

    def _takes_effect(self, name: str) -> bool:
        """Whether what a name means in this body is among the `effects` of the body that has it."""
        plan: BodyPlan | None = self
        while plan is not None:
            if name in plan.nodes:
                return name in plan.effects
            if plan.owner is not None and name in plan.owner.bound:
                return False
            plan = plan._around
        return False


class Within(NamedTuple):
    """Where the frame of a body stands."""

    frame: Frame
    node: str
    step: str
    """The item, round or case, such as `[3]`."""
    number: int
    """Of the item, from 0, or of the round, from 1."""


class OpenMap:
    """A map of a row in progress: the values of its items so far."""

    __slots__ = ("done", "left")

    def __init__(self, count: int):
        self.done: list[Any] = [None] * count
        """The outputs of each item, or its failure."""
        self.left = count
        """Items in progress."""


class Frame:
    """One evaluation of a body."""

    __slots__ = (
        "_asked",
        "_subscribers",
        "_waiting",
        "bound",
        "held_bytes",
        "items",
        "number",
        "opened",
        "outer",
        "owner",
        "path",
        "plan",
        "rounds",
        "row",
        "values",
    )

    def __init__(self, plan: BodyPlan, bound: Mapping[str, Any], row: int, within: Within | None = None):
        self.plan = plan
        self.bound = bound
        """Inputs of a row, the item of a map, the values that a round of a loop begins with."""
        self.row = row
        self.outer = within.frame if within else None
        self.owner = within.node if within else ""
        self.number = within.number if within else 0
        self.path: str = f"{within.frame.path}{within.node}{within.step}." if within else ""
        """Names of owners with item, round or case, such as `notes[3].`; empty for the graph."""
        self.rounds: tuple[int, ...] = within.frame.rounds if within else ()
        """Of the loops around, the outermost first, from 0."""
        self.items: tuple[int, ...] = within.frame.items if within else ()
        """Of the maps around, the outermost first."""
        if isinstance(plan.owner, LoopNode):
            self.rounds += (self.number - 1,)
        elif isinstance(plan.owner, MapNode):
            self.items += (self.number,)
        self.values: dict[str, Any] = {}
        self.held_bytes = 0
        """What it holds of a budget (`weft.workflow.run.bounds`)."""
        self.opened: dict[str, OpenMap] = {}
        """Maps in progress."""
        self._asked: set[str] = set()
        self._waiting: dict[str, int] = {}
        self._subscribers: dict[str, list[tuple[Frame, str]]] = {}

    def find(self, name: str) -> tuple[Frame, bool]:
        """The frame that a name belongs to, and whether it is a node there. Names resolve outwards."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.plan.nodes:
                return frame, True
            if name in frame.bound:
                return frame, False
            frame = frame.outer
        raise AssertionError(f"{name} is nowhere")  # refused by the check

    def value(self, reference: Reference) -> Any:
        """The value of what a reference's name means; its path is not followed."""
        frame, is_node = self.find(reference.name)
        return frame.values[reference.name] if is_node else frame.bound[reference.name]

    def ask(self, name: str) -> list[tuple[Frame, str]]:
        """Ask for a node, or for `OUTPUTS`, and for all that it needs. Returns what can be evaluated now."""
        ready: list[tuple[Frame, str]] = []
        pending: list[tuple[Frame, str]] = [(self, name)]
        while pending:
            frame, current = pending.pop()
            if current in frame._asked:
                continue
            frame._asked.add(current)
            count = 0
            for need in frame.plan.needs[current]:
                holder, is_node = frame.find(need)
                if not is_node:
                    continue
                pending.append((holder, need))
                if need not in holder.values:
                    holder._subscribers.setdefault(need, []).append((frame, current))
                    count += 1
            pending += _nodes(frame, frame.plan.ahead.get(current, ()))
            if count:
                frame._waiting[current] = count
            else:
                ready.append((frame, current))
        return ready

    def settle(self, name: str, value: Any) -> list[tuple[Frame, str]]:
        """Give a node its value. Returns what can be evaluated now."""
        self.values[name] = value
        ready = []
        for frame, waiting in self._subscribers.pop(name, ()):
            frame._waiting[waiting] -= 1
            if not frame._waiting[waiting]:
                del frame._waiting[waiting]
                ready.append((frame, waiting))
        return ready


def _has_effect(node: GraphNode) -> bool:
    return isinstance(node, (FunctionNode, ProgramNode)) and not is_deterministic(node)


def _names(references: Iterable[Reference]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reference.name for reference in references))


def _nodes(frame: Frame, names: Iterable[str]) -> list[tuple[Frame, str]]:
    found = ((frame.find(name), name) for name in names)
    return [(holder, name) for (holder, is_node), name in found if is_node]
