"""The graphs that clients gave to a server, by tenant.

Owns their checks and their forms: a graph is stored as canonical JSON under its digest, so equal graphs are one. All
work is done on threads, because a graph may have 10,000 nodes.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, UnknownWorkflow
from weft.store.workflows import WorkflowRow, WorkflowTable
from weft.threads import FairThreads
from weft.workflow.graph.digest import digest
from weft.workflow.graph.json import graph_from_dict, graph_from_json, graph_to_dict
from weft.workflow.graph.nodes import WorkflowGraph, count_nodes

MIN_ID_CHARS = 8
"""Of the beginning of an id that may stand for it."""
MAX_KEPT_GRAPHS = 16
"""Graphs that stay in memory: one is usually stored, run and explained within seconds."""
MAX_KEPT_BYTES = 256 << 10
"""Of a graph's JSON, which takes about ten times as much in memory; larger graphs are read each time."""
_ID = re.compile(rf"[0-9a-f]{{{MIN_ID_CHARS},64}}\Z")


class WorkflowSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What lists say of a graph."""

    inputs: list[str]
    """Columns of its rows."""
    outputs: list[str]
    nodes: int
    """Nodes, those of bodies included."""


class StoredWorkflow(NamedTuple):
    """A graph of a tenant."""

    tenant: str
    row: WorkflowRow
    summary: WorkflowSummary

    @property
    def id(self) -> str:
        """The digest of the graph."""
        return self.row.id

    def graph(self) -> WorkflowGraph:
        """The graph, canonical. Takes long for a large one."""
        content = self.row.graph
        return graph_from_json(content) if len(content) > MAX_KEPT_BYTES else _kept_graph(self.tenant, content)


class WorkflowLibrary:
    """Used from one event loop."""

    def __init__(self, table: WorkflowTable, threads: FairThreads, table_threads: FairThreads):
        """`threads` check graphs, `table_threads` read and delete."""
        self._table = table
        self._threads = threads
        self._table_threads = table_threads

    async def create(self, tenant: str, raw: Any, name: str = "") -> StoredWorkflow:
        """Check and store a graph; one that is there already is returned. Raises `InvalidGraph` with every mistake,
        `QuotaExceeded`, `StorageFailed`."""
        return await self._threads.run(partial(self._create, tenant, raw, name), tenant=tenant)

    async def find(self, tenant: str, id: str) -> StoredWorkflow:
        """The workflow of an id, or of the first characters of one. Raises `UnknownWorkflow`, `StorageFailed`."""
        find = partial(self._table.find, tenant, id)
        row = await self._table_threads.run(find, tenant=tenant) if _ID.match(id) else None
        if row is None:
            raise UnknownWorkflow(f"There is no workflow {id[:80]!r}.", "workflow")
        return _stored(tenant, row)

    async def all(self, tenant: str) -> list[StoredWorkflow]:
        """All of a tenant, oldest first, without their graphs. Raises `StorageFailed`."""
        rows = await self._table_threads.run(partial(self._table.all, tenant), tenant=tenant)
        return [_stored(tenant, row) for row in rows]

    async def delete(self, tenant: str, id: str) -> None:
        """Remove a workflow. Raises `StorageFailed`."""
        await self._table_threads.run(partial(self._table.delete, tenant, id), tenant=tenant)

    def _create(self, tenant: str, raw: Any, name: str) -> StoredWorkflow:
        graph = graph_from_dict(raw)
        if not name.isprintable():
            raise InvalidRequest("name has characters that cannot be printed.", "name")
        content = msgspec.json.encode(graph_to_dict(graph))
        summary = WorkflowSummary(
            inputs=list(graph.inputs), outputs=list(graph.outputs), nodes=count_nodes(graph.nodes)
        )
        row = WorkflowRow(digest(graph), name, time.time(), len(content), msgspec.json.encode(summary), content)
        return _stored(tenant, self._table.put(tenant, row))


@lru_cache(MAX_KEPT_GRAPHS)
def _kept_graph(tenant: str, content: bytes) -> WorkflowGraph:
    """`tenant`: how long it takes must not tell others what a tenant runs."""
    return graph_from_json(content)


def _stored(tenant: str, row: WorkflowRow) -> StoredWorkflow:
    return StoredWorkflow(tenant, row, msgspec.json.decode(row.summary, type=WorkflowSummary))
