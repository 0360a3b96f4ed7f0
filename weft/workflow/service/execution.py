"""Carries one run out: rows from the store, calls to the models of this process, results to the store.

A result can be read once it is committed. Writing holds the run up only when much of it is not committed yet.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple

import msgspec

from weft.abi.errors import ConfigError, QuotaExceeded
from weft.endpoints.models import Models
from weft.store.answers import AnswerTable
from weft.store.served_runs import Endings, ServedRunTable
from weft.store.statistics import StatisticsTable
from weft.store.workflow_runs import SavedRun, WorkflowRunTable
from weft.threads import FairThreads
from weft.workflow.actuals import CallCounts, RunCounts
from weft.workflow.backend.endpoint import EndpointBackend, sources_of_models
from weft.workflow.graph.digest import journal_digest
from weft.workflow.graph.streamed import streamed_calls
from weft.workflow.passes import optimise
from weft.workflow.planner.ranks import CallRanks
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.feed import RunFeed
from weft.workflow.run.instructions import RowDone
from weft.workflow.run.journal import RunJournal
from weft.workflow.run.known_statistics import KnownStatistics
from weft.workflow.run.ledger import added, total
from weft.workflow.run.order import row_by_row
from weft.workflow.run.plan_rounds import PlannedRows
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.planning import PlanOfRows, RunPlanner
from weft.workflow.run.prompt_cache import CallsInFlight, PromptCache
from weft.workflow.run.results import result_of
from weft.workflow.run.state import RunState
from weft.workflow.service.evaluations import ServedEvaluations
from weft.workflow.service.inputs import unfinished_rows
from weft.workflow.service.library import StoredWorkflow
from weft.workflow.service.live_run import WorkflowRun
from weft.workflow.service.programs import ProgramRunner, TenantPrograms
from weft.workflow.service.record import WorkflowRunRecord, cache_identity
from weft.workflow.service.run_variables import RunVariables, WaitingVariables
from weft.workflow.service.totals import WorkflowTotals

MAX_UNWRITTEN = 64
"""Results that are not committed yet, after which no further row ends."""
MAX_UNWRITTEN_BYTES = 16 << 20
"""The same in bytes; results are written in their order."""
PROGRESS_S = 0.25
"""Between two looks at what calls have done since."""
MAX_OPEN_NODES = 200_000
"""Nodes of all rows of a run that are in progress; one row always is."""
MAX_OPEN_BYTES = 64 << 20
"""The same for the inputs of these rows."""


class RunTables(NamedTuple):
    """What a run reads and writes."""

    runs: ServedRunTable
    tasks: WorkflowRunTable
    answers: AnswerTable
    variables: WaitingVariables
    statistics: StatisticsTable
    in_flight: CallsInFlight
    threads: FairThreads
    """For calls of the tables, which block."""


class _Unwritten(NamedTuple):
    """A result that is on its way to the store."""

    written: Future[None]
    failed: bool
    size_bytes: int
    by_node: Mapping[str, CallCounts]
    """What calls of the row did."""


class _Prepared(NamedTuple):
    """A run, ready to be carried out."""

    stored: str
    executed: str
    state: RunState
    planner: RunPlanner | None
    """None: calls run row by row."""
    journal: RunJournal
    endings: Endings
    feed: RunFeed
    statistics: KnownStatistics


class RunExecution:
    """One run, once. `carry_out` may be cancelled at any time; a later execution then goes on."""

    def __init__(
        self,
        run: WorkflowRun,
        workflow: StoredWorkflow,
        models: Models,
        tables: RunTables,
        evaluations: ServedEvaluations,
        programs: ProgramRunner,
        totals: WorkflowTotals,
    ):
        self._run = run
        self._evaluations = evaluations
        self._workflow = workflow
        self._models = models
        self._tables = tables
        self._programs = programs
        self._totals = totals
        self._variables = RunVariables(run, tables.variables)
        self._unwritten: asyncio.Queue[_Unwritten | None] = asyncio.Queue(MAX_UNWRITTEN)
        self._unconfirmed: deque[_Unwritten] = deque()
        """Results whose calls are not counted among those of ended rows yet, in their order."""

    async def carry_out(self) -> None:
        """Run all rows that have not ended. Raises what ends the run: `ConfigError` if models or ids of nodes are not
        what they were, `QuotaExceeded` where there is no room for a result, `StorageFailed`."""
        record = self._run.record
        weights = weights_of(self._models, record.models)
        if weights != record.weights:
            raise ConfigError(
                "the models' weights or precision are not those with which this run began: start it anew. Place, stamp "
                f"of the files, precision, context and parsers were {record.weights}, and are {weights}"
            )
        prepared = await self._evaluations.on_thread(record.tenant, partial(self._prepare, record))
        if record.spec.stream or record.spec.starts:
            self._run.feed = prepared.feed
        self._run.update(stored=prepared.stored, executed=prepared.executed, counts=prepared.state.counts)
        # Values of nodes that are kept from now on are those of this graph.
        self._save()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._confirm(prepared.state))
                progress = group.create_task(self._tell_progress(prepared.state))
                await self._drive(prepared)
                progress.cancel()
                await self._unwritten.put(None)
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, QuotaExceeded):
                await self._confirm_others(prepared.state)
            raise error from None
        finally:
            # What is still on its way is committed before anything that is written for the run from now on.
            self._count_ended(prepared.state, *(each for each in self._unconfirmed if not _is_lost(each.written)))
            self._count(prepared.state)
            prepared.statistics.keep(prepared.state.measured())

    def _prepare(self, record: WorkflowRunRecord) -> _Prepared:
        """Blocks. Raises `ConfigError` for a workflow that has other ids than when the run began."""
        graph = self._workflow.graph()
        stored = journal_digest(graph)
        if record.stored not in ("", stored):
            raise ConfigError(
                "the workflow was deleted and stored again with other ids of its nodes, by which the values of this "
                "run are kept: start it anew"
            )
        executed = optimise(graph).graph if record.spec.optimise else graph
        name = journal_digest(executed)
        endings = self._tables.runs.endings(record.id)
        if record.executed not in ("", name):
            # Another version of the optimiser has made another graph: its nodes may have the same ids.
            self._tables.tasks.forget_tasks(record.id)
        tasks = self._tables.tasks.tasks(record.id)
        counts = record.ended_counts._replace(rows=len(endings.rows), failed_rows=endings.num_failed)
        settings, wanted = record.spec.planning, record.spec.wanted
        began_s = record.started_s or time.time()
        order = PlannedOrder(row_by_row(executed), settings, wanted, lambda: time.time() - began_s)
        budget = self._evaluations.of_runs(record.tenant)
        state = RunState(executed, order, record.spec.limits, order.hints, counts, budget)
        statistics = KnownStatistics(
            self._tables.statistics, executed, f"{record.weights} {record.model}", record.tenant
        )
        planner = None
        if settings.needs_plans:
            planner = RunPlanner(
                executed,
                order,
                sources_of_models(self._models, record.model),
                statistics.load(),
                self._beside,
                settings,
                wanted,
            )
        saved = SavedRun({}, tasks, self._tables.tasks.seconds(record.id))
        is_timed = record.spec.limits.seconds is not None
        journal = RunJournal(self._tables.tasks, record.id, saved, record.tenant, keeps_seconds=is_timed)
        calls = streamed_calls(executed, record.spec.stream)
        # Positions grow with time, so that those of an earlier execution lie before all of this one.
        feed = RunFeed(
            record.spec.stream,
            calls,
            name=record.id,
            starts=record.spec.starts,
            position=time.time_ns() // 1000,
            num_ended=endings.last,
        )
        return _Prepared(stored, name, state, planner, journal, endings, feed, statistics)

    async def _beside(self, plan: PlanOfRows, rows: PlannedRows) -> CallRanks:
        return await self._evaluations.on_thread(self._run.record.tenant, partial(plan, rows))

    async def _drive(self, prepared: _Prepared) -> None:
        record = self._run.record
        spec = record.spec
        fields = {"model": spec.model, "priority": spec.priority or None, "cache_salt": spec.cache_salt}
        given = {name: value for name, value in fields.items() if value is not None}
        cached_for = cache_identity(record.weights, record.model, spec.cache_salt)
        programs = TenantPrograms(
            self._programs,
            record.tenant,
            record.id,
            model=spec.model,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
        )
        services = RunServices(
            EndpointBackend(self._models, record.tenant, record.id, given),
            on_answer=self._totals.answered,
            program=programs.program,
            source=programs.source,
            external=self._variables.external,
            elsewhere=self._variables.function,
            cache=PromptCache(
                self._tables.answers, cached_for, record.tenant, self._tables.in_flight, self._tables.threads
            )
            if spec.cache
            else None,
        )
        rows = unfinished_rows(self._tables.runs, record.id, prepared.endings.rows)
        concurrency = at_once(prepared.state, record)
        if prepared.planner is None:  # which would know the engines
            engines = (len(self._models.find(name).runtimes) for name in record.models)
            concurrency = concurrency.on(max(engines, default=1))
        turn = self._evaluations.turn(record.tenant)
        journal, planner, feed = prepared.journal, prepared.planner, prepared.feed
        driver = Driver(prepared.state, rows, services, concurrency, journal, planner, feed, turn)
        size_bytes = 0
        async with aclosing(rows), aclosing(driver.results()) as results:
            async for done in results:
                assert isinstance(done, RowDone)
                self._variables.row_ended(done.row)
                result = self._write(done)
                await self._unwritten.put(result)
                size_bytes += result.size_bytes
                if size_bytes > MAX_UNWRITTEN_BYTES:
                    await asyncio.wait([asyncio.wrap_future(result.written)])
                    size_bytes = 0

    def _write(self, done: RowDone) -> _Unwritten:
        record, failed = self._run.record, done.failure is not None
        encoded = msgspec.json.encode(result_of(done).to_dict())
        calls = msgspec.json.encode(done.calls) if done.calls else b""
        written = self._tables.runs.end_row(record.tenant, record.id, done.row, encoded, failed=failed, calls=calls)
        result = _Unwritten(written, failed, len(encoded) + len(calls), done.by_node)
        self._unconfirmed.append(result)
        return result

    def _count(self, state: RunState, *, ended: int = 0, failed: int = 0) -> None:
        """Note what calls have done; rows count once their results can be read."""
        before = self._run.record.counts
        counts = state.counts._replace(rows=before.rows + ended, failed_rows=before.failed_rows + failed)
        self._run.update(counts=counts)

    def _count_ended(self, state: RunState, *results: _Unwritten) -> None:
        """Note what calls of rows did whose results are kept: a later execution goes on from there."""
        by_node = self._run.record.ended_counts.by_node
        for result in results:
            by_node = added(by_node, result.by_node)
        self._run.update(
            ended_counts=RunCounts(calls=total(by_node.values()), by_node=by_node, pins=state.pin_counts())
        )

    async def _tell_progress(self, state: RunState) -> None:
        """Between results too: a row may take long."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            if state.counts.by_node != self._run.record.counts.by_node:
                self._count(state)

    async def _confirm(self, state: RunState) -> None:
        """Wait for each result to be committed, then let it be read. Raises `StorageFailed`."""
        while (result := await self._unwritten.get()) is not None:
            await self._confirm_one(state, result)
            if self._unwritten.empty():
                self._save()

    async def _confirm_one(self, state: RunState, result: _Unwritten) -> None:
        await asyncio.shield(asyncio.wrap_future(result.written))  # a result is kept though its run ends meanwhile
        self._unconfirmed.remove(result)
        self._count_ended(state, result)
        self._count(state, ended=1, failed=int(result.failed))
        self._totals.rows.add("failed" if result.failed else "finished")

    async def _confirm_others(self, state: RunState) -> None:
        """One result had no room. Others that are on their way may have."""
        while not self._unwritten.empty():
            result = self._unwritten.get_nowait()
            if result is not None:
                with suppress(QuotaExceeded):
                    await self._confirm_one(state, result)

    def _save(self) -> None:
        record = self._run.record
        self._tables.runs.save(record.tenant, record.id, msgspec.json.encode(record))


def _is_lost(written: Future[None]) -> bool:
    """Whether something was not written, as far as is known by now."""
    return written.cancelled() or (written.done() and written.exception() is not None)


def at_once(state: RunState, record: WorkflowRunRecord) -> Concurrency:
    """How many rows of a run may be in progress, by the size of the graph and of the rows."""
    usual = Concurrency()
    rows = min(usual.rows, MAX_OPEN_NODES // max(state.num_nodes, 1), MAX_OPEN_BYTES // record.largest_row)
    return usual._replace(rows=max(rows, 1))


def weights_of(models: Models, names: tuple[str, ...]) -> str:
    """What answers of these models depend on besides the calls. Raises `UnknownModel`, and `EngineDead` while an
    engine starts."""
    return " ".join(sorted({models.find(name).weights for name in names}))
