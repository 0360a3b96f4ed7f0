"""The sessions of a server: graphs that clients let grow, by tenant and label.

Owns their bounds: sessions and bytes of a tenant, and how long a session lives without a request. It does not know
HTTP.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from weft.abi.errors import InvalidRequest, NoValue, Overloaded, QuotaExceeded, Unsupported
from weft.config import WorkflowsConfig
from weft.endpoints.models import Models
from weft.workflow.backend.endpoint import EndpointBackend
from weft.workflow.criteria import Criterion
from weft.workflow.frontend.trace import FlowError
from weft.workflow.frontend.variable import Variable, reference_in
from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS, is_client_function
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, LlmNode
from weft.workflow.graph.templates import Reference
from weft.workflow.run.driver import RunServices
from weft.workflow.run.value_errors import NodeFailed
from weft.workflow.service.call_request import CallPlaceholder, submit_template
from weft.workflow.service.evaluations import ServedEvaluations
from weft.workflow.service.programs import NoPrograms, ProgramRunner, TenantPrograms
from weft.workflow.service.variables import FoundVariable, VariableTable, variable_id
from weft.workflow.session.run import SessionRun
from weft.workflow.session.trace import SessionTrace

T = TypeVar("T")
MAX_WAITING = 1000
"""Requests of a session that wait for values."""
MAX_NODES_AT_ONCE = 500
"""Nodes of one request, those of bodies aside."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


class IdleTimer(Protocol):
    """The time of a server."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when this time has passed on the same clock."""
        ...


