"""The state that requests share: models, programs, metrics, and whether the server accepts requests.

Owns the start and the end of each model's engine client, and the set of running requests. It does not know HTTP.
`weft.server.run` and the tests create it; routes read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.abi.errors import Draining, WeftError
from weft.config import ServerConfig
from weft.endpoints.dialect import dialect_of
from weft.endpoints.models import ActiveModel, Models, ServedModel
from weft.metrics import FrontMetrics
from weft.server.api_keys import parse_keys
from weft.server.bodies import BodyBudget
from weft.server.places import Places
from weft.server.programs import ServedPrograms, inline_programs
from weft.server.timer import Timer
from weft.server.traces import Traces
from weft.server.workflow_programs import ServedProgramRunner
from weft.workflow.service.service import WorkflowService
from weft.workflow.service.sessions import SessionService
from weft.workflow.service.variables import VariableTable

logger = logging.getLogger("weft.server")


class Service:
    """The state that all routes share: configuration, models, programs and metrics."""

    def __init__(
        self,
        config: ServerConfig,
        models: list[ServedModel],
        timer: Timer | None = None,
        programs: Callable[[Models], ServedPrograms] = inline_programs,
        workflows: Callable[[Models], WorkflowService] = WorkflowService,
    ):
        self.config = config
        self.timer = timer or Timer()
        self.metrics = FrontMetrics()
        self.traces = Traces(config.trace)
        self.models = Models(
            ActiveModel(
                model,
                config,
                dialect_of(model.tokenizer, config.tool_call_parser, config.reasoning_parser),
                self.metrics.model(model.names[0]),
                self.traces.on_event,
            )
            for model in models
        )
        self.programs = programs(self.models)
        runner = ServedProgramRunner(self.programs, self.models)
        self.workflows = workflows(self.models)
        self.workflows.serve_programs(runner)
        self.variables = VariableTable()
        self.sessions = SessionService(
            self.models, self.variables, self.workflows.config, self.workflows.evaluations, self.timer, runner
        )
        num_tenants = len({key.tenant for key in parse_keys(config.api_keys)})
        self.bodies = BodyBudget(config.max_bodies_bytes, num_tenants)
        """Counts the bytes of request bodies in memory."""
        self._places = Places(config.max_concurrent_requests, num_tenants)
        self.draining = False
        self.failure: WeftError | None = None
        """The error of an engine that could not start at all."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when an engine cannot start at all."""
        self._interrupts: set[Callable[[Exception], None]] = set()
        self._num_working = 0
        """Requests in progress for whose end a drain waits."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._starting: set[asyncio.Task[None]] = set()

    # ---- life

    def start(self) -> None:
        """Start to wait for every engine, in tasks."""
        for model in self.models:
            task = asyncio.create_task(self._wait_ready(model))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        for work in (self._start_programs(), self._start_workflows()):
            task = asyncio.create_task(work)
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_programs(self) -> None:
        try:
            await self.programs.begin()
        except WeftError as error:
            logger.error("programs cannot be run: %s", error.message)

    async def _start_workflows(self) -> None:
        try:
            await self.workflows.begin()
        except WeftError as error:
            logger.error("workflows that were interrupted do not go on: %s", error.message)

    async def _wait_ready(self, model: ActiveModel) -> None:
        try:
            info = await model.engine.wait_ready()
        except WeftError as error:
            logger.error("model %s cannot be served: %s", model.names[0], error.message)
            self.failure = error
            self.on_failure()
        else:
            model.was_ready = True
            logger.info("model %s is ready on %s: context %d", model.names[0], info.device, info.max_context)

    async def close(self) -> None:
        """Close the clients of all engines."""
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await self.workflows.runs.close()
        await self.programs.close()
        await self.sessions.close()
        await self.workflows.close()
        for model in self.models:
            await model.engine.close()

    @property
    def ready(self) -> bool:
        """Whether every engine answers and new requests are accepted."""
        return not self.draining and self.models.ready

    # ---- running requests

    @property
    def num_active(self) -> int:
        """Number of requests in progress that count against the limit."""
        return self._places.num_taken

    @contextmanager
    def active(self, tenant: str, *, delays_drain: bool = True) -> Iterator[None]:
        """Count a request in progress, until the end of the block. Raises `Overloaded` if there are too many.

        `delays_drain`: whether a drain waits for its end.
        """
        self._places.take(tenant, self.timer.now())
        self._num_working += delays_drain
        if delays_drain:
            self._idle.clear()
        try:
            yield
        finally:
            self._places.give_back(tenant, self.timer.now())
            self._num_working -= delays_drain
            if self._num_working == 0:
                self._idle.set()

    @contextmanager
    def interruptible(self, interrupt: Callable[[Exception], None]) -> Iterator[None]:
        """Inside the block, `interrupt_all` calls `interrupt` with the error that ends the request."""
        self._interrupts.add(interrupt)
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones, and interrupt those that outlast `timeout_s`."""
        self.draining = True
        logger.info("draining: %d requests under way, at most %g s", self.num_active, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await self.programs.idle()  # after the requests, which launch runs
                await self.sessions.idle()
        except TimeoutError:
            await self.interrupt_all()

    async def interrupt_all(self) -> None:
        """End every running request with `Draining`, stop runs of workflows where they are, and cancel every run of a
        program."""
        if self._interrupts:
            logger.warning("interrupting %d requests that outlasted the drain", len(self._interrupts))
        for interrupt in list(self._interrupts):
            interrupt(Draining("The server shut down before this request was done; send it again."))
        await self.workflows.runs.close()  # a row whose program is cancelled would fail
        self.programs.cancel_all("the server shut down before this run was done")
