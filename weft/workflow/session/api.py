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

from weft.loop_thread import LoopThread
from weft.workflow.api import RunOptions, Target, model_identity, opened_services
from weft.workflow.backend.openai import OpenAIBackend
from weft.workflow.criteria import Criterion
from weft.workflow.frontend.trace import tracing
from weft.workflow.graph.nodes import AnyNode
from weft.workflow.graph.templates import Reference
from weft.workflow.run.backend import ModelBackend
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.instructions import RunCounts, RunLimits
from weft.workflow.session.run import SessionRun
from weft.workflow.session.trace import SessionTrace


class SessionOptions(TypedDict, total=False):
    """How the calls of a session run. Those that runs have too are as in `RunOptions`."""

    session_id: str
    """The label that the session's calls carry; absent: one is drawn."""
    functions: Mapping[str, Callable[..., Any]]
    limits: RunLimits
    concurrency: Concurrency
    function_timeout_s: float
    cache: str | Path
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
        self._run: SessionRun
        self._running: AsyncGenerator[SessionRun, None]

    # ---- values, for variables

    def get(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """As `Variable.get`."""
        if not self.is_open:
            return self._run.value_now(reference)
        return self._thread.run(self._run.get(reference, criterion, timeout_s))

    async def aget(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """As `Variable.aget`."""
        if not self.is_open:
            return self._run.value_now(reference)
        return await asyncio.wrap_future(self._thread.submit(self._run.get(reference, criterion, timeout_s)))

    def set(self, reference: Reference, value: Any) -> None:
        """As `Variable.set`."""

        async def on_loop() -> None:
            self._run.set(reference, value)

        if self.is_open:
            self._thread.run(on_loop())
        else:
            self._run.set(reference, value)

    # ---- all of it

    def wait(self) -> None:
        """Wait until all calls made so far have a value or have failed."""
        self._thread.run(self._run.wait())

    async def wait_async(self) -> None:
        """As `wait`, for asynchronous code."""
        await asyncio.wrap_future(self._thread.submit(self._run.wait()))

    @property
    def counts(self) -> RunCounts:
        """Calls and tokens so far, of the session and of each node."""
        return self._run.counts

    # ---- life

    def __enter__(self) -> Self:
        """Open the session. Calls in this thread make nodes of it."""
        self._begin()
        self._thread.run(self._open())
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session: calls in progress are cancelled. Values that are there stay."""
        self._exits.close()
        self.is_open = False
        self._thread.run(self._close())
        self._end()

    async def __aenter__(self) -> Self:
        """As `__enter__`, for asynchronous code: calls in this task, and in tasks that it starts, make nodes."""
        self._begin()
        await asyncio.wrap_future(self._thread.submit(self._open()))
        self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `__exit__`."""
        self._exits.close()
        self.is_open = False
        await asyncio.wrap_future(self._thread.submit(self._close()))
        self._end()

    def _begin(self) -> None:
        if hasattr(self, "_run"):
            raise RuntimeError("a session is opened once: make another one")
        self._thread = LoopThread() if isinstance(self._on, str) else self._on.workflow_host().thread

    async def _open(self) -> None:
        self._running = self._services()
        self._run = await anext(self._running)

    def _opened(self) -> None:
        self.is_open = True
        self._exits.enter_context(tracing(self._trace))

    async def _close(self) -> None:
        await self._running.aclose()

    def _end(self) -> None:
        if isinstance(self._on, str):
            self._thread.stop()

    async def _services(self) -> AsyncGenerator[SessionRun, None]:
        """What runs the session, on its event loop, until the generator is closed."""
        options = self._options
        given = cast(RunOptions, {key: value for key, value in options.items() if key != "session_id"})
        given["functions"] = ChainMap(self._trace.names.functions, dict(options.get("functions", {})))
        async with (
            _backend(self._on, options) as backend,
            opened_services(given, backend, model_identity(self._on, given)) as services,
        ):
            run = SessionRun(self.id, services, options.get("concurrency"), options.get("limits"))
            try:
                yield run
            finally:
                await run.close()

    def _submit(self, node: AnyNode) -> None:
        self._thread.loop.call_soon_threadsafe(self._run.submit, [node])

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
    """A session, for `with` or `async with`. `on` is a `weft.LLM`, or the address of a server with OpenAI's API.

    Leaving the block cancels the calls that are in progress: what is wanted is asked for within it, by `get` of a
    variable or `wait` of the session."""
    return WorkflowSession(on, options)
