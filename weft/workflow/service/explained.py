"""Explanations of workflows on a server: before a run, and of its runs. Plans are made on threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest
from weft.endpoints.models import Models
from weft.workflow.actuals import CallTrace, RowTrace, RunActuals
from weft.workflow.backend.endpoint import EndpointBackend, sources_of_models
from weft.workflow.explain.report import Explanation
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph.builtin_functions import client_functions
from weft.workflow.graph.mistakes import InvalidGraph
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.passes import optimise
from weft.workflow.planning import MAX_EXPLAINED_NODES, explain, explain_run
from weft.workflow.run.cached_calls import CachedCalls, cached_calls
from weft.workflow.run.prompt_cache import PromptCache
from weft.workflow.service.evaluations import ServedEvaluations
from weft.workflow.service.execution import RunTables, weights_of
from weft.workflow.service.library import StoredWorkflow, WorkflowLibrary
from weft.workflow.service.live_run import WorkflowRun
from weft.workflow.service.record import WorkflowRunRecord, WorkflowRunSpec, cache_identity
from weft.workflow.service.refusals import called_models, named_models

MAX_EXPLAINED_BYTES = 64 << 20
"""Inputs of a run that are read to explain it."""
_decoder = msgspec.json.Decoder(tuple[CallTrace, ...])


class ExplainAsked(NamedTuple):
    """What a client wants explained before it runs."""

    rows: list[Any] | int
    statistics: Mapping[str, Any]
    model: str | None
    optimise: bool
    cache: bool = True
    """Whether the prompt cache is asked."""
    cache_salt: str | None = None


class WorkflowExplanations:
    """Used from one event loop."""

    def __init__(self, models: Models, library: WorkflowLibrary, tables: RunTables, evaluations: ServedEvaluations):
        self._evaluations = evaluations
        self._models = models
        self._library = library
        self._table = tables.runs
        self._answers = tables.answers
        self._table_threads = tables.threads

    async def before(self, tenant: str, workflow: StoredWorkflow, asked: ExplainAsked) -> Explanation:
        """What a run would do. Raises `InvalidRows`, `InvalidRequest` for statistics that do not fit, for too many rows
        and for a graph that cannot be planned, and `UnknownModel`."""
        graph, runs, rows = await self._evaluations.on_thread(tenant, partial(self._checked, workflow, asked))
        cached = await self._cached(tenant, graph, runs, rows, asked) if asked.cache else None
        return await self._evaluations.on_thread(tenant, partial(self._before, graph, asked, cached))

    async def of_run(self, run: WorkflowRun) -> Explanation:
        """What a run was expected to do, and what it has done by now. Raises `UnknownWorkflow` where its graph was
        deleted, and `StorageFailed`."""
        workflow = await self._library.find(run.record.tenant, run.record.workflow)
        return await self._evaluations.on_thread(run.record.tenant, partial(self._of_run, workflow, run.record))

    async def _cached(
        self,
        tenant: str,
        graph: WorkflowGraph,
        runs: WorkflowGraph,
        rows: list[Mapping[str, Any]] | None,
        asked: ExplainAsked,
    ) -> CachedCalls | None:
        """What the tenant's prompt cache has; None where a run would be refused."""
        spec = WorkflowRunSpec(model=asked.model, functions=tuple(sorted(client_functions(graph))))
        try:
            models = called_models(graph, spec, self._models)
        except InvalidGraph:
            return None
        model = spec.model or (models[0] if len(models) == 1 else "")
        identity = cache_identity(weights_of(self._models, models), model, asked.cache_salt)
        fields = {"model": asked.model, "cache_salt": asked.cache_salt}
        given = {name: value for name, value in fields.items() if value is not None}
        return await cached_calls(
            runs,
            rows,
            EndpointBackend(self._models, tenant, "explain", given),
            PromptCache(self._answers, identity, tenant, threads=self._table_threads),
            self._evaluations.of_runs(tenant),
            self._evaluations.turn(tenant),
        )

    def _checked(
        self, workflow: StoredWorkflow, asked: ExplainAsked
    ) -> tuple[WorkflowGraph, WorkflowGraph, list[Mapping[str, Any]] | None]:
        """The graph, that which runs, and the rows, if they are known. Blocks."""
        graph = workflow.graph()
        num_rows = asked.rows if isinstance(asked.rows, int) else len(asked.rows)
        if num_rows * workflow.summary.nodes > MAX_EXPLAINED_NODES:
            raise InvalidRequest(
                f"These are {num_rows * workflow.summary.nodes:,} nodes of rows; {MAX_EXPLAINED_NODES:,} are explained "
                "at most: give fewer rows.",
                "rows",
            )
        rows = None if isinstance(asked.rows, int) else [*Rows(asked.rows).check(graph)]
        return graph, optimise(graph).graph if asked.optimise else graph, rows

    def _before(self, graph: WorkflowGraph, asked: ExplainAsked, cached: CachedCalls | None) -> Explanation:
        """Blocks."""
        tokens, engines, model, _ = sources_of_models(self._models, self._model(graph, asked.model))
        return explain(
            graph, asked.rows, model, engines, asked.statistics, optimise=asked.optimise, tokens=tokens, cached=cached
        )

    def _model(self, graph: WorkflowGraph, named: str | None) -> str:
        """The model of calls that name none: the one that is asked for, else the only one that is served."""
        if named is None and None not in named_models(graph):
            return ""
        return self._models.find(named).names[0]

    def _of_run(self, workflow: StoredWorkflow, record: WorkflowRunRecord) -> Explanation:
        rows: list[Mapping[str, Any]] = []
        num_bytes, why = 0, ""
        while (found := self._table.inputs(record.id, len(rows))) is not None:
            num_bytes += len(found[1])
            if num_bytes > MAX_EXPLAINED_BYTES:
                why = f"its rows have more than {MAX_EXPLAINED_BYTES:,} bytes"
                break
            rows += msgspec.json.decode(found[1])
            if len(rows) * workflow.summary.nodes > MAX_EXPLAINED_NODES:
                break
        end_s = record.finished_s or time.time()
        traces = tuple(RowTrace(row, _decoder.decode(calls)) for row, calls in self._table.traces(record.id))
        actual = RunActuals(record.counts, None if record.started_s is None else end_s - record.started_s, traces)
        sources = sources_of_models(self._models, record.model)
        known = rows if rows and not why else None
        spec = record.spec
        options = {**spec.wanted._asdict(), "pinned_part": spec.planning.planned_part}
        return explain_run(
            workflow.graph(), known, sources, actual, optimise=spec.optimise, plan_options=options, why_no_rows=why
        )