class ServedSession:
    """One session. Its variables are in the server's table under `token`."""

    def __init__(
        self,
        tenant: str,
        session_id: str,
        models: Models,
        evaluations: ServedEvaluations,
        used: Callable[[], None],
        runner: ProgramRunner,
    ):
        self.tenant = tenant
        self.session_id = session_id
        self.token = ""
        self.num_bytes = 0
        """Of what was submitted, and of values."""
        self.num_growths = 0
        """Requests that added nodes, refused ones among them."""
        self.expiry: asyncio.Task[None]
        self._used = used
        self._num_waiting = 0
        programs = TenantPrograms(runner, tenant, session_id)
        backend = EndpointBackend(models, tenant, session_id)
        services = RunServices(backend, program=programs.program, source=programs.source)
        self._evaluations = evaluations
        self._growing = asyncio.Lock()
        """Held while nodes are read: those that come later may refer to them."""
        self.run = SessionRun(
            session_id,
            services,
            on_settled=self._settled,
            budget=evaluations.of_sessions(tenant),
            beside=partial(evaluations.on_thread, tenant),
            turn=evaluations.turn(tenant),
        )
        self._added: list[AnyNode] = []
        """Nodes of the trace that the run has not got yet."""
        self._trace = SessionTrace(
            self._added.append,
            self.run.has_failed,
            check_more=lambda node: _check_served(node, models),
        )

    # ---- nodes

    async def template(
        self,
        prompt: str,
        placeholders: Sequence[CallPlaceholder],
        fields: dict[str, Any],
        variable_of: Callable[[str], FoundVariable],
        *,
        raw: bool,
    ) -> dict[str, Variable]:
        """Make the calls of a template. Returns the variables of its outputs. Raises `InvalidRequest`."""

        def variable(id: str) -> Variable:
            found = variable_of(id)
            if found.owner is not self:
                raise InvalidRequest(f"{id} is a variable of another session.", "placeholders")
            return self._trace.variable(found.reference)

        if len(placeholders) > MAX_NODES_AT_ONCE:
            raise InvalidRequest(f"A request may have {MAX_NODES_AT_ONCE} placeholders at most.", "placeholders")
        made = partial(submit_template, self._trace, prompt, placeholders, fields, variable, raw=raw)
        return await asyncio.shield(self._grow(made))

    async def nodes(self, raw: list[Any]) -> dict[str, Variable]:
        """Add nodes. Returns their variables by id. Raises `InvalidRequest`, and `NoValue` in a session that is
        over."""
        if len(raw) > MAX_NODES_AT_ONCE:
            raise InvalidRequest(f"A request may add {MAX_NODES_AT_ONCE} nodes at most.", "nodes")

        def made() -> dict[str, Variable]:
            try:
                return {name: self._trace.variable(Reference(name)) for name in self._trace.extend(raw)}
            except FlowError as error:
                raise InvalidRequest(str(error), "nodes") from None

        return await asyncio.shield(self._grow(made))

    async def _grow(self, work: Callable[[], T]) -> T:
        """Let work on a thread add nodes, which begin to run also where it fails. Must not be cancelled: the thread
        goes on."""
        self._num_waiting += 1  # it does not expire meanwhile
        async with self._growing:
            try:
                return await self._evaluations.on_thread(self.tenant, work)
            finally:
                self._num_waiting -= 1
                self._used()
                added = self._added.copy()
                self._added.clear()
                if added:
                    self.num_growths += 1
                    self.run.submit(added)

    def variable_id(self, variable: Variable) -> str:
        """The id of a variable of the session."""
        return variable_id(self.token, reference_in(variable))

    # ---- as `VariableOwner`

    def __contains__(self, node: str) -> bool:
        return node in self.run

    async def get(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """Wait for a value; a request that waits keeps the session from expiring. Raises the errors of
        `VariableOwner.get`."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING:,} requests wait for values of this session; try again when some have one")
        self._num_waiting += 1
        self._used()
        try:
            return await self.run.get(reference, criterion, timeout_s)
        finally:
            self._num_waiting -= 1
            self._used()

    async def put(self, reference: Reference, value: Any) -> None:
        """Give a value from outside; counts as a use of the session. Raises `NotSettable`, `NoValue`."""
        self._used()
        await self.run.put(reference, value)

    def fail(self, reference: Reference, message: str) -> None:
        """Fail a value from outside; counts as a use of the session. Raises `NotSettable`, `NoValue`."""
        self._used()
        self.run.fail(reference, message)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was submitted."""
        return self._trace.is_empty

    @property
    def is_waited_for(self) -> bool:
        """Whether a client waits for a value."""
        return self._num_waiting > 0

    def _settled(self, node: str) -> None:
        try:
            self.num_bytes += len(msgspec.json.encode(self.run.value_now(Reference(node))))
        except NodeFailed as error:
            self.num_bytes += len(error.message)


class SessionService:
    """Used from one event loop."""

    def __init__(
        self,
        models: Models,
        variables: VariableTable,
        config: WorkflowsConfig,
        evaluations: ServedEvaluations,
        clock: IdleTimer,
        programs: ProgramRunner | None = None,
    ):
        self._models = models
        self._evaluations = evaluations
        self._programs = programs or NoPrograms()
        self._variables = variables
        self._config = config
        self._clock = clock
        self._sessions: dict[tuple[str, str], ServedSession] = {}
        """By tenant and label."""
        self._used_s: dict[tuple[str, str], float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        """Set when a session is used, and when one that waited has its value."""

    @contextmanager
    def submitting(
        self, tenant: str, session_id: str | None, num_bytes: int, *, continues: bool = False
    ) -> Iterator[ServedSession]:
        """The session of this label, or a new one, for a request of so many bytes that submits calls in the block. If
        the block raises, the bytes do not count unless calls have begun all the same, and a session without calls ends:
        its client does not know it. Raises `InvalidRequest` for a label that cannot be one, `QuotaExceeded`, and where
        it `continues` a session that there is not, `NoValue`."""
        session = self._open(tenant, session_id, num_bytes, continues=continues)
        num_growths = session.num_growths
        try:
            yield session
        except BaseException:
            if session.num_growths == num_growths:
                session.num_bytes -= num_bytes
            if session.is_empty and not session.is_waited_for:  # by another request, which began with the same label
                why = "the request that began the session was refused"
                self._forget((tenant, session.session_id), why)
                self._later(session.run.close(why))
            raise

    def _open(self, tenant: str, session_id: str | None, num_bytes: int, *, continues: bool) -> ServedSession:
        label = session_id if session_id is not None else f"session-{secrets.token_hex(8)}"
        if not _ID.match(label):
            raise InvalidRequest("session_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", "session_id")
        config, mine = self._config, list(self._of(tenant))
        if sum(session.num_bytes for session in mine) + num_bytes > config.max_session_bytes:
            raise QuotaExceeded(
                f"The values of your sessions have more than {config.max_session_bytes:,} bytes "
                "(workflows.max_session_bytes): end some first."
            )
        session = self._sessions.get((tenant, label))
        if session is None:
            if continues:
                raise NoValue(
                    f"The session {label} has ended: none of its calls was made for {config.session_idle_s:g} s "
                    "(workflows.session_idle_s), or the server began anew.",
                    "session_id",
                )
            if len(mine) >= config.max_sessions:
                raise QuotaExceeded(
                    f"You have {config.max_sessions} sessions (workflows.max_sessions): end some first."
                )
            session = self._begin(tenant, label)
        session.num_bytes += num_bytes
        self._use(tenant, label)
        return session

    async def end(self, tenant: str, session_id: str) -> None:
        """End a session: what is in progress is cancelled. Raises `NoValue` where there is none."""
        if (tenant, session_id) not in self._sessions:
            raise NoValue(f"There is no session {session_id[:200]!r}.", "session")
        await self._end((tenant, session_id), "the session was ended")

    async def idle(self) -> None:
        """Wait until no client waits for a value."""
        while any(session.is_waited_for for session in self._sessions.values()):
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """End all sessions; requests that wait for their values get `NoValue`."""
        for key in list(self._sessions):
            await self._end(key, "the server shut down")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _of(self, tenant: str) -> Iterable[ServedSession]:
        return (session for (owner, _), session in self._sessions.items() if owner == tenant)

    def _begin(self, tenant: str, label: str) -> ServedSession:
        key = (tenant, label)
        used = partial(self._use, tenant, label)
        session = ServedSession(tenant, label, self._models, self._evaluations, used, self._programs)
        session.token = self._variables.open(tenant, session)
        self._sessions[key] = session
        self._used_s[key] = self._clock.now()
        session.expiry = asyncio.create_task(self._expire(key, session))
        return session

    def _use(self, tenant: str, label: str) -> None:
        self._news.set()
        if (tenant, label) in self._sessions:
            self._used_s[tenant, label] = self._clock.now()

    async def _expire(self, key: tuple[str, str], session: ServedSession) -> None:
        """End a session that nobody has used for a time."""
        idle_s = self._config.session_idle_s
        while (left := self._used_s[key] + idle_s - self._clock.now()) > 0 or session.is_waited_for:
            await self._clock.sleep(left if left > 0 else idle_s)
        self._later(self._end(key, f"the session expired after {idle_s:g} s without a request"))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, key: tuple[str, str], why: str) -> None:
        session = self._forget(key, why)
        if session is not None:
            await session.run.close(why)

    def _forget(self, key: tuple[str, str], why: str) -> ServedSession | None:
        """Remove a session from the tables; its run is still to be closed."""
        session = self._sessions.pop(key, None)
        if session is not None:
            del self._used_s[key]
            self._variables.close(session.tenant, session.token, why)
            session.expiry.cancel()
        return session


def _check_served(node: AnyNode, models: Models) -> None:
    """Raise `InvalidRequest` for what a session of a server cannot run."""
    for inner in all_nodes((node,)):
        if isinstance(inner, LlmNode):
            models.find(inner.request.get("model"))
        elif is_client_function(inner):
            raise Unsupported(
                f"{inner.id}: a session on a server has no functions but {', '.join(BUILTIN_FUNCTIONS)} and those "
                "with `source`; make it `external` and set its value",
                "nodes",
            )
