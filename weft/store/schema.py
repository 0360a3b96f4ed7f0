"""The tables, the schema's version, and the migrations.

The version of a database is the number of migrations that it has had. Missing migrations run in one transaction, so
other connections see all of them or none. A released migration is never edited: a change of a table is a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sqlalchemy import (
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    insert,
    inspect,
    select,
    update,
)

from weft.abi.errors import StorageFailed

_METADATA = MetaData()

schema_version = Table("schema_version", _METADATA, Column("version", Integer, nullable=False))
"""One row."""

leftovers = Table("leftovers", _METADATA, Column("path", Text, primary_key=True))
"""Runs of workflows on servers that were removed, but not all of their rows yet; `path` is the id of the run. The names
are those of version 1."""

program_versions = Table(
    "program_versions",
    _METADATA,
    Column("tenant", Text, primary_key=True),
    Column("hash", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("blob", Text, nullable=False, unique=True),
)

program_names = Table(
    "program_names",
    _METADATA,
    Column("tenant", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("hash", Text, primary_key=True),
    Column("position", Integer, nullable=False),
)
"""The versions of a name in the order of `position`; the last is the latest."""

runs = Table(
    "runs",
    _METADATA,
    Column("id", Text, primary_key=True),
    Column("server", Text),
    Column("created_s", Float, nullable=False),
    Column("record", LargeBinary, nullable=False),
)
"""`server` is the name of the server that carries the run out; null when the run has ended."""

program_values = Table(
    "program_values",
    _METADATA,
    Column("tenant", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("size_bytes", Integer, nullable=False),
    Column("value", LargeBinary),
    Column("blob", Text, unique=True),
)
"""Either `value` or `blob` is set. `size_bytes` counts name and value."""

value_usage = Table(
    "value_usage",
    _METADATA,
    Column("tenant", Text, primary_key=True),
    Column("size_bytes", Integer, nullable=False),
)
"""The sum of `program_values.size_bytes` of each tenant."""

_WORKFLOWS = MetaData()

workflow_runs = Table(
    "workflow_runs",
    _WORKFLOWS,
    Column("run", Text, primary_key=True),
    Column("description", LargeBinary, nullable=False),
)
"""Runs of workflows that can be resumed, with what they run."""

workflow_rows = Table(
    "workflow_rows",
    _WORKFLOWS,
    Column("run", Text, primary_key=True),
    Column("row", Integer, primary_key=True),
    Column("result", LargeBinary, nullable=False),
)
"""Rows that have ended."""

workflow_tasks = Table(
    "workflow_tasks",
    _WORKFLOWS,
    Column("run", Text, primary_key=True),
    Column("row", Integer, primary_key=True),
    Column("path", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""Values of nodes of rows that have not ended."""

model_answers = Table(
    "model_answers",
    _WORKFLOWS,
    Column("tenant", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("used", Integer, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Index("model_answers_by_use", "tenant", "used"),
)
"""The prompt cache: answers that equal requests have again. `used` grows with each use of a tenant's answers."""

_LIBRARY = MetaData()

workflows = Table(
    "workflows",
    _LIBRARY,
    Column("tenant", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("summary", LargeBinary, nullable=False),
    Column("graph", LargeBinary, nullable=False),
)
"""Graphs that were given to a server. `id` is the digest; `size_bytes` is that of `graph`, its JSON."""

_SERVED_RUNS = MetaData()

served_runs = Table(
    "served_runs",
    _SERVED_RUNS,
    Column("run", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key", Text),
    Column("server", Text),
    Column("created_s", Float, nullable=False),
    Column("ended_s", Float),
    Column("size_bytes", Integer, nullable=False),
    Column("record", LargeBinary, nullable=False),
    UniqueConstraint("tenant", "key"),
    Index("served_runs_by_age", "tenant", "created_s"),
)
"""Runs of workflows on servers. `server` carries the run out; null when it has ended. `key` is the client's idempotency
key; `size_bytes` that of its inputs and results."""

workflow_inputs = Table(
    "workflow_inputs",
    _SERVED_RUNS,
    Column("run", Text, primary_key=True),
    Column("first", Integer, primary_key=True),
    Column("rows", LargeBinary, nullable=False),
)
"""The inputs of runs on servers, several rows together from row `first` on."""

workflow_endings = Table(
    "workflow_endings",
    _SERVED_RUNS,
    Column("run", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("row", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
)
"""The order in which rows of runs on servers ended, from 1. The results are in `workflow_rows`."""

_VARIABLES = MetaData()

workflow_variables = Table(
    "workflow_variables",
    _VARIABLES,
    Column("id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("row", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("asked_s", Float, nullable=False),
    Column("answer", LargeBinary),
    Index("workflow_variables_by_task", "run", "row", "path"),
)
"""Values from outside that runs on servers asked for; `answer` is null until one is set, and empty once its row has
ended."""

_TRACES = MetaData()

workflow_traces = Table(
    "workflow_traces",
    _TRACES,
    Column("run", Text, primary_key=True),
    Column("row", Integer, primary_key=True),
    Column("calls", LargeBinary, nullable=False),
)
"""Tokens and times of the calls of rows that have ended, of runs on servers."""

_STATISTICS = MetaData()

operator_statistics = Table(
    "operator_statistics",
    _STATISTICS,
    Column("tenant", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("operator", Text, primary_key=True),
    Column("used", Integer, nullable=False),
    Column("figures", LargeBinary, nullable=False),
    Index("operator_statistics_by_use", "tenant", "used"),
)
"""What runs of workflows measured of their operators. `used` grows with each run of a tenant that measures them."""

_SECONDS = MetaData()

workflow_seconds = Table(
    "workflow_seconds",
    _SECONDS,
    Column("run", Text, primary_key=True),
    Column("seconds", Float, nullable=False),
)
"""How long runs that can be resumed have been in progress, where that may be limited."""

MIGRATIONS: tuple[Callable[[Connection], None], ...] = tuple(
    partial(tables.create_all, checkfirst=False)
    for tables in (_METADATA, _WORKFLOWS, _LIBRARY, _SERVED_RUNS, _VARIABLES, _TRACES, _STATISTICS, _SECONDS)
)
"""From each version to the next, beginning with an empty database (version 0)."""


def migrate(connection: Connection) -> None:
    """Migrate to the last version, in the caller's transaction. Raises `StorageFailed` for a database of a newer
    Weft."""
    found = _version(connection)
    if found > len(MIGRATIONS):
        raise StorageFailed(
            "the server's data was written by a newer version of Weft "
            f"(schema {found}; this version has {len(MIGRATIONS)}): start the newer version, "
            "or name another programs.data_dir"
        )
    for migration in MIGRATIONS[found:]:
        migration(connection)
    if found == 0:
        connection.execute(insert(schema_version).values(version=len(MIGRATIONS)))
    elif found < len(MIGRATIONS):
        connection.execute(update(schema_version).values(version=len(MIGRATIONS)))


def _version(connection: Connection) -> int:
    if not inspect(connection).has_table(schema_version.name):
        return 0
    return int(connection.execute(select(schema_version.c.version)).scalar_one())
