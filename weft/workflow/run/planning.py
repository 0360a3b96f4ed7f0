"""Plans of a run: made beside the event loop while rows come, from what is known of the calls by then.

Owns which rows are sampled, and the figures that plans are made with. Calls never wait for a plan but the first ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.abi.errors import WeftError
from weft.workflow.analysis.analyse import analyse
from weft.workflow.analysis.prompts import TokensOf
from weft.workflow.analysis.statistics import sampled_rows
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.nodes import LlmNode, WorkflowGraph
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.plan import CallRanks, make_plan
from weft.workflow.run.planned_order import PlannedOrder, is_plan_due
from weft.workflow.run.state import RunState

Beside = Callable[
    [Callable[[Sequence[Mapping[str, Any]]], CallRanks], Sequence[Mapping[str, Any]]], Awaitable[CallRanks]
]
"""Calls a function that takes long with its argument, beside the event loop."""


class PlanSources(NamedTuple):
    """What plans of runs are made for."""

    tokens: TokensOf
    engines: Sequence[PlanEngine]
    model: str
    """Of calls that name none."""


class RunPlanner:
    """The plans of one run. Where no plan can be made, calls run in the order without one, and `failure` says why."""

    def __init__(
        self,
        graph: WorkflowGraph,
        order: PlannedOrder,
        sources: PlanSources,
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
        beside: Beside = asyncio.to_thread,
    ):
        """`order` is that of the run's state. `statistics` are known figures, as `weft.workflow.plan` takes them; where
        they lack the length of an answer, a sample of the rows runs first and gives it. `beside` makes plans."""
        self.failure: Exception | None = None
        self.num_plans = 0
        """Plans that the order has had so far."""
        self._graph = graph
        self._order = order
        self._sources = sources
        self._beside = beside
        self._known = dict(statistics or {})
        labels = [label for label, node in labelled_nodes(graph.nodes) if isinstance(node, LlmNode)]
        self._unknown = [label for label in labels if "output_tokens" not in self._known.get(label, {})]
        self._sample: set[int] | None = None
        """Rows of the sample that have not ended; None before the first plan."""
        self._planning: asyncio.Task[None] | None = None
        self._looked_at = (0, True)
        """Rows that had arrived when late ones were counted last, and whether more could come."""

    @property
    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """The figures that the next plan is made with."""
        return self._known

    async def advance(self, state: RunState, *, is_open: bool) -> None:
        """Make a plan where one is due: at first at once, later beside what runs. `is_open`: more rows may come."""
        if self.failure is not None:
            return
        if self._planning is not None:
            if not self._planning.done():
                return
            task, self._planning = self._planning, None
            task.result()
        if self._sample is None:
            rows = state.unstarted
            sampled = sampled_rows(len(rows)) if self._unknown else ()
            numbers = list(rows)
            self._sample = {numbers[index] for index in sampled}
            await self._plan(state, {row: rows[row] for row in numbers if row in self._sample})
            await self._plan(state, {row: rows[row] for row in numbers if row not in self._sample})
        elif self._has_sampled(state) or self._has_late_rows(state, is_open=is_open):
            self._planning = asyncio.create_task(self._plan(state, dict(state.unstarted)))

    async def close(self) -> None:
        """Wait for a plan that is being made: threads cannot be interrupted."""
        if self._planning is not None:
            await asyncio.gather(self._planning, return_exceptions=True)

    def _has_sampled(self, state: RunState) -> bool:
        """Whether the last row of the sample has ended just now; then its figures are known."""
        if not self._sample:
            return False
        self._sample &= state.rows
        if self._sample:
            return False
        measured = state.measured()
        for label in self._unknown:
            if label in measured:
                self._known[label] = {**self._known.get(label, {}), **measured[label]}
        return bool(state.unstarted)

    def _has_late_rows(self, state: RunState, *, is_open: bool) -> bool:
        if self._looked_at == (state.num_opened, is_open):
            return False
        self._looked_at = state.num_opened, is_open
        unplanned = sum(row not in self._order for row in state.unstarted)
        return is_plan_due(unplanned, state.num_rows, is_open=is_open)

    async def _plan(self, state: RunState, rows: Mapping[int, Mapping[str, Any]]) -> None:
        if not rows:
            return
        try:
            ranks = await self._beside(self._ranks, list(rows.values()))
        # What a template refuses, or no engine serves, the calls themselves report.
        except (WeftError, ValueError) as error:
            self.failure = error
            return
        # Rows that have started meanwhile stay where they are, before the others.
        self._order.put({row: index for index, row in enumerate(rows) if row in state.unstarted}, ranks, state.rows)
        state.sort()
        self.num_plans += 1

    def _ranks(self, rows: Sequence[Mapping[str, Any]]) -> CallRanks:
        tokens, engines, model = self._sources
        return make_plan(analyse(self._graph, rows, model, self._known, tokens), engines).ranks()
