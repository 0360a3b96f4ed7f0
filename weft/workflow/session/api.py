"""`weft.session`: calls that run as they are made, on a model of this process or on a server.

with weft.session(on=llm) as session:
    made = write("a snake game")
    print(made.code.get())
"""

from __future__ import annotations

import asyncio
import secrets
from collections import ChainMap
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast

from weft.loop_thread import LoopThread, shared_loop_thread
from weft.workflow.actuals import RunCounts
from weft.workflow.backend.openai import OpenAIBackend, http_client
from weft.workflow.criteria import Criterion
from weft.workflow.frontend.trace import FlowError, tracing, untraced
from weft.workflow.graph.nodes import AnyNode
from weft.workflow.graph.templates import Reference
from weft.workflow.options import SESSION_OPTIONS, checked_options
from weft.workflow.run.backend import ModelBackend
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.functions import FUNCTION_TIMEOUT_S
from weft.workflow.run.instructions import RunLimits
from weft.workflow.session.remote import RemoteSession, check_remote, has_sessions
from weft.workflow.session.run import SessionRun
from weft.workflow.session.trace import SessionTrace
from weft.workflow.targets import (
    RunOptions,
    Target,
    check_target,
    model_identity,
    opened_services,
    value_budget,
)

_OF_CLIENTS = {"limits", "concurrency", "cache", "max_value_bytes"}
"""Options that only a session whose graph grows in the client has."""


class SessionOptions(TypedDict, total=False):
    """How the calls of a session run. Those that runs have too are as in `RunOptions`."""

    session_id: str
    """The label that the session's calls carry; absent: one is drawn."""
    functions: Mapping[str, Callable[..., Any]]
    limits: RunLimits
    concurrency: Concurrency
    function_timeout_s: float
    cache: str | Path
    max_value_bytes: int
    """Of all values of the session."""
    model: str
    api_key: str


class WorkflowSession:
    """A graph that grows while it runs. Within `with` or `async with`, calls of semantic and native functions, flows
    and operators begin to run, and their variables are futures."""

    def __init__(self, on: Target, options: SessionOptions):
        self.id = options.get("session_id") or f"session-{secrets.token_hex(8)}"
        self.is_open = False
        self._on = on
        self._options = options
        self._trace = SessionTrace(self._submit, lambda name: self._run.has_failed(name), self)
        self._exits = ExitStack()
        self._thread: LoopThread
        self._run: SessionRun | RemoteSession
        self._running: AsyncGenerator[SessionRun | RemoteSession, None]

    # ---- values, for variables

    def get(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """Wait for a value on the session's event loop; of a closed session, the value that is there. Raises the errors
        of `Variable.get`."""
        if not self.is_open:
            return self._run.value_now(reference)
        return self._thread.run(self._run.get(reference, criterion, timeout_s))

    async def aget(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """Wait for a value without blocking the caller's event loop; otherwise like `get`."""
        if not self.is_open:
            return self._run.value_now(reference)
        return await asyncio.wrap_future(self._thread.submit(self._run.get(reference, criterion, timeout_s)))

    def set(self, reference: Reference, value: Any) -> None:
        """Give a value from outside. Raises `NotSettable`, and `NoValue` in a closed session."""
        if not self.is_open:
            raise self._run.missing(reference.name)
        self._thread.run(self._run.put(reference, value))

    # ---- all of it

    def wait(self) -> None:
        """Wait until all calls made so far have a value or have failed. Returns at once when the session is closed."""
        if not self.is_open:
            return
        self._thread.run(self._run.wait())

    async def wait_async(self) -> None:
        """Wait for all calls made so far without blocking the event loop; otherwise like `wait`."""
        if not self.is_open:
            return
        await asyncio.wrap_future(self._thread.submit(self._run.wait()))

    @property
    def counts(self) -> RunCounts:
        """Calls and tokens so far, of the session and of each node. Raises `Unsupported` for a session on a server of
        ours."""
        return self._run.counts

    # ---- life

    def __enter__(self) -> Self:
        """Open the session. Calls in this thread make nodes of it."""
        self._begin()
        untraced().run(self._thread.run, self._open())
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session: calls in progress are cancelled. Values that are there stay."""
        self._exits.close()
        self.is_open = False
        self._thread.run(self._close())

    async def __aenter__(self) -> Self:
        """As `__enter__`, for asynchronous code: calls in this task, and in tasks that it starts, make nodes."""
        self._begin()
        await asyncio.wrap_future(untraced().run(self._thread.submit, self._open()))
        self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `__exit__`."""
        self._exits.close()
        self.is_open = False
        await asyncio.wrap_future(self._thread.submit(self._close()))

    def _begin(self) -> None:
        if hasattr(self, "_run"):
            raise RuntimeError("a session is opened once: make another one")
        self._thread = shared_loop_thread() if isinstance(self._on, str) else self._on.workflow_host().thread

    async def _open(self) -> None:
        self._running = self._services()
        self._run = await anext(self._running)

    def _opened(self) -> None:
        self.is_open = True
        self._exits.enter_context(tracing(self._trace))

    async def _close(self) -> None:
        await self._running.aclose()

    async def _services(self) -> AsyncGenerator[SessionRun | RemoteSession, None]:
        """What runs the session, on its event loop, until the generator is closed."""
        options = self._options
        functions = ChainMap(self._trace.names.functions, dict(options.get("functions", {})))
        if isinstance(self._on, str) and not _OF_CLIENTS & set(options):
            async with http_client(self._on, options.get("api_key")) as http:
                if await has_sessions(http):
                    seconds = options.get("function_timeout_s", FUNCTION_TIMEOUT_S)
                    remote = RemoteSession(http, self.id, functions, seconds, options.get("model"))
                    self._trace.check_more = check_remote
                    try:
                        yield remote
                    finally:
                        await remote.close()
                    return
        given = cast(RunOptions, {key: value for key, value in options.items() if key != "session_id"})
        given["functions"] = functions
        async with (
            _backend(self._on, options) as backend,
            opened_services(given, backend, model_identity(self._on, given)) as services,
        ):
            limits, budget = options.get("limits"), value_budget(options)
            run = SessionRun(self.id, services, options.get("concurrency"), limits, budget=budget)
            try:
                yield run
            finally:
                await run.close()

    def _submit(self, node: AnyNode) -> None:
        if not self.is_open:
            raise FlowError("the session is closed: make calls within its block")
        self._thread.loop.call_soon_threadsafe(self._run.submit, [node], context=untraced())

    def __repr__(self) -> str:
        return f"<session {self.id}, {'open' if self.is_open else 'closed'}>"


@asynccontextmanager
async def _backend(on: Target, options: SessionOptions) -> AsyncGenerator[ModelBackend, None]:
    if not isinstance(on, str):
        yield on.workflow_host().backend
        return
    backend = OpenAIBackend(on, options.get("model"), options.get("api_key"))
    try:
        yield backend
    finally:
        await backend.close()


def session(on: Target, **options: Unpack[SessionOptions]) -> WorkflowSession:
    """A session, for `with` or `async with`. `on` is a `weft.LLM`, or the address of a server with OpenAI's API. On a
    server of ours the graph grows there; with `limits`, `concurrency`, `cache` or `max_value_bytes`, which are a
    client's, it grows here.

    Leaving the block cancels the calls that are in progress: what is wanted is asked for within it, by `get` of a
    variable or `wait` of the session."""
    check_target(on, takes_client=False)
    checked = checked_options(options, SESSION_OPTIONS, "a session")
    return WorkflowSession(on, cast(SessionOptions, checked))
