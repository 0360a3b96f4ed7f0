"""The state of a session: a run of one row whose graph grows while it is evaluated.

Each node that is added is evaluated as soon as its inputs are there, whether or not its value is asked for: what will
be asked for is not known. The row never ends by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.workflow.analysis.objectives import CallObjective
from weft.workflow.criteria import Criterion
from weft.workflow.graph.nodes import AnyNode, WorkflowGraph
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.values import plain
from weft.workflow.run.bounds import EvaluationBudget
from weft.workflow.run.evaluation import reached_value
from weft.workflow.run.frames import Frame, RowFailure
from weft.workflow.run.instructions import Instruction, RunLimits, Settled
from weft.workflow.run.objectives import SessionObjectives, urgency
from weft.workflow.run.order import CallSite, Hints, NodePlaces, no_hints
from weft.workflow.run.state import RunState

_ROW = 0
_EMPTY = WorkflowGraph(inputs=(), nodes=(), outputs={})


class GrowingState(RunState):
    """One session. Calls of models leave by what their values are wanted for, then in the order in which their nodes
    were added."""

    def __init__(
        self, limits: RunLimits | None = None, hints: Hints = no_hints, budget: EvaluationBudget | None = None
    ):
        self._places = NodePlaces(())
        super().__init__(_EMPTY, self._order_of, limits, hints, budget=budget)
        self._frame = Frame(self._plan, {}, _ROW)
        self._objectives = SessionObjectives(self._plan, self._frame.values)
        self._is_unsorted = False
        self._rows.add(_ROW)
        self._costs.begin(_ROW)
        self._ledger.begin(_ROW)

    def grow(self, nodes: Iterable[AnyNode]) -> None:
        """Add nodes, which are canonical, and whose references are to nodes that are there or among them."""
        added = list(nodes)
        for node in added:
            self._plan.add(node)
            self._places.add(node)
        for node in added:
            self._todo += self._frame.ask(node.id)
        self._work()

    def want(self, node: str, criterion: Criterion, now: float) -> None:
        """A value is asked for. What it needs and is not yet sent is sent as the criterion says."""
        self._is_unsorted |= self._objectives.want(node, criterion, now)

    def take(self, max_calls: int, max_new: int | None = None) -> list[Instruction]:
        """As `RunState.take`."""
        if self._is_unsorted:
            self._is_unsorted = False
            self.sort()
        return super().take(max_calls, max_new)

    def objective(self, label: str) -> CallObjective | None:
        """What the calls of a node are to be fast at, a deadline as a time; None: not given."""
        return self._objectives.of(label)

    def _order_of(self, site: CallSite) -> tuple[Any, ...]:
        return (urgency(self.objective(site.label)), *self._places[site.label])

    def __contains__(self, node: str) -> bool:
        return node in self._plan.nodes

    def has_settled(self, node: str) -> bool:
        """Whether a node has its value, or will never have one."""
        return node in self._frame.values

    def value(self, reference: Reference) -> Any:
        """The value of a node that has settled, as JSON, or the `RowFailure` why there is none."""
        value = reached_value(self._frame, reference)
        return value if isinstance(value, RowFailure) else plain(value)

    def failure(self, name: str) -> RowFailure | None:
        """Why a node that has settled has no value; None where it has one."""
        value = self._frame.value(Reference(name))
        return value if isinstance(value, RowFailure) else None

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Nodes that have no value yet, in the order in which they were added."""
        return tuple(node for node in self._plan.nodes if node not in self._frame.values)

    def _settle(self, frame: Frame, node_id: str, value: Any) -> None:
        super()._settle(frame, node_id, value)
        if frame is self._frame:
            self._out.append(Settled(node_id))
