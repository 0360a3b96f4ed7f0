"""Rows of workflows: graphs by tenant and digest. Graphs and their summaries are opaque.

Owns what a tenant may store. `weft.workflow.service.library` calls it.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, select, update

from weft.abi.errors import QuotaExceeded
from weft.store.database import Database
from weft.store.schema import workflows
from weft.store.sqlite import upsert

_row = workflows.c
_OF = _row.tenant == bindparam("of_tenant")
_THIS = _OF & (_row.id == bindparam("of_id"))
_GET = select(_row.id, _row.name, _row.created_s, _row.size_bytes, _row.summary, _row.graph).where(_THIS)
_LIKE = select(_row.id).where(_OF, _row.id >= bindparam("low"), _row.id < bindparam("high")).limit(2)
_LIST = (
    select(_row.id, _row.name, _row.created_s, _row.size_bytes, _row.summary)
    .where(_OF)
    .order_by(_row.created_s, _row.id)
)
_RENAME = update(workflows).where(_THIS).values(name=bindparam("new_name"))
_USED = select(func.count(), func.sum(_row.size_bytes)).where(_OF)
_PUT = upsert(workflows)
_DELETE = delete(workflows).where(_THIS)


class WorkflowRow(NamedTuple):
    """One graph of a tenant."""

    id: str
    name: str
    created_s: float
    size_bytes: int
    summary: bytes
    graph: bytes = b""
    """Empty in lists."""


class WorkflowQuota(NamedTuple):
    """What a tenant may store."""

    max_count: int
    max_bytes: int


class WorkflowTable:
    """The workflows of a database. Every method blocks and raises `StorageFailed`."""

    def __init__(self, database: Database, quota: WorkflowQuota):
        self._database = database
        self._quota = quota

    def put(self, tenant: str, row: WorkflowRow) -> WorkflowRow:
        """Store a graph. One that is there stays, and has the new name where that is not empty. Raises
        `QuotaExceeded`."""

        def work(connection: Connection) -> WorkflowRow:
            this = {"of_tenant": tenant, "of_id": row.id}
            found = connection.execute(_GET, this).one_or_none()
            if found is not None:
                known = WorkflowRow(*found)
                if row.name and row.name != known.name:
                    connection.execute(_RENAME, {**this, "new_name": row.name})
                    known = known._replace(name=row.name)
                return known
            count, size = connection.execute(_USED, this).one()
            self._check(count, size or 0, row.size_bytes)
            connection.execute(_PUT, {"tenant": tenant, **row._asdict()})
            return row

        return self._database.write(work, tenant).result()

    def find(self, tenant: str, id: str) -> WorkflowRow | None:
        """The graph of an id, or of the beginning of one that no other id has."""

        def work(connection: Connection) -> WorkflowRow | None:
            # Ids are hexadecimal: "g" is the first letter after all that continue `id`.
            ids = connection.execute(_LIKE, {"of_tenant": tenant, "low": id, "high": id + "g"}).scalars().all()
            if len(ids) != 1:
                return None
            return WorkflowRow(*connection.execute(_GET, {"of_tenant": tenant, "of_id": ids[0]}).one())

        return self._database.read(work)

    def all(self, tenant: str) -> list[WorkflowRow]:
        """All of a tenant, oldest first, without their graphs."""
        return self._database.read(
            lambda connection: [WorkflowRow(*row) for row in connection.execute(_LIST, {"of_tenant": tenant})]
        )

    def delete(self, tenant: str, id: str) -> None:
        """Remove a graph, if it is there."""
        self._database.write(
            lambda connection: connection.execute(_DELETE, {"of_tenant": tenant, "of_id": id}), tenant
        ).result()

    def _check(self, count: int, size: int, more: int) -> None:
        if count >= self._quota.max_count:
            raise QuotaExceeded(
                f"You have {count:,} workflows, the limit (workflows.max_workflows): delete some first."
            )
        if size + more > self._quota.max_bytes:
            raise QuotaExceeded(
                f"Your workflows take {size:,} bytes, and {more:,} more would exceed {self._quota.max_bytes:,} "
                "(workflows.max_workflow_bytes): delete some first."
            )
