"""`AsyncClient`: the one for asyncio. See `weft.client.protocol` for what is sent and how answers are read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from weft.client import protocol
from weft.client.protocol import ApiCall
from weft.client.synchronous import Client
from weft.client.values import Program, Run, RunEvent, SessionPage
from weft.client.workflows import AsyncWorkflows, Workflows
from weft.core.lines import async_lines_of

E = TypeVar("E")


class AsyncClient:
    """A server of Weft. `programs` and `runs` have the methods. Used from one event loop."""

    def __init__(self, url: str = protocol.DEFAULT_URL, *, api_key: str | None = None, timeout_s: float | None = None):
        """`timeout_s` bounds the wait for each answer; None: a run may take as long as it takes."""
        self.url = url
        self.api_key = api_key
        self._http = httpx.AsyncClient(**protocol.client_options(url, api_key, timeout_s))
        self._timeout_s = timeout_s
        self._blocking: Client | None = None
        """For runs of workflows, which call it from threads of their own."""
        self.programs = AsyncPrograms(self)
        self.runs = AsyncRuns(self)
        self.workflows = AsyncWorkflows(self)

    async def call(self, call: ApiCall) -> bytes:
        """Make a request; the body of its answer. Raises `ClientError` and `ServerError`."""
        try:
            response = await self._http.request(
                call.method, call.path, json=call.json, content=call.content, headers=dict(call.headers)
            )
        except httpx.HTTPError as error:
            raise protocol.unreachable(self.url, error) from error
        return protocol.checked(response)

    def workflow_server(self) -> Workflows:
        """Where workflows run that are given this client as `on`."""
        if self._blocking is None:
            self._blocking = Client(self.url, api_key=self.api_key, timeout_s=self._timeout_s)
        return self._blocking.workflow_server()

    async def sessions(self, *, limit: int = 100, model: str | None = None) -> SessionPage:
        """Return the sequences of the tenant that wait, those that wait longest first. Raises `ServerError`."""
        return protocol.parsed(await self.call(protocol.sessions_call(limit, model)), SessionPage)

    async def events(self, call: ApiCall, read: Callable[[str], E | None]) -> AsyncGenerator[E, None]:
        """Make a request whose answer is a stream, of which `read` decodes the lines. Closing the generator closes the
        connection."""
        try:
            async with self._http.stream(call.method, call.path, json=call.json) as response:
                if not response.is_success:
                    await response.aread()
                    protocol.checked(response)
                async for line in async_lines_of(response.aiter_bytes()):
                    event = read(line)
                    if event is not None:
                        yield event
        except httpx.HTTPError as error:
            raise protocol.unreachable(self.url, error) from error

    async def close(self) -> None:
        """Close all connections of this client. Idempotent."""
        await self._http.aclose()
        if self._blocking is not None:
            self._blocking.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPrograms:
    """Uploads and runs programs: `weft.client.synchronous.Programs` with coroutines and the same options."""

    def __init__(self, client: AsyncClient):
        self._client = client

    async def upload(self, name: str, source: str | bytes | Path) -> Program:
        """Upload a new version. A path is read, text is Python, bytes may be a Wasm module. Raises `ClientError`."""
        return protocol.parsed(await self._client.call(protocol.upload(name, source)), Program)

    async def list(self) -> protocol.Programs:
        """Return all programs of the tenant in alphabetical order."""
        return protocol.listed(await self._client.call(protocol.program_call("GET")), protocol.Programs)

    async def get(self, program: str) -> Program:
        """Return a program by its name, `name@hash` or hash. Raises `ServerError`."""
        return protocol.parsed(await self._client.call(protocol.program_call("GET", program)), Program)

    async def delete(self, program: str) -> None:
        """Delete a program by its name, with all versions, or one version. Raises `ServerError`."""
        await self._client.call(protocol.program_call("DELETE", program))

    async def run(
        self, program: str | None = None, args: Any = None, *, source: str | None = None, **options: Any
    ) -> Run:
        """Run to the end. Raises `RunFailedError` where it fails; cancelling the task ends the run."""
        call = protocol.launch(program, args, source=source, options=options)
        return protocol.finished(protocol.parsed(await self._client.call(call), Run))

    def stream(
        self, program: str | None = None, args: Any = None, *, source: str | None = None, **options: Any
    ) -> AsyncGenerator[RunEvent, None]:
        """Run a program and yield its events as they come; the last is `end`. Closing the generator ends the run."""
        return self._client.events(
            protocol.launch(program, args, source=source, options=options, stream=True), protocol.event_of
        )

    async def start(
        self, program: str | None = None, args: Any = None, *, source: str | None = None, **options: Any
    ) -> Run:
        """Start a run in the background; it goes on when this client is closed."""
        call = protocol.launch(program, args, source=source, options=options, background=True)
        return protocol.parsed(await self._client.call(call), Run)


class AsyncRuns:
    """Reads and controls the runs of the tenant: `weft.client.synchronous.Runs` with coroutines."""

    def __init__(self, client: AsyncClient):
        self._client = client

    async def list(self) -> protocol.Runs:
        """Return the runs of the tenant, newest first, without their results."""
        return protocol.listed(await self._client.call(protocol.run_call("GET")), protocol.Runs)

    async def get(self, run_id: str) -> Run:
        """Return a run, with its result if it has finished. Raises `ServerError`."""
        return protocol.parsed(await self._client.call(protocol.run_call("GET", run_id)), Run)

    async def cancel(self, run_id: str) -> Run:
        """Cancel a run and return it once it has ended."""
        return protocol.parsed(await self._client.call(protocol.run_call("POST", run_id, "cancel")), Run)

    async def delete(self, run_id: str) -> None:
        """Delete the record of a run that has ended. Raises `ServerError`."""
        await self._client.call(protocol.run_call("DELETE", run_id))

    async def logs(self, run_id: str) -> protocol.LogEntries:
        """Return the lines of a run's log that are kept."""
        return protocol.listed(await self._client.call(protocol.run_call("GET", run_id, "logs")), protocol.LogEntries)

    async def send(self, run_id: str, message: Any) -> Run:
        """Send a message to a run. Raises `ServerError`."""
        call = protocol.run_call("POST", run_id, "messages", {"message": message})
        return protocol.parsed(await self._client.call(call), Run)

    def messages(self, run_id: str) -> AsyncGenerator[RunEvent, None]:
        """Yield the events of a run, from the oldest message that is kept to its end."""
        return self._client.events(protocol.run_call("GET", run_id, "messages"), protocol.event_of)

    async def wait(self, run_id: str) -> Run:
        """Wait for the end of a run. Raises `RunFailedError` if it failed or was cancelled."""
        run = None
        async with aclosing(self.messages(run_id)) as events:
            async for event in events:
                run = event.run if event.type == "end" else run
        return protocol.finished(run or await self.get(run_id))

    @asynccontextmanager
    async def attach(self, run_id: str) -> AsyncIterator[AsyncAttached]:
        """Open a WebSocket to a run, to send and receive messages. Leaving the context does not end the run."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, WebSocketException

        headers = {"authorization": f"Bearer {self._client.api_key}"} if self._client.api_key else None
        try:
            socket = await connect(
                protocol.socket_address(self._client.url, run_id),
                additional_headers=headers,
                max_size=protocol.MAX_EVENT_BYTES,
                open_timeout=protocol.CONNECT_S,
            )
        except InvalidHandshake as error:
            raise protocol.refused(error) from error
        except (OSError, WebSocketException) as error:
            raise protocol.unreachable(self._client.url, error) from error
        async with socket:
            yield AsyncAttached(socket)


class AsyncAttached:
    """A WebSocket to a run. Iterating over it yields the run's events, the last of which is `end`."""

    def __init__(self, socket: Any):
        self._socket = socket

    async def send(self, message: Any) -> None:
        """Send a message to the run. A refusal comes as an event of type `error`."""
        await self._socket.send(protocol.command("message", message))

    async def cancel(self) -> None:
        """Cancel the run; its `end` follows."""
        await self._socket.send(protocol.command("cancel"))

    async def __aiter__(self) -> AsyncIterator[RunEvent]:
        with protocol.closing_told():
            async for frame in self._socket:
                yield protocol.event_in(frame)
