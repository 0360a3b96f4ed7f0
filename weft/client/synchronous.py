"""`Client`, the blocking client. `weft.client.protocol` makes its requests and reads the responses."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from weft.client import protocol
from weft.client.protocol import ApiCall
from weft.client.values import Program, Run, RunEvent, SessionPage
from weft.client.workflows import Workflows
from weft.core.lines import lines_of

E = TypeVar("E")


class Client:
    """A client of a Weft server; `programs`, `runs` and `workflows` have its methods. Several threads may use it."""

    def __init__(self, url: str = protocol.DEFAULT_URL, *, api_key: str | None = None, timeout_s: float | None = None):
        """`timeout_s` bounds the wait for each answer; None: a run may take as long as it takes."""
        self.url = url
        self.api_key = api_key
        self._http = httpx.Client(**protocol.client_options(url, api_key, timeout_s))
        self.programs = Programs(self)
        self.runs = Runs(self)
        self.workflows = Workflows(self)

    def call(self, call: ApiCall) -> bytes:
        """Make a request; the body of its answer. Raises `ClientError` and `ServerError`."""
        try:
            response = self._http.request(
                call.method, call.path, json=call.json, content=call.content, headers=dict(call.headers)
            )
        except httpx.HTTPError as error:
            raise protocol.unreachable(self.url, error) from error
        return protocol.checked(response)

    def workflow_server(self) -> Workflows:
        """Where workflows run that are given this client as `on`."""
        return self.workflows

    def sessions(self, *, limit: int = 100, model: str | None = None) -> SessionPage:
        """Return the sequences of the tenant that wait, those that wait longest first. Raises `ServerError`."""
        return protocol.parsed(self.call(protocol.sessions_call(limit, model)), SessionPage)

    def events(self, call: ApiCall, read: Callable[[str], E | None]) -> Generator[E, None, None]:
        """Make a request whose answer is a stream, of which `read` decodes the lines. Closing the generator closes the
        connection."""
        try:
            with self._http.stream(call.method, call.path, json=call.json) as response:
                if not response.is_success:
                    response.read()
                    protocol.checked(response)
                for line in lines_of(response.iter_bytes()):
                    event = read(line)
                    if event is not None:
                        yield event
        except httpx.HTTPError as error:
            raise protocol.unreachable(self.url, error) from error

    def close(self) -> None:
        """Close all connections of this client. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Programs:
    """Uploads and runs programs. `options` of a run: `limits`, `messages`, `model`, `priority`,
    `reserve_pages`, `cache_salt`, as in the HTTP API."""

    def __init__(self, client: Client):
        self._client = client

    def upload(self, name: str, source: str | bytes | Path) -> Program:
        """Upload a new version. A path is read, text is Python, bytes may be a Wasm module. Raises `ClientError`."""
        return protocol.parsed(self._client.call(protocol.upload(name, source)), Program)

    def list(self) -> protocol.Programs:
        """Return all programs of the tenant in alphabetical order."""
        return protocol.listed(self._client.call(protocol.program_call("GET")), protocol.Programs)

    def get(self, program: str) -> Program:
        """Return a program by its name, `name@hash` or hash. Raises `ServerError`."""
        return protocol.parsed(self._client.call(protocol.program_call("GET", program)), Program)

    def delete(self, program: str) -> None:
        """Delete a program by its name, with all versions, or one version. Raises `ServerError`."""
        self._client.call(protocol.program_call("DELETE", program))

    def run(self, program: str | None = None, args: Any = None, *, source: str | None = None, **options: Any) -> Run:
        """Run to the end. Raises `RunFailedError` where it fails; leaving ends the run."""
        call = protocol.launch(program, args, source=source, options=options)
        return protocol.finished(protocol.parsed(self._client.call(call), Run))

    def stream(
        self, program: str | None = None, args: Any = None, *, source: str | None = None, **options: Any
    ) -> Generator[RunEvent, None, None]:
        """Run a program and yield its events as they come; the last is `end`. Closing the generator ends the run."""
        return self._client.events(
            protocol.launch(program, args, source=source, options=options, stream=True), protocol.event_of
        )

    def start(self, program: str | None = None, args: Any = None, *, source: str | None = None, **options: Any) -> Run:
        """Start a run in the background; it goes on when this client is closed."""
        call = protocol.launch(program, args, source=source, options=options, background=True)
        return protocol.parsed(self._client.call(call), Run)


class Runs:
    """Reads and controls the runs of the tenant."""

    def __init__(self, client: Client):
        self._client = client

    def list(self) -> protocol.Runs:
        """Return the runs of the tenant, newest first, without their results."""
        return protocol.listed(self._client.call(protocol.run_call("GET")), protocol.Runs)

    def get(self, run_id: str) -> Run:
        """Return a run, with its result if it has finished. Raises `ServerError`."""
        return protocol.parsed(self._client.call(protocol.run_call("GET", run_id)), Run)

    def cancel(self, run_id: str) -> Run:
        """Cancel a run and return it once it has ended."""
        return protocol.parsed(self._client.call(protocol.run_call("POST", run_id, "cancel")), Run)

    def delete(self, run_id: str) -> None:
        """Delete the record of a run that has ended. Raises `ServerError`."""
        self._client.call(protocol.run_call("DELETE", run_id))

    def logs(self, run_id: str) -> protocol.LogEntries:
        """Return the lines of a run's log that are kept."""
        return protocol.listed(self._client.call(protocol.run_call("GET", run_id, "logs")), protocol.LogEntries)

    def send(self, run_id: str, message: Any) -> Run:
        """Send a message to a run. Raises `ServerError`."""
        call = protocol.run_call("POST", run_id, "messages", {"message": message})
        return protocol.parsed(self._client.call(call), Run)

    def messages(self, run_id: str) -> Generator[RunEvent, None, None]:
        """Yield the events of a run, from the oldest message that is kept to its end."""
        return self._client.events(protocol.run_call("GET", run_id, "messages"), protocol.event_of)

    def wait(self, run_id: str) -> Run:
        """Wait for the end of a run. Raises `RunFailedError` if it failed or was cancelled."""
        run = None
        for event in self.messages(run_id):
            run = event.run if event.type == "end" else run
        return protocol.finished(run or self.get(run_id))

    @contextmanager
    def attach(self, run_id: str) -> Iterator[Attached]:
        """Open a WebSocket to a run, to send and receive messages. Leaving the context does not end the run."""
        from websockets.exceptions import InvalidHandshake, WebSocketException
        from websockets.sync.client import connect

        headers = {"authorization": f"Bearer {self._client.api_key}"} if self._client.api_key else None
        try:
            socket = connect(
                protocol.socket_address(self._client.url, run_id),
                additional_headers=headers,
                max_size=protocol.MAX_EVENT_BYTES,
                open_timeout=protocol.CONNECT_S,
            )
        except InvalidHandshake as error:
            raise protocol.refused(error) from error
        except (OSError, WebSocketException) as error:
            raise protocol.unreachable(self._client.url, error) from error
        with socket:
            yield Attached(socket)


class Attached:
    """A WebSocket to a run. Iterating over it yields the run's events, the last of which is `end`."""

    def __init__(self, socket: Any):
        self._socket = socket

    def send(self, message: Any) -> None:
        """Send a message to the run. A refusal comes as an event of type `error`."""
        self._socket.send(protocol.command("message", message))

    def cancel(self) -> None:
        """Cancel the run; its `end` follows."""
        self._socket.send(protocol.command("cancel"))

    def __iter__(self) -> Iterator[RunEvent]:
        with protocol.closing_told():
            for frame in self._socket:
                yield protocol.event_in(frame)
