"""Requests of the workflows API, without a connection, and how their answers are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from weft.client.errors import ClientError
from weft.client.protocol import ApiCall, event_data, parsed
from weft.client.workflow_values import StoredGraph, WorkflowRunEvent

LINES = {"content-type": "application/jsonl"}
Graphs = list[StoredGraph]
_event = msgspec.json.Decoder(WorkflowRunEvent)


def create(graph: Any, name: str) -> ApiCall:
    """Store a graph: JSON, or a workflow or flow, which has a name itself."""
    raw, own = (graph, "") if isinstance(graph, Mapping) else (graph.to_dict(), graph.name)
    return ApiCall("POST", "/v1/workflows", json={"graph": raw, "name": name or own})


def workflow_call(method: str, workflow: str = "") -> ApiCall:
    """Make a request about one workflow, or about all."""
    return ApiCall(method, "/v1/workflows" + (f"/{quote(workflow)}" if workflow else ""))


def start(workflow: str, rows: Iterable[Mapping[str, Any]], key: str | None, options: Mapping[str, Any]) -> ApiCall:
    """Start a run in the background. `options` are fields of the API; None is left out."""
    given = {name: value for name, value in options.items() if value is not None}
    query = urlencode(
        {name: msgspec.json.encode(value).decode() for name, value in {"background": True, **given}.items()}
    )
    content = b"\n".join(map(msgspec.json.encode, rows))
    headers = LINES if key is None else {**LINES, "idempotency-key": key}
    return ApiCall("POST", f"/v1/workflows/{quote(workflow)}/runs?{query}", content=content, headers=headers)


def run_query(run_id: str, what: str, **query: int | str) -> ApiCall:
    """Ask for results or events of a run."""
    return ApiCall("GET", f"/v1/runs/{quote(run_id)}/{what}?{urlencode(query)}")


def explain(workflow: str, rows: Iterable[Mapping[str, Any]] | int, form: str, options: Mapping[str, Any]) -> ApiCall:
    """Ask what a run would do."""
    given = {"num_rows": rows} if isinstance(rows, int) else {"rows": list(rows)}
    body = {**given, "format": form, **{name: value for name, value in options.items() if value is not None}}
    return ApiCall("POST", f"/v1/workflows/{quote(workflow)}/explain", json=body)


def explanation_in(body: bytes, form: str) -> Any:
    """Decode an explanation: a mapping, or a text. Raises `ClientError`."""
    return parsed(body, dict[str, Any]) if form == "json" else body.decode()


def set_variable(variable_id: str, value: Any, error: str | None, kind: str | None) -> ApiCall:
    """Give a variable its value, or an error instead."""
    failed = {"error": error} | ({"kind": kind} if kind is not None else {})
    return ApiCall("PUT", f"/v1/variables/{quote(variable_id)}", json={"value": value} if error is None else failed)


class EventLines:
    """Decodes the lines of one stream."""

    def __init__(self) -> None:
        self._id = ""

    def __call__(self, line: str) -> WorkflowRunEvent | None:
        """Decode a line; None if it holds no event. Raises `ServerError` if it holds an error."""
        if line.startswith("id:"):
            self._id = line[3:].strip()
        data = event_data(line)
        if data is None:
            return None
        try:
            return msgspec.structs.replace(_event.decode(data), id=self._id)
        except msgspec.MsgspecError as error:
            raise ClientError(f"an event of the run cannot be read: {error}") from error
