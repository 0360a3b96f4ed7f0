"""Explanations of workflows on a server: before a run, and of its runs. Plans are made on threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest
from weft.endpoints.models import Models
from weft.store.served_runs import ServedRunTable
from weft.workflow.actuals import CallTrace, RowTrace, RunActuals
from weft.workflow.backend.endpoint import plan_sources
from weft.workflow.explain.report import Explanation
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.planning import MAX_EXPLAINED_NODES, explain, explain_run
from weft.workflow.service.evaluations import ServedEvaluations
from weft.workflow.service.library import StoredWorkflow, WorkflowLibrary
from weft.workflow.service.live_run import WorkflowRun
from weft.workflow.service.record import WorkflowRunRecord
from weft.workflow.service.refusals import named_models

_decoder = msgspec.json.Decoder(tuple[CallTrace, ...])


class ExplainAsked(NamedTuple):
    """What a client wants explained before it runs."""

    rows: list[Any] | int
    statistics: Mapping[str, Any]
    model: str | None
    optimise: bool


class WorkflowExplanations:
    """Used from one event loop."""

    def __init__(self, models: Models, library: WorkflowLibrary, table: ServedRunTable, evaluations: ServedEvaluations):
        self._evaluations = evaluations
        self._models = models
        self._library = library
        self._table = table

    async def before(self, tenant: str, workflow: StoredWorkflow, asked: ExplainAsked) -> Explanation:
        """What a run would do. Raises `InvalidRows`, `InvalidRequest` for statistics that do not fit, for too many rows
        and for a graph that cannot be planned, and `UnknownModel`."""
        return await self._evaluations.on_thread(tenant, partial(self._before, workflow, asked))

    async def of_run(self, run: WorkflowRun) -> Explanation:
        """What a run was expected to do, and what it has done by now. Raises `UnknownWorkflow` where its graph was
        deleted, and `StorageFailed`."""
        workflow = await self._library.find(run.record.tenant, run.record.workflow)
        return await self._evaluations.on_thread(run.record.tenant, partial(self._of_run, workflow, run.record))

    def _before(self, workflow: StoredWorkflow, asked: ExplainAsked) -> Explanation:
        graph = workflow.graph()
        num_rows = asked.rows if isinstance(asked.rows, int) else len(asked.rows)
        if num_rows * workflow.summary.nodes > MAX_EXPLAINED_NODES:
            raise InvalidRequest(
                f"These are {num_rows * workflow.summary.nodes:,} nodes of rows; {MAX_EXPLAINED_NODES:,} are explained "
                "at most: give fewer rows.",
                "rows",
            )
        tokens, engines, model, _ = plan_sources(self._models, self._model(graph, asked.model))
        return explain(graph, asked.rows, model, engines, asked.statistics, optimise=asked.optimise, tokens=tokens)

    def _model(self, graph: WorkflowGraph, named: str | None) -> str:
        """The model of calls that name none: the one that is asked for, else the only one that is served."""
        if named is None and None not in named_models(graph):
            return ""
        return self._models.find(named).names[0]

    def _of_run(self, workflow: StoredWorkflow, record: WorkflowRunRecord) -> Explanation:
        rows: list[Mapping[str, Any]] = []
        while (found := self._table.inputs(record.id, len(rows))) is not None:
            rows += msgspec.json.decode(found[1])
            if len(rows) * workflow.summary.nodes > MAX_EXPLAINED_NODES:
                break
        end_s = record.finished_s or time.time()
        traces = tuple(RowTrace(row, _decoder.decode(calls)) for row, calls in self._table.traces(record.id))
        actual = RunActuals(record.counts, None if record.started_s is None else end_s - record.started_s, traces)
        sources = plan_sources(self._models, record.model)
        known = rows if len(rows) >= record.num_rows or rows else None
        spec = record.spec
        options = {**spec.wanted._asdict(), "pinned_part": spec.planning.planned_part}
        return explain_run(workflow.graph(), known, sources, actual, optimise=spec.optimise, plan_options=options)
