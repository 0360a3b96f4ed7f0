"""`WorkflowService`: the workflows of a server and their runs. `weft.server.state.Service` has one; routes call it."""

from __future__ import annotations

import asyncio

from weft.config import WorkflowsConfig
from weft.endpoints.models import Models
from weft.store.answers import AnswerTable
from weft.store.database import Database
from weft.store.served_runs import ServedRunTable
from weft.store.statistics import StatisticsTable
from weft.store.workflow_runs import WorkflowRunTable
from weft.store.workflow_variables import WorkflowVariableTable
from weft.store.workflows import WorkflowQuota, WorkflowTable
from weft.threads import FairThreads
from weft.workflow.service.evaluations import ServedEvaluations
from weft.workflow.service.execution import RunTables
from weft.workflow.service.explained import WorkflowExplanations
from weft.workflow.service.library import WorkflowLibrary
from weft.workflow.service.programs import ProgramRunner
from weft.workflow.service.run_variables import WaitingVariables
from weft.workflow.service.runs import WorkflowRuns


class WorkflowService:
    """Used from one event loop."""

    def __init__(self, models: Models, config: WorkflowsConfig | None = None, database: Database | None = None):
        """Without a database, workflows and runs are kept in memory. `close` closes it."""
        self.config = config = config or WorkflowsConfig()
        self._database = database or Database()
        # Checks of one tenant's graphs and rows leave a thread to the others.
        self._threads = FairThreads(2, per_tenant=1, name="weft-workflow")
        # Blocking calls of the tables. The event loop's own executor would carry them out in order of arrival, so that
        # a run with thousands of them would delay the requests of all tenants.
        self._table_threads = FairThreads(8, per_tenant=4, name="weft-workflow-tables")
        quota = WorkflowQuota(config.max_workflows, config.max_workflow_bytes)
        self.evaluations = ServedEvaluations(config, self._threads)
        self.variables = WaitingVariables(WorkflowVariableTable(self._database), self._threads, self._table_threads)
        tables = RunTables(
            ServedRunTable(self._database, config.max_run_bytes),
            WorkflowRunTable(self._database),
            AnswerTable(self._database, config.max_cache_bytes),
            self.variables,
            StatisticsTable(self._database),
            {},
            self._table_threads,
        )
        self.library = WorkflowLibrary(WorkflowTable(self._database, quota), self._threads, self._table_threads)
        self.runs = WorkflowRuns(config, models, self.library, tables, self.evaluations)
        self.explanations = WorkflowExplanations(models, self.library, tables, self.evaluations)

    def serve_programs(self, programs: ProgramRunner) -> None:
        """From now on programs and sources of nodes are run by this; before, there are none."""
        self.runs.programs = programs

    async def begin(self) -> None:
        """Go on with runs of servers that are gone. Raises `StorageFailed`."""
        await self.runs.begin()

    async def close(self) -> None:
        """Stop all runs where they are, and close the database. Idempotent."""
        await self.runs.close()
        self._threads.close()
        self._table_threads.close()
        await asyncio.to_thread(self._database.close)
