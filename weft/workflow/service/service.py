"""`WorkflowService`: the workflows of a server. `weft.server.state.Service` has one; routes call it."""

from __future__ import annotations

import asyncio

from weft.config import WorkflowsConfig
from weft.store.database import Database
from weft.store.workflows import WorkflowQuota, WorkflowTable
from weft.workflow.service.library import WorkflowLibrary


class WorkflowService:
    """Used from one event loop."""

    def __init__(self, config: WorkflowsConfig | None = None, database: Database | None = None):
        """Without a database, workflows are kept in memory. `close` closes it."""
        self.config = config = config or WorkflowsConfig()
        self._database = database or Database()
        quota = WorkflowQuota(config.max_workflows, config.max_workflow_bytes)
        self.library = WorkflowLibrary(WorkflowTable(self._database, quota))

    async def close(self) -> None:
        """Close the database. Idempotent."""
        await asyncio.to_thread(self._database.close)
