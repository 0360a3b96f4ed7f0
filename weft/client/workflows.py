"""Workflows of a server: `Client.workflows`, and `AsyncClient.workflows` with the same methods to await."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from weft.client import protocol, workflow_calls
from weft.client.protocol import ApiCall
from weft.client.values import Run
from weft.client.workflow_values import ResultPage, StoredGraph, WorkflowRunEvent

E = TypeVar("E")


class ApiCaller(Protocol):
    """Sends requests with the client's key and raises its errors: `Client`, seen by `Workflows`."""

    def call(self, call: ApiCall) -> bytes:
        """Make a request; the body of its answer."""

    def events(self, call: ApiCall, read: Callable[[str], E | None]) -> Generator[E, None, None]:
        """Make a request whose answer is a stream, of which `read` decodes the lines."""


class AsyncApiCaller(Protocol):
    """Sends requests with the client's key and raises its errors: `AsyncClient`, seen by `AsyncWorkflows`."""

    async def call(self, call: ApiCall) -> bytes:
        """Make a request; the body of its answer."""

    def events(self, call: ApiCall, read: Callable[[str], E | None]) -> AsyncGenerator[E, None]:
        """Make a request whose answer is a stream, of which `read` decodes the lines."""


class Workflows:
    """Stores workflows and runs them on the server. `options` of a run: `limits`, `cache`, `optimise`, `planning`,
    `model`, `priority`, `cache_salt`, `functions`, `stream` (names of outputs), `starts`, as in the HTTP API."""

    def __init__(self, client: ApiCaller):
        self._client = client

    def create(self, graph: Any, name: str = "") -> StoredGraph:
        """Store a graph: JSON, a `weft.Workflow` or a flow. Without `name` it has that of the file or the flow. Raises
        `ServerError` with all mistakes."""
        return protocol.parsed(self._client.call(workflow_calls.create(graph, name)), StoredGraph)

    def list(self) -> workflow_calls.Graphs:
        """Return all workflows of the tenant, oldest first, without their graphs."""
        return protocol.listed(self._client.call(workflow_calls.workflow_call("GET")), workflow_calls.Graphs)

    def get(self, workflow: str) -> StoredGraph:
        """Return a workflow by its id, or the first eight characters or more of it. Raises `ServerError`."""
        return protocol.parsed(self._client.call(workflow_calls.workflow_call("GET", workflow)), StoredGraph)

    def delete(self, workflow: str) -> None:
        """Delete a workflow of which no run is in progress. Raises `ServerError`."""
        self._client.call(workflow_calls.workflow_call("DELETE", workflow))

    def start(self, workflow: str, rows: Iterable[Mapping[str, Any]], *, key: str | None = None, **options: Any) -> Run:
        """Start a run, which goes on when this client is closed. A second start with the same `key` is the first."""
        return protocol.parsed(self._client.call(workflow_calls.start(workflow, rows, key, options)), Run)

    def events(self, run_id: str, after: int | str = 0) -> Generator[WorkflowRunEvent, None, None]:
        """Yield the events of a run to its end, behind the result of this number, or behind the event of this `id`."""
        call = workflow_calls.run_query(run_id, "events", after=after)
        return self._client.events(call, workflow_calls.EventLines())

    def results(self, run_id: str, after: int = 0, limit: int = 100) -> ResultPage:
        """Return results of a run, behind the one of this number."""
        call = workflow_calls.run_query(run_id, "results", after=after, limit=limit)
        return protocol.parsed(self._client.call(call), ResultPage)

    def resume(self, run_id: str) -> Run:
        """Go on with a run that failed or was cancelled. Raises `ServerError`."""
        return protocol.parsed(self._client.call(protocol.run_call("POST", run_id, "resume")), Run)

    def cancel(self, run_id: str) -> Run:
        """Cancel a run and return it once it has ended."""
        return protocol.parsed(self._client.call(protocol.run_call("POST", run_id, "cancel")), Run)

    def get_run(self, run_id: str) -> Run:
        """Return a run as it is now."""
        return protocol.parsed(self._client.call(protocol.run_call("GET", run_id)), Run)

    def explain(
        self, workflow: str, rows: Iterable[Mapping[str, Any]] | int, format: str = "json", **options: Any
    ) -> Any:
        """Return what a run over these rows, or so many, would do: `json` as a mapping, `text`, `mermaid` or `svg` as
        text. `options`: `statistics`, `model`, `optimise`. Raises `ServerError`."""
        body = self._client.call(workflow_calls.explain(workflow, rows, format, options))
        return workflow_calls.explanation_in(body, format)

    def explain_run(self, run_id: str, format: str = "json") -> Any:
        """Return what a run was expected to do and what it did by now, in a format of `explain`. Raises
        `ServerError`."""
        call = workflow_calls.run_query(run_id, "explain", format=format)
        return workflow_calls.explanation_in(self._client.call(call), format)

    def set_variable(
        self, variable_id: str, value: Any = None, *, error: str | None = None, kind: str | None = None
    ) -> None:
        """Give a run a value that it waits for, or say why it will not come. Raises `ServerError`."""
        self._client.call(workflow_calls.set_variable(variable_id, value, error, kind))


