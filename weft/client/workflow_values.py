"""Workflows and their runs as the HTTP API describes them, as Python values; twins of the server's schemas."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.client.values import Run


class StoredGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow on a server."""

    id: str
    """The digest of its graph."""
    name: str
    inputs: list[str]
    outputs: list[str]
    nodes: int
    size_bytes: int
    created: float
    graph: Any = None
    """Not in lists."""


class RowFields(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a row. `number` is its place in the order in which rows ended, from 1."""

    number: int
    row: int
    outputs: dict[str, Any]
    error: dict[str, Any] | None = None


class ResultPage(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run, in the order in which rows ended."""

    data: list[RowFields]
    last: int
    """`after` of the next page."""
    has_more: bool
    status: str


class WaitFields(msgspec.Struct, frozen=True, kw_only=True):
    """A value that a run waits for."""

    id: str
    row: int
    node: str
    since: float
    until: float | None = None
    schema: Any = None
    function: str | None = None
    args: dict[str, Any] | None = None


class TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """A further piece of the text of an output: it stands behind `start` characters and replaces what was there."""

    row: int
    output: str
    start: int
    text: str


class StartFields(msgspec.Struct, frozen=True, kw_only=True):
    """A model has begun with a call."""

    row: int
    node: str
    at: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    continued_tokens: int | None = None


class WorkflowRunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a workflow's run: first `run`, then `row`, `wait`, `live` and `progress`, last `end`."""

    type: Literal["run", "row", "wait", "live", "progress", "end"]
    run: Run | None = None
    row: RowFields | None = None
    wait: WaitFields | None = None
    texts: list[TextFields] = []
    starts: list[StartFields] = []
    lost_starts: int = 0
    progress: dict[str, Any] | None = None
    id: str = ""
    """Where a stream goes on behind this event: `after`."""
