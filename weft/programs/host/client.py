"""`HostClient`: a program host in a child process, as the front's `RunHost`.

Owns the front's record of every run, from which it answers requests about runs. When the process dies, its runs fail
with `host_dead`; records, engines and chat continue, and `weft.children.supervisor` starts another process. The first
process starts with the first run, or when `open` is called.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from weft.abi.errors import Draining, HostDead, LimitExceeded, WeftError
from weft.children.supervisor import ChildSettings, ChildSupervisor
from weft.core.wire import ErrorRecord
from weft.programs.history import History
from weft.programs.host import wire
from weft.programs.host.pipe import Pipe
from weft.programs.registry import Code
from weft.programs.run.runs import Run, RunRecord, RunSpec, RunUsage
from weft.programs.types import Caller

START_PATIENCE_S = 60.0
"""Longest wait of a launch for a host that is starting."""

_log = logging.getLogger("weft.programs")


class AddressedEngine(Protocol):
    """An engine to which other processes can attach: `weft.engine.supervisor.ProcessEngine`."""

    on_ready_change: Callable[[bool], None] | None

    @property
    def address(self) -> str | None:
        """The address at which the engine listens; None while it is down."""


class HostClient:
    """Implements `weft.programs.host.program_host.RunHost`, and `weft.children.supervisor.ChildOwner`. Used from one
    event loop."""

    def __init__(
        self,
        args: wire.HostArgs,
        engines: Sequence[AddressedEngine],
        resolve: Callable[[str, str], Awaitable[Code]],
        history: History | None = None,
    ):
        """`engines` are those of `args.models`, in the same order. The client sets their `on_ready_change`."""
        self.history = history or History(max_ended=args.config.max_kept_runs)
        self._args = args
        self._engines = engines
        self._resolve = resolve
        self._pipe: Pipe | None = None
        patience_s = args.config.progress_deadline_s
        settings = ChildSettings(
            name="the program host",
            module="weft.programs.host.process",
            args=msgspec.json.encode(args),
            deadline_s=patience_s,
            start_deadline_s=max(patience_s, START_PATIENCE_S),
        )
        self.child = ChildSupervisor(settings, self)
        self._ready = asyncio.Event()
        self._unusable: WeftError | None = None
        self._runs: dict[str, Run] = {}
        self._calls = itertools.count(1)
        self._asked: dict[int, asyncio.Future[wire.CallAnswered]] = {}
        self._uncharged: defaultdict[str, float] = defaultdict(float)
        """Tenant -> processor time that has not been sent to a host yet."""
        self._finding: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The id of the host process; None while there is none."""
        return self.child.pid

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the host process."""
        return self.child.num_restarts

    @property
    def ready(self) -> bool:
        """Whether the host accepts runs now."""
        return self._ready.is_set()

    async def open(self) -> None:
        """Start the process, if it has not been started, and wait until it accepts runs. Raises `HostDead`."""
        if self._closing:
            raise Draining("The server is shutting down and takes no new runs.")
        if not self.child.is_running:
            self._unusable = None
            for index, engine in enumerate(self._engines):
                engine.on_ready_change = lambda ready, index=index: self._attach(index)
            self.child.start()
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                await self._ready.wait()
        except TimeoutError:
            raise HostDead("the program host does not start; see the server's log, and try again later") from None
        if self._unusable is not None:
            self._ready.clear()
            raise self._unusable

    async def start(self, spec: RunSpec, caller: Caller) -> Run:
        """Launch a run. Raises `HostDead`, or the error of a refusal by the host."""
        await self.open()
        run = Run(spec, caller.tenant, model=spec.model or self._args.models[0].name)
        run.control = _Remote(self, run)
        self._runs[run.id] = run
        self.history.add(run)
        try:
            await self._ask(wire.LaunchRun(next(self._calls), run.id, spec, caller))
        except BaseException as error:
            known = error if isinstance(error, WeftError) else HostDead("its launch was given up")
            if not isinstance(error, WeftError):
                run.cancel("its launch was given up")
            self._end(run, lambda: run.fail(known))
            if isinstance(error, WeftError):
                self.history.forget(run.tenant, run.id)
            raise
        run.drop_input()
        return run

    async def close(self) -> None:
        """Stop the process and end all runs. Idempotent."""
        self._closing = True
        await self.child.close()
        self._lose_all(HostDead("the server was stopped before this run was done"))

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Charge processor time spent in this process to a tenant's rate in the host, once the host is ready."""
        if self.ready:
            self.tell(wire.ChargeTenant(tenant, cpu_s))
        else:
            self._uncharged[tenant] += cpu_s

    # ---- for runs

    def tell(self, message: wire.FromFront) -> None:
        """Send a message to the host; it is dropped while there is no host."""
        if self._pipe is not None:
            self._pipe.send(wire.encode(message))

    async def confirm(self, run: Run) -> RunUsage | None:
        """Wait until all messages delivered before have arrived. Returns the usage of the run. Raises `HostDead`, or
        the first refusal of a message."""
        answer = await self._ask(wire.QueryRun(next(self._calls), run.id))
        return answer.usage

    async def _ask(self, question: wire.LaunchRun | wire.QueryRun) -> wire.CallAnswered:
        if self._pipe is None:
            raise HostDead("the program host is down; it is being restarted, try again shortly")
        waiting: asyncio.Future[wire.CallAnswered] = asyncio.get_running_loop().create_future()
        self._asked[question.call] = waiting
        self.tell(question)
        try:
            answer = await waiting
        finally:
            self._asked.pop(question.call, None)
        if answer.error is not None:
            raise answer.error.error()
        return answer

    # ---- of its child

    def connect(self, address: str) -> None:
        """Send the addresses of the engines. The host answers when it accepts runs."""
        self._unusable = None
        self._pipe = Pipe(address, self._receive, bind=False)
        for index in range(len(self._engines)):
            self._attach(index)

    def disconnect(self) -> None:
        """Close the connection to the host process. Idempotent."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def ping(self) -> None:
        """Ask the host for an answer from its event loop."""
        self.tell(wire.PingHost())

    def lost(self, reason: str) -> bool:
        """Fail all runs. A host that reported why it cannot start is started again only by the next `open`."""
        if self._unusable is not None and not self.child.num_restarts:
            self._ready.set()  # `open` raises the failure
            return False
        self._ready.clear()
        self._lose_all(HostDead(f"the program host {reason}; this run is lost, start it again"))
        return True

    def _attach(self, index: int) -> None:
        address = self._engines[index].address
        if address is None:
            self.tell(wire.DetachEngine(index, "the engine is down; it is being restarted, try again in a moment"))
        else:
            self.tell(wire.AttachEngine(index, address))

    def _lose_all(self, error: HostDead) -> None:
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)
        for run in list(self._runs.values()):
            self._end(run, lambda run=run: run.fail(error))  # type: ignore[misc]
        for task in self._finding:
            task.cancel()

    # ---- from the host

    def _receive(self, data: bytes) -> None:
        try:
            message = wire.decode_from_host(data)
        except msgspec.MsgspecError as error:
            _log.error("the program host sent a message that cannot be read: %s", error)
            return
        match message:
            case wire.HostReady():
                self.child.is_ready = True
                for tenant, cpu_s in self._uncharged.items():
                    self.tell(wire.ChargeTenant(tenant, cpu_s))
                self._uncharged.clear()
                self._ready.set()
            case wire.HostFailed(why):
                self._unusable = why.error()
            case wire.CallAnswered(call):
                waiting = self._asked.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case wire.FindProgram(call, tenant, reference):
                task = asyncio.create_task(self._find(call, tenant, reference))
                self._finding.add(task)
                task.add_done_callback(self._finding.discard)
            case wire.RunCreated(record):
                self._began(record)
            case wire.RunStarted(run_id):
                if (run := self._runs.get(run_id)) is not None:
                    run.start()
            case wire.MessageSent(run_id, body):
                self._said(run_id, body)
            case wire.LineLogged(run_id, line):
                if (run := self._runs.get(run_id)) is not None:
                    run.log(line)
            case wire.RunOver(record, result):
                if (run := self._runs.get(record.id)) is not None:
                    self._end(run, lambda: run.adopt(record, result))

    def _began(self, record: RunRecord) -> None:
        run = Run.described(record)
        run.control = _Remote(self, run)
        self._runs[run.id] = run
        self.history.add(run)

    def _said(self, run_id: str, body: bytes) -> None:
        run = self._runs.get(run_id)
        if run is None:
            return
        run.emit(body)
        if isinstance(run.control, _Remote):
            run.control.took(len(body))

    def _end(self, run: Run, end: Callable[[], None]) -> None:
        if self._runs.pop(run.id, None) is not None:
            end()
            self.history.ended(run)

    async def _find(self, call: int, tenant: str, reference: str) -> None:
        try:
            self.tell(wire.ProgramFound(call, await self._resolve(tenant, reference)))
        except WeftError as error:
            self.tell(wire.ProgramFound(call, None, ErrorRecord.of(error)))


class _Remote:
    """The `Control` of a run that another process executes."""

    def __init__(self, client: HostClient, run: Run):
        self._client, self._run = client, run
        self._usage = RunUsage()
        self._taken = 0

    def deliver(self, message: bytes) -> None:
        if len(message) > self._run.spec.limits.message_bytes:
            raise LimitExceeded(f"A message of {len(message)} bytes exceeds the run's message_bytes.", "message_bytes")
        self._client.tell(wire.DeliverMessage(self._run.id, message))

    def cancel(self, error: WeftError) -> None:
        self._client.tell(wire.CancelRun(self._run.id, ErrorRecord.of(error)))

    def usage(self) -> RunUsage:
        return self._usage

    async def confirm(self) -> None:
        self._usage = await self._client.confirm(self._run) or self._usage

    def took(self, num_bytes: int) -> None:
        """Record that the front has taken a message of the run."""
        self._taken += num_bytes
        if self._taken >= wire.READ_EVERY_BYTES:
            self._client.tell(wire.MessagesTaken(self._run.id, self._taken))
            self._taken = 0
