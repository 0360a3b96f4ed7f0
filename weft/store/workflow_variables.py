"""Rows of variables: values from outside that runs of workflows on servers wait for. Answers are opaque.

A variable is asked for before it can be set, and set once. It stays until its run is deleted, so a second answer is
refused after a restart too. Its answer goes when its row ends.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, and_, bindparam, exists, insert, or_, select, update

from weft.store.database import Database
from weft.store.schema import served_runs, workflow_endings, workflow_variables

_variable = workflow_variables.c
_THIS = _variable.id == bindparam("this")
_GET = select(_variable.asked_s, _variable.answer).where(_THIS)
_LATEST = (
    select(_variable.attempt)
    .where(
        _variable.run == bindparam("of_run"),
        _variable.row == bindparam("of_row"),
        _variable.path == bindparam("of_path"),
    )
    .order_by(_variable.attempt.desc())
    .limit(1)
)
_later = workflow_variables.alias()
_SAME_TASK = and_(*(_later.c[name] == _variable[name] for name in ("run", "row", "path")))
_ending = workflow_endings.c
_OF_TENANT = (
    select(
        _variable.run,
        _variable.answer.is_not(None).label("is_set"),
        or_(
            served_runs.c.ended_s.is_not(None),
            exists().where(_ending.run == _variable.run, _ending.row == _variable.row),
            exists().where(_SAME_TASK, _later.c.attempt > _variable.attempt),
        ).label("is_over"),
    )
    .join(served_runs, served_runs.c.run == _variable.run)
    .where(_THIS, served_runs.c.tenant == bindparam("of_tenant"))
)
_SET = update(workflow_variables).where(_THIS, _variable.answer.is_(None)).values(answer=bindparam("now"))


class AskedVariable(NamedTuple):
    """A variable that a run waits for."""

    asked_s: float
    """Seconds since 1970."""
    answer: bytes | None
    """None: it is not set."""


class KnownVariable(NamedTuple):
    """A variable, as one who sets it sees it."""

    run: str
    is_set: bool
    is_over: bool
    """Its run or its row has ended, or its task was attempted again."""


class WorkflowVariableTable:
    """The variables of a database. Every method blocks and raises `StorageFailed`."""

    def __init__(self, database: Database):
        self._database = database

    def latest_attempt(self, run: str, row: int, path: str) -> int:
        """The last attempt at a task that a variable was asked for; 0 where there is none."""
        of = {"of_run": run, "of_row": row, "of_path": path}
        return self._database.read(lambda connection: connection.execute(_LATEST, of).scalar() or 0)

    def ask(self, id: str, run: str, row: int, path: str, attempt: int, now_s: float) -> AskedVariable:
        """Ask for a variable, or find it as it was asked for before."""

        def work(connection: Connection) -> AskedVariable:
            found = connection.execute(_GET, {"this": id}).one_or_none()
            if found is not None:
                return AskedVariable(found.asked_s, found.answer)
            fields = {"id": id, "run": run, "row": row, "path": path, "attempt": attempt, "asked_s": now_s}
            connection.execute(insert(workflow_variables).values(**fields))
            return AskedVariable(now_s, None)

        return self._database.write(work).result()

    def set(self, tenant: str, id: str, answer: bytes) -> bool:
        """Set a variable. Returns whether it had no value."""

        def work(connection: Connection) -> bool:
            return bool(connection.execute(_SET, {"this": id, "now": answer}).rowcount)

        return self._database.write(work, tenant).result()

    def find(self, tenant: str, id: str) -> KnownVariable | None:
        """A variable of a tenant; None where there is none."""

        def work(connection: Connection) -> KnownVariable | None:
            found = connection.execute(_OF_TENANT, {"this": id, "of_tenant": tenant}).one_or_none()
            return None if found is None else KnownVariable(found.run, bool(found.is_set), bool(found.is_over))

        return self._database.read(work)
