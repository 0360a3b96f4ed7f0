"""One session on the event loop that runs: nodes come in, values are waited for.

Owns the tasks of the session and the futures of those who wait. What is evaluated when is `GrowingState`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from weft.abi.errors import InvalidRequest, NotSettable, NoValue
from weft.workflow.actuals import RunCounts
from weft.workflow.criteria import Criterion
from weft.workflow.graph.nodes import AnyNode, ExternalNode
from weft.workflow.graph.schema_check import schema_mistake
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.values import RowError
from weft.workflow.run.bounds import EvaluationBudget
from weft.workflow.run.driver import Concurrency, Driver, RunServices, Turn, next_pass
from weft.workflow.run.frames import RowFailure
from weft.workflow.run.functions import checked_value
from weft.workflow.run.growing import GrowingState
from weft.workflow.run.instructions import AwaitExternal, RunLimits, Settled
from weft.workflow.run.objectives import hints_of
from weft.workflow.run.order import CallHints, CallSite
from weft.workflow.run.value_errors import NodeFailed, kind_of, message_of


class SessionRun:
    """One session. All methods but `value_now`, `has_failed` and `counts` are called on its event loop."""

    def __init__(
        self,
        session_id: str,
        services: RunServices,
        concurrency: Concurrency | None = None,
        limits: RunLimits | None = None,
        on_settled: Callable[[str], None] = lambda node: None,
        budget: EvaluationBudget | None = None,
        beside: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread,
        turn: Turn = next_pass,
    ):
        """Calls of models carry `session_id` as the label of their requests. `on_settled` is told each node that has
        its value or failed. `budget` and `turn` are as those of `RunState` and `Driver`; `beside` does work on a
        thread."""
        self._beside = beside
        self.session_id = session_id
        self._now = asyncio.get_running_loop().time
        self._state = GrowingState(limits, self._hints, budget)
        services = services._replace(external=self._from_outside)
        self._driver = Driver(self._state, iter(()), services, concurrency, turn=turn)
        self._externals: dict[str, asyncio.Future[Any]] = {}
        self._schemas: dict[str, Any] = {}
        """Of values from outside."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._errors: dict[int, NodeFailed] = {}
        """By the identity of failures that the state keeps, those of nodes: so all who get one have the same error."""
        self._over = ""
        """Why the session is over; empty while it is not."""
        self._on_settled = on_settled
        self._turning = asyncio.get_running_loop().create_task(self._turn())

    # ---- nodes and values

    def submit(self, nodes: Iterable[AnyNode]) -> None:
        """Add nodes, as `GrowingState.grow`. Raises `NoValue` in a session that is over."""
        added = list(nodes)
        if self._over:
            raise NoValue(f"{added[0].id} can have no value: {self._over}", added[0].id)
        for node in added:
            if isinstance(node, ExternalNode):
                self._externals[node.id] = asyncio.get_running_loop().create_future()
                if node.schema is not None:
                    self._schemas[node.id] = node.schema
        self._state.grow(added)
        self._driver.wake()

    async def get(
        self, reference: Reference, criterion: Criterion | None = None, timeout_s: float | None = None
    ) -> Any:
        """Wait for a value. Raises `NodeFailed`, `NoValue` and `TimeoutError`."""
        name = reference.name
        if criterion is not None and name in self._state and not self._over:
            self._state.want(name, criterion, self._now())
        if name in self._state and not self._state.has_settled(name) and not self._over:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(name, set()).add(waiting)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiting
            except TimeoutError:
                raise TimeoutError(f"{name} has no value after {timeout_s:g} s") from None
            finally:
                others = self._waiting.get(name, set())
                others.discard(waiting)
                if not others:
                    self._waiting.pop(name, None)
        return self.value_now(reference)

    async def put(self, reference: Reference, value: Any) -> None:
        """Give a value from outside. Raises `NotSettable` where the variable is computed or has ended, `InvalidRequest`
        for what is not JSON, is too large or does not follow its schema, and `NoValue` where there is no such variable
        or the session is over."""
        self._to_set(reference)
        # On a thread: the check of a large value against its schema may take seconds.
        checked = await self._beside(partial(self._checked, reference, value))
        self._to_set(reference).set_result(checked)

    def _checked(self, reference: Reference, value: Any) -> Any:
        try:
            checked = checked_value(value)
        except RowError as error:
            raise InvalidRequest(f"{reference}: {error.message}", "value") from None
        schema = self._schemas.get(reference.name)
        mistake = None if schema is None else schema_mistake(schema, checked)
        if mistake is not None:
            raise InvalidRequest(f"{reference} does not follow its schema: {mistake}", "value")
        return checked

    def fail(self, reference: Reference, message: str) -> None:
        """Say that a value from outside will not come: its node fails with this message. Raises as `put`."""
        self._to_set(reference).set_exception(RowError(message))

    def _to_set(self, reference: Reference) -> asyncio.Future[Any]:
        """What waits for a value from outside."""
        name = reference.name
        known = self._externals.get(name)
        if reference.path:
            raise NotSettable(f"{reference} is a part of a value: set {name}", name)
        if name not in self._state or (self._over and known is not None and not known.done()):
            raise self.missing(name)
        if known is None:
            raise NotSettable(f"{name} is computed: only a variable of ops.external is set", name)
        if known.done():
            raise NotSettable(f"{name} was set already: a variable is set once", name)
        if self._state.has_settled(name):
            raise NotSettable(f"{name} was set too late: nothing waits for it any more", name)
        return known

    async def wait(self) -> None:
        """Wait until all that was submitted by now has a value or has failed, or the session is over."""
        for name in self._state.unsettled:
            with suppress(NodeFailed, NoValue):
                await self.get(Reference(name))

    def value_now(self, reference: Reference) -> Any:
        """A value that is there. Raises `NodeFailed`, and `NoValue` where there is none yet."""
        if not self._state.has_settled(reference.name):
            raise self.missing(reference.name)
        value = self._state.value(reference)
        if isinstance(value, RowFailure):
            failed = NodeFailed.of(value)
            if value is self._state.failure(reference.name):
                failed = self._errors.setdefault(id(value), failed)
            raise failed.with_traceback(None)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def has_failed(self, name: str) -> bool:
        """Whether a node has failed."""
        return self._state.has_settled(name) and self._state.failure(name) is not None

    @property
    def counts(self) -> RunCounts:
        """What the session has done so far."""
        return self._state.counts

    # ---- life

    async def close(self, why: str = "the session was closed before it was computed") -> None:
        """End the session: what is in progress is cancelled, and what has no value will have none. `why` follows the
        name of a variable that is asked for later. Idempotent."""
        self._over = self._over or why
        self._turning.cancel()
        try:
            await asyncio.gather(self._turning, return_exceptions=True)
        finally:
            # Also if the request that ends the session is cancelled meanwhile.
            self._state.close()  # a task that never began has not done it
            self._release()

    async def _turn(self) -> None:
        try:
            async with aclosing(self._driver.results()) as notices:
                async for notice in notices:
                    assert isinstance(notice, Settled)
                    self._on_settled(notice.node)
                    for waiting in self._waiting.pop(notice.node, ()):
                        if not waiting.done():
                            waiting.set_result(None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._over = f"the session ended with {kind_of(error)}: {message_of(error)}"
            self._release()
            raise

    def _hints(self, site: CallSite) -> CallHints:
        told = hints_of(self._state.objective(site.label), self._now())
        return CallHints({"session_id": self.session_id, **told})

    def _release(self) -> None:
        """Let all who wait see that the session is over."""
        for each in self._waiting.values():
            for waiting in each:
                if not waiting.done():
                    waiting.set_result(None)
        self._waiting.clear()

    async def _from_outside(self, instruction: AwaitExternal) -> Any:
        # Shielded: a time limit ends the wait of the node, and a late value is refused, not lost.
        return await asyncio.shield(self._externals[instruction.node.id])

    def missing(self, name: str) -> NoValue:
        """The error of a variable without a value."""
        if name not in self._state:
            return NoValue(f"{name} has no value: no call of this session makes it", name)
        what = "nobody set it, and " if name in self._externals else ""
        return NoValue(f"{name} has no value: {what}{self._over or 'it is not computed yet'}", name)
