"""Plans of a run: made beside the event loop while rows come. Calls never wait for a plan but the first ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weft.abi.errors import WeftError
from weft.workflow.analysis.objectives import WantedOutputs
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.planner.ranks import CallRanks
from weft.workflow.run.plan_rounds import PlannedRows, PlanRounds, PlanSources
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.settings import PlanSettings
from weft.workflow.run.state import RunState

__all__ = ["PlanSources", "RunPlanner"]

PlanOfRows = Callable[[PlannedRows], CallRanks]
Beside = Callable[[PlanOfRows, PlannedRows], Awaitable[CallRanks]]
"""Calls a function that takes long with its argument, beside the event loop."""


class RunPlanner:
    """The plans of one run. Where no plan can be made, calls run in the order without one, and `failure` says why."""

    def __init__(
        self,
        graph: WorkflowGraph,
        order: PlannedOrder,
        sources: PlanSources,
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
        beside: Beside = asyncio.to_thread,
        settings: PlanSettings | None = None,
        wanted: WantedOutputs | None = None,
    ):
        """As `PlanRounds`; `beside` makes plans."""
        self.failure: Exception | None = None
        self.rounds = PlanRounds(graph, order, sources, statistics, settings, wanted)
        """Which rows are planned together, and what plans want to be kept."""
        self._beside = beside
        self._planning: asyncio.Task[None] | None = None

    @property
    def settings(self) -> PlanSettings:
        """What the run does with its plans."""
        return self.rounds.settings

    @property
    def num_engines(self) -> int:
        """As `PlanRounds.num_engines`."""
        return self.rounds.num_engines

    async def advance(self, state: RunState, *, is_open: bool) -> None:
        """Make a plan where one is due: at first at once, later beside what runs. `is_open`: more rows may come."""
        if self.failure is not None:
            return
        if self._planning is not None:
            if not self._planning.done():
                return
            task, self._planning = self._planning, None
            task.result()
        waits = not self.rounds.has_begun
        for rows in self.rounds.due(state, is_open=is_open):
            planning = self._plan(state, rows)
            if waits:
                await planning
            else:
                self._planning = asyncio.create_task(planning)

    async def close(self) -> None:
        """Wait for a plan that is being made: threads cannot be interrupted."""
        if self._planning is not None:
            await asyncio.gather(self._planning, return_exceptions=True)

    async def _plan(self, state: RunState, rows: PlannedRows) -> None:
        try:
            ranks = await self._beside(self.rounds.ranks, rows)
        # What a template refuses, or no engine serves, the calls themselves report.
        except (WeftError, ValueError) as error:
            self.failure = error
            return
        self.rounds.put(state, rows, ranks)
