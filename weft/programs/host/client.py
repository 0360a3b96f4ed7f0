"""`HostClient`: starts a program host's process, gives it runs, watches it, and starts it again when it dies or hangs.

Owns the front's picture of every run, so that who asks is answered here, and nothing is lost with the process but what
ran in it: those runs fail with `host_dead`. Engines and chat go on. The process starts with the first run, or when
`open` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from weft.abi.errors import Draining, HostDead, LimitExceeded, WeftError
from weft.programs.history import History
from weft.programs.host import wire
from weft.programs.host.pipe import Pipe
from weft.programs.registry import Code
from weft.programs.run.runs import Run, RunRecord, RunSpec, RunUsage
from weft.programs.types import Caller

PING_EVERY_S = 1.0
MAX_PAUSE_S = 30.0
START_PATIENCE_S = 60.0
"""How long a launch waits for a host that is starting."""
STOP_GRACE_S = 10.0

_log = logging.getLogger("weft.programs")


class AddressedEngine(Protocol):
    """An engine that others can attach to: `weft.engine.supervisor.ProcessEngine`."""

    on_ready_change: Callable[[bool], None] | None

    @property
    def address(self) -> str | None:
        """Where it listens; None while it is down."""


class HostClient:
    """Implements `weft.programs.host.program_host.RunHost`. Used from one event loop."""

    def __init__(
        self,
        args: wire.HostArgs,
        engines: Sequence[AddressedEngine],
        resolve: Callable[[str, str], Awaitable[Code]],
        history: History | None = None,
    ):
        """`engines` are those of `args.models`, in their order; their `on_ready_change` is taken."""
        self.history = history or History(max_ended=args.config.max_kept_runs)
        self.num_restarts = 0
        self._args = args
        self._engines = engines
        self._resolve = resolve
        self._pipe: Pipe | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._unusable: WeftError | None = None
        self._runs: dict[str, Run] = {}
        self._calls = itertools.count(1)
        self._asked: dict[int, asyncio.Future[wire.Answer]] = {}
        self._finding: set[asyncio.Task[None]] = set()
        self._folder: Path | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def ready(self) -> bool:
        """Whether runs are taken now."""
        return self._ready.is_set()

    async def open(self) -> None:
        """Start the process, if it has not been started, and wait until it takes runs. Raises `HostDead`."""
        if self._closing:
            raise Draining("The server is shutting down and takes no new runs.")
        if self._supervisor is None or self._supervisor.done():
            self._unusable = None
            self._supervisor = asyncio.create_task(self._supervise(), name="weft-program-host")
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                await self._ready.wait()
        except TimeoutError:
            raise HostDead("the program host does not start; see the server's log, and try again later") from None
        if self._unusable is not None:
            self._ready.clear()
            raise self._unusable

    async def start(self, spec: RunSpec, caller: Caller) -> Run:
        """Launch a run. Raises `HostDead`, and what the host refuses it with."""
        await self.open()
        run = Run(spec, caller.tenant, model=spec.model or self._args.models[0].name)
        run.control = _Remote(self, run)
        self._runs[run.id] = run
        self.history.add(run)
        launch = wire.Launch(
            next(self._calls),
            run.id,
            spec,
            caller.tenant,
            caller.namespace,
            caller.request_id,
            caller.priority,
        )
        try:
            await self._ask(launch)
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
        """Stop the process; runs end. Idempotent."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._stop_process()
        self._lose_all(HostDead("the server was stopped before this run was done"))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- for runs

    def tell(self, message: wire.FromFront) -> None:
        """Send to the host; lost where there is none."""
        if self._pipe is not None:
            self._pipe.send(wire.encode(message))

    async def confirm(self, run: Run) -> RunUsage | None:
        """See `Control.confirm`."""
        answer = await self._ask(wire.Confirm(next(self._calls), run.id))
        return answer.usage

    async def _ask(self, question: wire.Launch | wire.Confirm) -> wire.Answer:
        if self._pipe is None:
            raise HostDead("the program host is down; it is being restarted, try again shortly")
        waiting: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._asked[question.call] = waiting
        self.tell(question)
        try:
            answer = await waiting
        finally:
            self._asked.pop(question.call, None)
        if answer.error is not None:
            raise answer.error.error()
        return answer

    # ---- supervision

    async def _supervise(self) -> None:
        pause_s = 0.5
        for index, engine in enumerate(self._engines):
            engine.on_ready_change = lambda ready, index=index: self._attach(index)
        while not self._closing:
            began_s = asyncio.get_running_loop().time()
            reason = await self._live()
            if self._unusable is not None and not self.num_restarts:
                await self._stop_process()
                self._ready.set()  # whoever waits for it hears why
                return
            self._ready.clear()
            self._lose_all(HostDead(f"the program host {reason}; this run is lost, start it again"))
            await self._stop_process()
            self.num_restarts += 1
            if asyncio.get_running_loop().time() - began_s > MAX_PAUSE_S:
                pause_s = 0.5
            _log.error("the program host %s; restarting it in %g s", reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _live(self) -> str:
        """Start a process and watch it until it ends; what happened, as the end of a sentence."""
        try:
            process = await self._spawn()
        except OSError as error:
            return f"cannot be started: {error}"
        ended = asyncio.ensure_future(process.wait())
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            while True:
                await asyncio.wait({ended}, timeout=PING_EVERY_S)
                pipe = self._pipe
                if ended.done() or pipe is None:
                    return _describe(ended.result())
                self.tell(wire.Ping())
                silent_s = loop.time() - max(pipe.last_heard_s, started_s)
                patience_s = self._args.config.progress_deadline_s
                if silent_s > (patience_s if self.ready else max(patience_s, START_PATIENCE_S)):
                    return f"did not answer for {silent_s:.0f} s and was killed"
        finally:
            ended.cancel()

    async def _spawn(self) -> asyncio.subprocess.Process:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="weft-"))  # readable by this user alone
        address = f"ipc://{self._folder}/programs-{self.num_restarts}-{os.getpid()}"
        self._pipe = Pipe(address, self._receive, bind=False)
        for index in range(len(self._engines)):
            self._attach(index)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weft.children.entry",
            "weft.programs.host.process",
            address,
            stdin=asyncio.subprocess.PIPE,
        )
        self._process = process
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(self._args) + b"\n")
        return process

    def _attach(self, index: int) -> None:
        address = self._engines[index].address
        if address is None:
            self.tell(wire.Detach(index, "the engine is down; it is being restarted, try again in a moment"))
        else:
            self.tell(wire.Attach(index, address))

    async def _stop_process(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        process = self._process
        if process is None:
            return
        # Whoever does this may be cancelled meanwhile; then it is done again.
        if process.returncode is None:
            await self._end_process(process)
        if process.stdin is not None:
            # Or asyncio keeps what belongs to a process that is gone.
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
        self._process = None

    async def _end_process(self, process: asyncio.subprocess.Process) -> None:
        if self._closing and process.stdin is not None:
            process.stdin.close()  # it ends by itself
        else:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

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
            case wire.Ready():
                self._ready.set()
            case wire.Unusable(why):
                self._unusable = why.error()
            case wire.Answer(call):
                waiting = self._asked.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case wire.Find(call, tenant, reference):
                task = asyncio.create_task(self._find(call, tenant, reference))
                self._finding.add(task)
                task.add_done_callback(self._finding.discard)
            case wire.Began(record):
                self._began(record)
            case wire.Running(run_id):
                if (run := self._runs.get(run_id)) is not None:
                    run.start()
            case wire.Said(run_id, body):
                self._said(run_id, body)
            case wire.Logged(run_id, line):
                if (run := self._runs.get(run_id)) is not None:
                    run.log(line)
            case wire.Ended(record, result):
                if (run := self._runs.get(record.id)) is not None:
                    self._end(run, lambda: run.adopt(record, result))

    def _began(self, record: RunRecord) -> None:
        code = Code(kind=record.kind, content=b"", hash=record.hash, name=record.program)
        spec = RunSpec(code=code, limits=record.limits, trusted=record.trusted, model=record.model)
        run = Run(spec, record.tenant, id=record.id, parent=record.parent, model=record.model)
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
            self.tell(wire.Found(call, await self._resolve(tenant, reference)))
        except WeftError as error:
            self.tell(wire.Found(call, None, wire.ErrorTold.of(error)))


class _Remote:
    """The `Control` of a run that another process carries out."""

    def __init__(self, client: HostClient, run: Run):
        self._client, self._run = client, run
        self._usage = RunUsage()
        self._taken = 0

    def deliver(self, message: bytes) -> None:
        if len(message) > self._run.spec.limits.message_bytes:
            raise LimitExceeded(f"A message of {len(message)} bytes exceeds the run's message_bytes.", "message_bytes")
        self._client.tell(wire.Deliver(self._run.id, message))

    def cancel(self, error: WeftError) -> None:
        self._client.tell(wire.CancelRun(self._run.id, wire.ErrorTold.of(error)))

    def usage(self) -> RunUsage:
        return self._usage

    async def confirm(self) -> None:
        self._usage = await self._client.confirm(self._run) or self._usage

    def took(self, num_bytes: int) -> None:
        """The front has taken a message."""
        self._taken += num_bytes
        if self._taken >= wire.READ_EVERY_BYTES:
            self._client.tell(wire.Read(self._run.id, self._taken))
            self._taken = 0


def _describe(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
