"""The runs of workflows of a server: started, waiting for their turn, carried out, ended, resumed.

Owns which run has its turn: the oldest whose tenant has room, with bounds for the server and for each tenant. Records
of runs that have ended are in the store alone. A run whose server was killed, or shut down, is taken over by the first
server that starts with the same data.

    queued ──▶ running ──▶ finished | failed | cancelled
       ▲                         resume │        │
       └────────────────────────────────┴────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from weft.abi.errors import InvalidRequest, KeyReused, Overloaded, RunCancelled, StorageFailed, UnknownRun, WeftError
from weft.config import WorkflowsConfig
from weft.core.wire import ErrorRecord
from weft.endpoints.models import Models
from weft.store.served_runs import NewRun, NumberedResult, StoredRun
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.mistakes import Mistake
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.streamed import check_streamed
from weft.workflow.run.feed import RunFeed
from weft.workflow.run.settings import check_wanted
from weft.workflow.service.evaluations import ServedEvaluations
from weft.workflow.service.execution import RunExecution, RunTables, weights_of
from weft.workflow.service.inputs import rows_of_lines, stored_rows
from weft.workflow.service.library import StoredWorkflow, WorkflowLibrary
from weft.workflow.service.live_run import WorkflowRun
from weft.workflow.service.programs import NoPrograms, ProgramRunner, program_mistakes
from weft.workflow.service.record import (
    UNREADABLE_RUN,
    WorkflowRunRecord,
    WorkflowRunSpec,
    decoded_run,
    new_workflow_run_id,
)
from weft.workflow.service.refusals import called_models
from weft.workflow.service.totals import WorkflowTotals

T = TypeVar("T")
P = ParamSpec("P")
MAX_PAGE_BYTES = 8 << 20
"""Results of one page; one result always fits."""
_ELSEWHERE = "Another server with the same data carries out the run {}: ask that one."
MAX_ENDED_FEEDS = 16
"""Runs that ended last, whose starts of calls can still be read: a short run may end before its client asks."""

logger = logging.getLogger("weft.workflow")


class RunRequested(NamedTuple):
    """A run that a client asks for."""

    spec: WorkflowRunSpec
    rows: list[Any] | bytes
    """Objects, or JSONL."""
    key: str | None = None
    """A second request of the tenant with the same key gets the run of the first."""


class WorkflowRuns:
    """Used from one event loop."""

    def __init__(
        self,
        config: WorkflowsConfig,
        models: Models,
        library: WorkflowLibrary,
        tables: RunTables,
        evaluations: ServedEvaluations,
    ):
        self._config = config
        self._evaluations = evaluations
        self._models = models
        self._library = library
        self._tables = tables
        self._live: dict[str, WorkflowRun] = {}
        """Runs of this server that have not ended, oldest first."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Of runs that have their turn."""
        self._beginning: set[asyncio.Task[Any]] = set()
        """Requests that change the store; they go on when their client disconnects."""
        self._starting: dict[str, WorkflowRun] = {}
        """New runs whose records are being stored: a second request with the same key may find them there first."""
        self._entering: Counter[tuple[str, str]] = Counter()
        """By tenant and workflow: requests of new runs that have found room, and have no run yet."""
        self._cancelled: dict[str, str] = {}
        """Why runs are being cancelled."""
        self._unstored: dict[str, WorkflowRun] = {}
        """Runs that have ended, of which the store could not be told."""
        self._ended_feeds: dict[str, RunFeed] = {}
        """Of runs that ended last, the oldest first."""
        self._closing = False
        self._begun = asyncio.Event()
        """Set once runs of servers that are gone are taken over, or cannot be."""
        tables.variables.is_ending = lambda run: run in self._cancelled or run in self._unstored
        self.programs: ProgramRunner = NoPrograms()
        """Runs programs and sources of nodes."""
        self.totals = WorkflowTotals()

    # ---- life

    async def begin(self) -> None:
        """Take over the runs of servers that are gone, once the engines are ready. Raises `StorageFailed`."""
        try:
            for model in self._models:
                await model.engine.wait_ready()
            for found in await asyncio.to_thread(self._tables.runs.take_over, self._serves):
                record = decoded_run(found)
                logger.info(
                    *("resuming run %s of a workflow at row %d of %d", record.id, record.counts.rows, record.num_rows)
                )
                self._add(WorkflowRun(msgspec.structs.replace(record, status="queued")))
        finally:
            self._begun.set()

    def _serves(self, stored: StoredRun) -> bool:
        """Whether this server has the models of a run, and can read its record."""
        record = decoded_run(stored)
        if record.error is not None and not record.is_readable:
            logger.error("run %s of a workflow is not resumed: %s", record.id, record.error.message)
        return record.is_readable and all(name in self._models.by_name for name in record.models)

    async def close(self) -> None:
        """Stop all runs where they are; they go on when a server starts with the same data. Idempotent."""
        self._closing = True
        for task in [*self._tasks.values(), *self._beginning]:
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._beginning, return_exceptions=True)
        for id in list(self._unstored):  # ended just now: without its record the next server would go on with it
            with contextlib.suppress(WeftError):
                await self._store_end(id)

    @property
    def num_running(self) -> int:
        """Runs that have their turn."""
        return len(self._tasks)

    @property
    def num_waiting(self) -> int:
        """Runs that wait for their turn."""
        return len(self._live) - len(self._tasks)

    # ---- requests

    async def start(self, tenant: str, workflow: StoredWorkflow, request: RunRequested) -> WorkflowRun:
        """Check and start a run. Raises `InvalidGraph` and `InvalidRows` with all mistakes, `InvalidRequest`,
        `UnknownModel`, `EngineDead`, `Overloaded`, `QuotaExceeded`, `StorageFailed`."""
        task = self._spawn(self._begin(tenant, workflow, request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if request.key is None:
                # The client does not know the id.
                task.add_done_callback(_cancel_begun)
            raise

    async def find(self, tenant: str, id: str) -> WorkflowRun:
        """A run of a tenant. Raises `UnknownRun`, `StorageFailed`."""
        found = self._known(tenant, id) or await self._stored(tenant, id)
        if not found.record.ended:
            # It may have begun or ended here while the store was read; what was read would then never change.
            return self._known(tenant, id) or await self._stored(tenant, id)
        return found

    async def find_here(self, tenant: str, id: str) -> WorkflowRun:
        """A run of a tenant, as `here`. Raises `UnknownRun` too."""
        return await self.here(await self.find(tenant, id))

    async def here(self, run: WorkflowRun) -> WorkflowRun:
        """The run if it has ended or is carried out by this server, which may first have to take over the runs of
        servers that are gone. Raises `StorageFailed`, and `InvalidRequest` for a run that another server carries out:
        here it would never change."""
        tenant, id = run.record.tenant, run.id
        if not run.record.ended and self._known(tenant, id) is not run:
            await self._begun.wait()
            run = await self.find(tenant, id)
        if not run.record.ended and self._known(tenant, id) is not run:
            raise InvalidRequest(_ELSEWHERE.format(id), "run")
        return run

    async def all(self, tenant: str) -> list[WorkflowRun]:
        """All runs of a tenant, newest first. Raises `StorageFailed`."""
        self._forget_old(tenant)
        found = [decoded_run(stored) for stored in await self._on_thread(tenant, self._tables.runs.all, tenant)]
        known = {**self._live, **self._unstored}
        return [known.get(record.id) or WorkflowRun(record) for record in found]

    def check_unused(self, tenant: str, workflow: str) -> None:
        """Raise `InvalidRequest` for a workflow of which a run is in progress, or is being started."""
        if (tenant, workflow) in self._entering:
            raise InvalidRequest("A run of it is being started; try again, and cancel that first.", "workflow")
        for run in self._live.values():
            if (run.record.tenant, run.record.workflow) == (tenant, workflow):
                raise InvalidRequest(f"Its run {run.id} is {run.record.status}; cancel that first.", "workflow")

    async def results(self, run: WorkflowRun, after: int, limit: int) -> list[NumberedResult]:
        """Results in the order in which rows ended, from 1, behind number `after`. Raises `StorageFailed`."""
        return await self._on_thread(run.record.tenant, self._tables.runs.results, run.id, after, limit, MAX_PAGE_BYTES)

    async def resume(self, tenant: str, id: str) -> WorkflowRun:
        """Go on with a run that failed or was cancelled, also if the client disconnects meanwhile. Raises `UnknownRun`,
        `InvalidRequest` for any other, `UnknownWorkflow`, `Overloaded`, `StorageFailed`."""
        return await asyncio.shield(self._spawn(self._resume(tenant, id)))

    async def cancel(self, tenant: str, id: str) -> WorkflowRun:
        """Cancel a run, also one whose server is gone and that no server has taken over, because none has its models.
        Raises as `find_here`."""
        run = await self.find(tenant, id)
        if run.record.ended or self._known(tenant, id) is run:
            run.cancel()
            return run
        return await asyncio.shield(self._spawn(self._cancel_abandoned(tenant, id)))

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a run that has ended, with its results. Raises `UnknownRun`, `InvalidRequest`, `StorageFailed`."""
        record = (await self.find(tenant, id)).record
        if not record.ended:
            raise InvalidRequest(f"The run {id} is {record.status}; cancel it first.", "run")
        await self._store_end(id)
        if not await self._on_thread(tenant, self._tables.runs.forget, tenant, id):
            raise InvalidRequest(_ELSEWHERE.format(id), "run")

    # ---- inside

    async def _on_thread(self, tenant: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a table, which blocks, for a tenant."""
        return await self._tables.threads.run(partial(work, *args, **kwargs), tenant=tenant)

    def _known(self, tenant: str, id: str) -> WorkflowRun | None:
        """A run of a tenant as this server has it in memory."""
        run = self._live.get(id) or self._unstored.get(id) or self._starting.get(id)
        return run if run is not None and run.record.tenant == tenant else None

    async def _stored(self, tenant: str, id: str) -> WorkflowRun:
        found = await self._on_thread(tenant, self._tables.runs.find, tenant, id)
        if found is None:
            raise UnknownRun(f"There is no run {id[:80]!r}; old runs are deleted.", "run")
        run = WorkflowRun(decoded_run(found))
        run.feed = self._ended_feeds.get(id) if run.record.ended else None
        return run

    async def _cancel_abandoned(self, tenant: str, id: str) -> WorkflowRun:
        if await self._on_thread(tenant, self._tables.runs.claim, tenant, id):
            run = self._live[id] = WorkflowRun((await self._stored(tenant, id)).record)
            self._cancel(run, "the run was cancelled")
            return run
        run = await self.find_here(tenant, id)  # it may have ended, or been taken over here, meanwhile
        run.cancel()
        return run

    async def _resume(self, tenant: str, id: str) -> WorkflowRun:
        record = (await self.find(tenant, id)).record
        if not record.is_readable:
            raise StorageFailed(record.error.message if record.error is not None else UNREADABLE_RUN)
        if record.status not in ("failed", "cancelled"):
            raise InvalidRequest(
                f"The run {id} is {record.status}; only a run that failed or was cancelled can be resumed.", "run"
            )
        with self._room(tenant, record.workflow):
            await self._store_end(id)
            await self._library.find(tenant, record.workflow)
            record = msgspec.structs.replace(record, status="queued", error=None, finished_s=None)
            reopen = self._tables.runs.reopen
            if await self._on_thread(tenant, reopen, tenant, id, msgspec.json.encode(record)):
                return self._add(WorkflowRun(record))
        return await self.find(tenant, id)

    async def _begin(self, tenant: str, workflow: StoredWorkflow, request: RunRequested) -> WorkflowRun:
        with self._room(tenant, workflow.id):
            return await self._begin_here(tenant, workflow, request)

    async def _begin_here(self, tenant: str, workflow: StoredWorkflow, request: RunRequested) -> WorkflowRun:
        graph = await self._evaluations.on_thread(tenant, workflow.graph)
        nodes = labelled_nodes(graph.nodes)
        mistakes = await program_mistakes(self.programs, tenant, nodes, request.spec.model)
        new_run = partial(self._new, tenant, workflow, graph, request, mistakes)
        record, new = await self._evaluations.on_thread(tenant, new_run)
        run = self._starting[record.id] = WorkflowRun(record)
        try:
            stored = await self._on_thread(tenant, self._tables.runs.begin, new)
            known = decoded_run(stored)
            if known.id == record.id:
                self._forget_old(tenant)
                return self._add(run)
        finally:
            del self._starting[record.id]
        if known.request != record.request:
            raise KeyReused(
                "Another run, with another workflow, rows or fields, has this Idempotency-Key: use a new one.",
                "Idempotency-Key",
            )
        return await self.find(tenant, known.id)

    def _new(
        self,
        tenant: str,
        workflow: StoredWorkflow,
        graph: WorkflowGraph,
        request: RunRequested,
        mistakes: list[Mistake],
    ) -> tuple[WorkflowRunRecord, NewRun]:
        """Blocks."""
        spec = request.spec
        check_streamed(graph, spec.stream)
        models = called_models(graph, spec, self._models, mistakes)
        check_wanted(spec.wanted, graph.outputs)
        for name in models:
            self._models.usable(name)
        given = rows_of_lines(request.rows) if isinstance(request.rows, bytes) else request.rows
        rows = stored_rows(graph, given, self._config.max_rows)
        asked = hashlib.sha256(msgspec.json.encode([workflow.id, spec], order="deterministic"))
        for _, chunk in rows.chunks:
            asked.update(chunk)
        record = WorkflowRunRecord(
            id=new_workflow_run_id(),
            tenant=tenant,
            workflow=workflow.id,
            name=workflow.row.name,
            model=spec.model or (models[0] if len(models) == 1 else ""),
            models=models,
            spec=spec,
            weights=weights_of(self._models, models),
            created_s=time.time(),
            num_rows=rows.num_rows,
            largest_row=rows.largest,
            request=asked.hexdigest(),
        )
        encoded = msgspec.json.encode(record)
        return record, NewRun(record.id, tenant, request.key, record.created_s, encoded, rows.chunks)

    @contextlib.contextmanager
    def _room(self, tenant: str, workflow: str) -> Iterator[None]:
        """Take a place among the runs of a tenant that wait, until the new one is among them. Raises `Overloaded`."""
        waiting = sum(run.record.tenant == tenant for id, run in self._live.items() if id not in self._tasks)
        waiting += sum(count for (of, _), count in self._entering.items() if of == tenant)
        if waiting >= self._config.max_waiting:
            raise Overloaded(
                f"{self._config.max_waiting} of your runs of workflows wait already (workflows.max_waiting); "
                "try again later."
            )
        self._entering[tenant, workflow] += 1
        try:
            yield
        finally:
            self._entering[tenant, workflow] -= 1
            if not self._entering[tenant, workflow]:
                del self._entering[tenant, workflow]

    def _add(self, run: WorkflowRun) -> WorkflowRun:
        self._live[run.id] = run
        run.on_cancel = lambda reason: self._cancel(run, reason)
        self._start_waiting()
        return run

    def _start_waiting(self) -> None:
        if self._closing:
            return
        running = Counter(self._live[id].record.tenant for id in self._tasks)
        for run in list(self._live.values()):
            if len(self._tasks) >= self._config.max_runs:
                return
            tenant = run.record.tenant
            if run.id not in self._tasks and running[tenant] < self._config.max_runs_per_tenant:
                running[tenant] += 1
                self._tasks[run.id] = asyncio.create_task(self._carry_out(run))

    def _cancel(self, run: WorkflowRun, reason: str) -> None:
        if run.id in self._cancelled:
            return
        self._cancelled[run.id] = reason
        if run.id not in self._tasks:
            # It waits: its turn comes now, and ends at once.
            self._tasks[run.id] = asyncio.create_task(self._carry_out(run))
        elif run.record.status == "running":
            # A task that has not begun would not even end the run.
            self._tasks[run.id].cancel()

    async def _carry_out(self, run: WorkflowRun) -> None:
        error: WeftError | None = None
        try:
            if run.id not in self._cancelled:
                started_s = run.record.started_s or time.time()
                run.update(status="running", started_s=started_s)
                workflow = await self._library.find(run.record.tenant, run.record.workflow)
                await self._execution(run, workflow).carry_out()
        except asyncio.CancelledError:
            if run.id not in self._cancelled:
                # The server shuts down: the record stays that of a run in progress.
                self._tables.runs.save(run.record.tenant, run.id, msgspec.json.encode(run.record))
                raise
        except WeftError as raised:
            error = raised
        except Exception:
            logger.exception("run %s of a workflow failed", run.id)
            error = WeftError(f"the server failed; its log has the cause under {run.id}")
        if run.id in self._cancelled:
            error = RunCancelled(self._cancelled[run.id])
        await self._end(run, error)

    def _execution(self, run: WorkflowRun, workflow: StoredWorkflow) -> RunExecution:
        return RunExecution(run, workflow, self._models, self._tables, self._evaluations, self.programs, self.totals)

    async def _end(self, run: WorkflowRun, error: WeftError | None) -> None:
        status = "finished" if error is None else "cancelled" if isinstance(error, RunCancelled) else "failed"
        record = msgspec.structs.replace(
            run.record,
            status=status,
            error=None if error is None else ErrorRecord.of(error),
            finished_s=time.time(),
        )
        ended = self._unstored[run.id] = WorkflowRun(record)
        if run.feed is not None:
            ended.feed = self._ended_feeds[run.id] = run.feed
            if len(self._ended_feeds) > MAX_ENDED_FEEDS:
                del self._ended_feeds[next(iter(self._ended_feeds))]
        self.totals.runs.add(status)
        try:
            await asyncio.shield(self._spawn(self._store_end(run.id)))
        except WeftError as failure:
            logger.warning("the end of run %s cannot be stored: %s", run.id, failure.message)
        finally:
            run.on_cancel = None
            for known in (self._live, self._tasks, self._cancelled):
                known.pop(run.id, None)
            run.update(**{name: getattr(ended.record, name) for name in ("counts", "status", "error", "finished_s")})
            self._start_waiting()

    async def _store_end(self, id: str) -> None:
        """Store the record of a run that has ended, if that is still to be done. Raises `StorageFailed`."""
        if id not in self._unstored:
            return
        run = self._unstored[id]
        if run.record.status != "finished":
            # Results were on their way when it ended. They are committed by now, and can be read.
            num_rows, num_failed = await asyncio.wrap_future(self._tables.runs.num_ended(run.record.tenant, id))
            run.update(counts=run.record.counts._replace(rows=num_rows, failed_rows=num_failed))
        record = run.record
        encoded, ended_s = msgspec.json.encode(record), record.finished_s or 0.0
        end, is_complete = self._tables.runs.end, record.status == "finished"
        await asyncio.wrap_future(end(record.tenant, id, encoded, ended_s, is_complete=is_complete))
        self._unstored.pop(id, None)

    def _forget_old(self, tenant: str) -> None:
        since_s = time.time() - self._config.max_kept_s
        self._tables.runs.forget_old(tenant, self._config.max_kept_runs, since_s)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        return task


def _cancel_begun(task: asyncio.Task[WorkflowRun]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cancel("its client disconnected")
