"""Which rows of a run are planned together, and when. Pure.

The first plans are made before any call leaves: one of a sample of the rows, where the length of some answers is not
known, and one of the others. What the sample has shown gives the next plan of all rows that have not started, and so do
rows that come late. Owns which rows are sampled, and the figures that plans are made with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.workflow.analysis.analyse import analyse
from weft.workflow.analysis.objectives import WantedOutputs
from weft.workflow.analysis.prompts import TokensOf
from weft.workflow.analysis.statistics import Statistics, sampled_rows
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.nodes import LlmNode, WorkflowGraph
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.plan import PlanOptions, make_plan
from weft.workflow.planner.ranks import CallRanks
from weft.workflow.run.pins import KvPrefix, RunPins
from weft.workflow.run.planned_order import PlannedOrder, is_plan_due
from weft.workflow.run.settings import PlanSettings
from weft.workflow.run.state import RunState

NEWS_PART = 0.25
"""By which the length of answers must differ from what was assumed for another plan to be made."""
PlannedRows = Mapping[int, Mapping[str, Any]]
"""Rows of one plan: number -> inputs."""


class PlanSources(NamedTuple):
    """What plans of runs are made for."""

    tokens: TokensOf
    engines: Sequence[PlanEngine]
    model: str
    """Of calls that name none."""
    keeps_kv: bool = True
    """Whether engines can be told which KV to keep, and which conversations go on."""


class PlanRounds:
    """The plans of one run."""

    def __init__(
        self,
        graph: WorkflowGraph,
        order: PlannedOrder,
        sources: PlanSources,
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
        settings: PlanSettings | None = None,
        wanted: WantedOutputs | None = None,
    ):
        """`order` is that of the run's state. `statistics` are known figures, as `weft.workflow.plan` takes them; where
        they lack the length of an answer, a sample of the rows runs first and gives it. `wanted` is what the
        outputs are wanted for."""
        self.settings = settings or PlanSettings()
        self.pins = RunPins()
        """What plans want to be kept."""
        self.on_unpinned: Callable[[list[KvPrefix]], None] = lambda prefixes: None
        """Told what a new plan does not want any more."""
        self.num_plans = 0
        """Plans that the order has had so far."""
        self.known: dict[str, Mapping[str, Any]] = dict(statistics or {})
        """The figures that the next plan is made with."""
        self._graph = graph
        self._order = order
        self._sources = sources
        self._wanted = wanted or WantedOutputs()
        self._unknown: dict[str, Mapping[str, Any]] = {}
        """Calls of whose answers no length is known, by label: their requests."""
        # Without an order no row runs first, and what a sample measures would come too late.
        for label, node in labelled_nodes(graph.nodes) if self.settings.order else ():
            if isinstance(node, LlmNode) and "output_tokens" not in self.known.get(label, {}):
                self._unknown[label] = node.request
        self._sample: set[int] | None = None
        """Rows of the sample that have not ended; None before the first plan."""
        self._looked_at = (0, True)
        """Rows that had arrived when late ones were counted last, and whether more could come."""

    @property
    def num_engines(self) -> int:
        """Engines of a model, of the one that has most of them."""
        models: dict[str, int] = {}
        for engine in self._sources.engines:
            models[engine.model] = models.get(engine.model, 0) + 1
        return max(models.values(), default=1)

    @property
    def has_begun(self) -> bool:
        """Whether the first plans were due; calls wait for those alone."""
        return self._sample is not None

    def due(self, state: RunState, *, is_open: bool) -> list[PlannedRows]:
        """The rows of each plan that is to be made now, in order; none is empty. `is_open`: more rows may come."""
        rows = state.unstarted
        if self._sample is None:
            numbers = list(rows)
            self._sample = {numbers[index] for index in (sampled_rows(len(rows)) if self._unknown else ())}
            parts = [[row for row in numbers if (row in self._sample) is first] for first in (True, False)]
            return [{row: rows[row] for row in part} for part in parts if part]
        if self._has_sampled(state) or self._has_late_rows(state, is_open=is_open):
            return [dict(rows)] if rows else []
        return []

    def ranks(self, rows: PlannedRows) -> CallRanks:
        """Make a plan. Takes long, and changes nothing. Raises `WeftError` and `ValueError`."""
        sources = self._sources
        options = PlanOptions(
            wanted=self._wanted,
            pinned_part=self.settings.planned_part if sources.keeps_kv else 0.0,
            is_continued=self.num_plans > 0,
        )
        analysed = analyse(self._graph, list(rows.values()), sources.model, self.known, sources.tokens)
        return make_plan(analysed, sources.engines, options).ranks()

    def put(self, state: RunState, rows: PlannedRows, ranks: CallRanks) -> None:
        """Order the run's calls by a plan. Rows that have started meanwhile stay where they are, before the others."""
        self._order.put({row: index for index, row in enumerate(rows) if row in state.unstarted}, ranks, state.rows)
        moved = rows.keys() & state.unstarted.keys()
        self.on_unpinned(self.pins.plan(ranks.pins, list(rows), moved, state.rows))
        state.sort()
        self.num_plans += 1

    def _has_sampled(self, state: RunState) -> bool:
        """Whether the last row of the sample has ended just now, and its figures are not about what was assumed: a plan
        of the rest comes back to all prefixes of the one before."""
        if not self._sample:
            return False
        self._sample &= state.rows
        if self._sample:
            return False
        measured, assumed = state.measured(), Statistics(self.known)
        is_news = False
        for label, request in self._unknown.items():
            if label in measured:
                known = assumed.output_tokens(label, request)
                is_news |= abs(measured[label]["output_tokens"] - known) > NEWS_PART * known
                self.known[label] = {**self.known.get(label, {}), **measured[label]}
        return is_news and bool(state.unstarted)

    def _has_late_rows(self, state: RunState, *, is_open: bool) -> bool:
        if self._looked_at == (state.num_opened, is_open):
            return False
        self._looked_at = state.num_opened, is_open
        unplanned = sum(row not in self._order for row in state.unstarted)
        return is_plan_due(unplanned, state.num_rows, is_open=is_open)
