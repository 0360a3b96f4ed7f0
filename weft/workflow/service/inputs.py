"""Rows of inputs, from a request to the store and from the store to a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.wording import plural
from weft.store.served_runs import ServedRunTable
from weft.workflow.frontend.row_source import MAX_MISTAKES, InvalidRows
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph.mistakes import Mistake
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.values import TOO_DEEP, is_too_deep

CHUNK_BYTES = 256 << 10
"""Rows that are read from the store at a time: as many as have so many bytes, or one."""


class StoredRows(NamedTuple):
    """Rows that were checked, as they are stored."""

    chunks: list[tuple[int, bytes]]
    """(number of the first row, a JSON list of rows)."""
    num_rows: int
    largest: int
    """Bytes of the largest row."""


def rows_of_lines(body: bytes) -> list[Any]:
    """The rows of JSONL; empty lines are left out. Raises `InvalidRows` with the first lines that are not JSON."""
    rows, mistakes = [], []
    for number, line in enumerate(body.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            mistakes.append(Mistake(f"line {number}", f"the line is not JSON: {error}"))
            if len(mistakes) == MAX_MISTAKES:
                break
    if mistakes:
        raise InvalidRows(mistakes)
    return rows


def stored_rows(graph: WorkflowGraph, rows: list[Any], max_rows: int) -> StoredRows:
    """Check rows against a graph. Takes long for many. Raises `InvalidRows` with the first mistakes, and
    `InvalidRequest` for too many rows."""
    if len(rows) > max_rows:
        raise InvalidRequest(
            f"The run has {plural(len(rows), 'row')}, and a run may have {max_rows:,} (workflows.max_rows).", "rows"
        )
    chunks: list[tuple[int, bytes]] = []
    waiting: list[bytes] = []
    size = largest = count = 0
    for number, row in enumerate(Rows(rows).check(graph)):
        if is_too_deep(row):
            raise InvalidRows([Mistake(f"row {number}", TOO_DEEP)])
        encoded = msgspec.json.encode(row)
        largest = max(largest, len(encoded))
        waiting.append(encoded)
        size += len(encoded)
        count += 1
        if size >= CHUNK_BYTES:
            chunks.append((count - len(waiting), _listed(waiting)))
            waiting, size = [], 0
    if waiting:
        chunks.append((count - len(waiting), _listed(waiting)))
    return StoredRows(chunks, count, largest)


def _listed(rows: list[bytes]) -> bytes:
    return b"[" + b",".join(rows) + b"]"


async def unfinished_rows(
    table: ServedRunTable, run: str, ended: frozenset[int]
) -> AsyncGenerator[tuple[int, Mapping[str, Any]], None]:
    """The numbered rows of a run that have not ended; memory holds one chunk. Raises `StorageFailed`."""
    least = 0
    while (chunk := await asyncio.to_thread(_read, table, run, least)) is not None:
        first, rows = chunk
        least = first + len(rows)
        for number, row in enumerate(rows, first):
            if number not in ended:
                yield number, row


def _read(table: ServedRunTable, run: str, least: int) -> tuple[int, list[dict[str, Any]]] | None:
    found = table.inputs(run, least)
    return None if found is None else (found[0], msgspec.json.decode(found[1]))