class AsyncWorkflows:
    """Stores workflows and runs them on the server: `Workflows` with coroutines and the same options."""

    def __init__(self, client: AsyncApiCaller):
        self._client = client

    async def create(self, graph: Any, name: str = "") -> StoredGraph:
        """Store a graph: JSON, a `weft.Workflow` or a flow. Raises `ServerError` with all mistakes."""
        return protocol.parsed(await self._client.call(workflow_calls.create(graph, name)), StoredGraph)

    async def list(self) -> workflow_calls.Graphs:
        """Return all workflows of the tenant, oldest first, without their graphs."""
        return protocol.listed(await self._client.call(workflow_calls.workflow_call("GET")), workflow_calls.Graphs)

    async def get(self, workflow: str) -> StoredGraph:
        """Return a workflow by its id, or the first eight characters or more of it. Raises `ServerError`."""
        return protocol.parsed(await self._client.call(workflow_calls.workflow_call("GET", workflow)), StoredGraph)

    async def delete(self, workflow: str) -> None:
        """Delete a workflow of which no run is in progress. Raises `ServerError`."""
        await self._client.call(workflow_calls.workflow_call("DELETE", workflow))

    async def start(
        self, workflow: str, rows: Iterable[Mapping[str, Any]], *, key: str | None = None, **options: Any
    ) -> Run:
        """Start a run, which goes on when this client is closed. A second start with the same `key` is the first."""
        return protocol.parsed(await self._client.call(workflow_calls.start(workflow, rows, key, options)), Run)

    def events(self, run_id: str, after: int | str = 0) -> AsyncGenerator[WorkflowRunEvent, None]:
        """Yield the events of a run to its end, behind the result of this number, or behind the event of this `id`."""
        call = workflow_calls.run_query(run_id, "events", after=after)
        return self._client.events(call, workflow_calls.EventLines())

    async def results(self, run_id: str, after: int = 0, limit: int = 100) -> ResultPage:
        """Return results of a run, behind the one of this number."""
        call = workflow_calls.run_query(run_id, "results", after=after, limit=limit)
        return protocol.parsed(await self._client.call(call), ResultPage)

    async def resume(self, run_id: str) -> Run:
        """Go on with a run that failed or was cancelled. Raises `ServerError`."""
        return protocol.parsed(await self._client.call(protocol.run_call("POST", run_id, "resume")), Run)

    async def cancel(self, run_id: str) -> Run:
        """Cancel a run and return it once it has ended."""
        return protocol.parsed(await self._client.call(protocol.run_call("POST", run_id, "cancel")), Run)

    async def get_run(self, run_id: str) -> Run:
        """Return a run as it is now."""
        return protocol.parsed(await self._client.call(protocol.run_call("GET", run_id)), Run)

    async def explain(
        self, workflow: str, rows: Iterable[Mapping[str, Any]] | int, format: str = "json", **options: Any
    ) -> Any:
        """Return what a run over these rows, or so many, would do: `json` as a mapping, `text`, `mermaid` or `svg` as
        text. `options`: `statistics`, `model`, `optimise`. Raises `ServerError`."""
        body = await self._client.call(workflow_calls.explain(workflow, rows, format, options))
        return workflow_calls.explanation_in(body, format)

    async def explain_run(self, run_id: str, format: str = "json") -> Any:
        """Return what a run was expected to do and what it did by now, in a format of `explain`. Raises
        `ServerError`."""
        call = workflow_calls.run_query(run_id, "explain", format=format)
        return workflow_calls.explanation_in(await self._client.call(call), format)

    async def set_variable(
        self, variable_id: str, value: Any = None, *, error: str | None = None, kind: str | None = None
    ) -> None:
        """Give a run a value that it waits for, or say why it will not come. Raises `ServerError`."""
        await self._client.call(workflow_calls.set_variable(variable_id, value, error, kind))
