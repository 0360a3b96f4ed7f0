"""The program host's process, run by `weft.children.entry`. Its arguments are one line of JSON on stdin.

It loads the models' tokenizers, connects to the front at the address and to the engines that the front names, and runs
programs until its stdin closes, and then removes the folder of its socket: the front may have been killed.
`weft.programs.host.client` starts and supervises it. A fault in a sandbox can end this process, but not the front or an
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import logging
import sys
from pathlib import Path

import msgspec

from weft.abi.errors import EngineDead, HostDead, InvalidRequest, Overloaded, RunCancelled, WeftError
from weft.children.entry import call_when_stdin_closes
from weft.children.progress import made_progress
from weft.config import ProgramsConfig
from weft.core.clock import Clock
from weft.core.wire import ErrorRecord
from weft.engine.attached import AttachedEngine
from weft.programs.host import wire
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.pipe import Pipe
from weft.programs.host.program_host import HostOptions, HostParts, ProgramHost
from weft.programs.network.client import Network
from weft.programs.quota.accounts import Accounts
from weft.programs.registry import Code
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunChange
from weft.programs.runtime import Runtime
from weft.programs.sandbox.sandbox import SandboxConfig
from weft.store.database import Database
from weft.store.values import DatabaseValueStore, MemoryValueStore, ValueStore
from weft.tokenizers.load import load_tokenizer

EXIT_UNUSABLE = 3
ENGINE_PATIENCE_S = 5.0
"""Longest wait of a launch for engines that are being attached."""

_log = logging.getLogger("weft.programs")


def host_parts(
    models: list[ProgramModel],
    config: ProgramsConfig,
    store: ValueStore,
    guests: GuestFactory,
    clock: Clock | None = None,
) -> HostParts:
    """The parts of a host with this configuration. `clock` is the clock of times and rates."""
    network = Network(config.network, tenant_connections=lambda tenant: config.of(tenant).max_connections_per_tenant)
    accounts = Accounts(config, clock)
    return HostParts(models=models, store=store, network=network, guests=guests, accounts=accounts)


def guests_for(config: ProgramsConfig) -> GuestFactory:
    """The factory of guests. Its sandbox has one slot for each concurrent run."""
    return GuestFactory(SandboxConfig(slots=config.max_runs))


def open_store(folder: Path | None, config: ProgramsConfig) -> ValueStore:
    """The store of the programs' values: a database in the folder, or memory if there is no folder."""
    if folder is None:
        return MemoryValueStore(config.max_store_bytes)
    return DatabaseValueStore(Database(folder), config.max_store_bytes)


class HostServer:
    """The host's side of the wire: messages in, events of runs out."""

    def __init__(self, engines: list[AttachedEngine], address: str):
        self._engines = engines
        self._pipe = Pipe(address, self._receive, bind=True)
        self.heard = asyncio.Event()
        """Set at the front's first message. A message sent before that has no receiver and is lost."""
        self._host: ProgramHost | None = None
        self._runs: dict[str, Run] = {}
        self._unread: dict[str, int] = {}
        """Run id -> bytes of its messages that the front has not acknowledged."""
        self._refused: dict[str, WeftError] = {}
        """Run id -> the first refusal of a message since the front's last query."""
        self._calls = itertools.count(1)
        self._finding: dict[int, asyncio.Future[Code]] = {}
        self._given_up: set[str] = set()
        """Ids of runs that were cancelled before they were launched."""
        self._launching: set[asyncio.Task[None]] = set()

    def tell(self, message: wire.FromHost) -> None:
        """Queue a message for the front."""
        self._pipe.send(wire.encode(message))

    def serve(self, host: ProgramHost) -> None:
        """Accept runs from now on."""
        self._host = host
        host.on_run = self._watch
        self.tell(wire.HostReady())

    def close(self) -> None:
        """Send the queued messages, then close the connection."""
        self._pipe.close()

    async def resolve(self, tenant: str, reference: str) -> Code:
        """Ask the front for a program. Raises `UnknownProgram`."""
        call = next(self._calls)
        self._finding[call] = asyncio.get_running_loop().create_future()
        self.tell(wire.FindProgram(call, tenant, reference))
        try:
            return await self._finding[call]
        finally:
            del self._finding[call]

    # ---- from the front

    def _receive(self, data: bytes) -> None:
        try:
            message = wire.decode_from_front(data)
        except msgspec.MsgspecError as error:
            _log.error("the front sent a message that cannot be read: %s", error)
            return
        self.heard.set()
        made_progress()  # the front pings every second, so the counter advances while no program makes a call
        match message:
            case wire.PingHost():
                self.tell(wire.HostAlive(len(self._runs)))
            case wire.AttachEngine(model, address):
                self._engines[model].attach(address)
            case wire.DetachEngine(model, text):
                self._engines[model].detach(EngineDead(text))
            case wire.LaunchRun():
                task = asyncio.create_task(self._launch(message), name=message.run)
                self._launching.add(task)
                task.add_done_callback(self._launching.discard)
            case wire.ProgramFound(call, found, refusal):
                self._found(call, found, refusal)
            case wire.DeliverMessage(run_id, body):
                self._deliver(run_id, body)
            case wire.ChargeTenant(tenant, cpu_s):
                if self._host is not None:
                    self._host.charge(tenant, cpu_s)
            case wire.QueryRun(call, run_id):
                self._confirm(call, run_id)
            case wire.CancelRun(run_id, why):
                self._cancel(run_id, why.error())
            case wire.MessagesTaken(run_id, num_bytes):
                if run_id in self._unread:
                    self._unread[run_id] -= num_bytes

    async def _launch(self, message: wire.LaunchRun) -> None:
        # An engine that is being attached has not answered yet; a program must not see it as down.
        with contextlib.suppress(TimeoutError, WeftError):
            async with asyncio.timeout(ENGINE_PATIENCE_S):
                for engine in self._engines:
                    if engine.attached:
                        await engine.wait_ready()
        error: WeftError | None = None
        try:
            if self._host is None:
                raise HostDead("the program host is still starting")
            if message.run in self._given_up:
                self._given_up.discard(message.run)
                raise RunCancelled("the run was cancelled before it was launched")
            self._host.launch(message.spec, message.caller, id=message.run)
        except WeftError as refused:
            error = refused
        except ValueError as wrong:
            error = InvalidRequest(str(wrong))
        except Exception:  # whoever launched it waits for an answer
            _log.exception("run %s could not be launched", message.run)
            error = WeftError(f"the run could not be launched; the host's log has the cause under {message.run}")
        if error is not None:
            self._refused.pop(message.run, None)
        self.tell(wire.CallAnswered(message.call, ErrorRecord.of(error) if error is not None else None))

    def _cancel(self, run_id: str, error: WeftError) -> None:
        run = self._runs.get(run_id)
        if run is None and any(task.get_name() == run_id for task in self._launching):
            self._given_up.add(run_id)
        elif run is not None and run.control is not None:
            run.control.cancel(error)

    def _deliver(self, run_id: str, body: bytes) -> None:
        run = self._runs.get(run_id)
        if run is None:
            if any(task.get_name() == run_id for task in self._launching):
                later = Overloaded("the run is being launched; send the message again in a moment")
                self._refused.setdefault(run_id, later)
            return  # or the run has ended, and the message that says so is on its way to the front
        try:
            run.send(body)
        except WeftError as error:
            self._refused.setdefault(run_id, error)

    def _confirm(self, call: int, run_id: str) -> None:
        refused = self._refused.pop(run_id, None)
        run = self._runs.get(run_id)
        usage = run.record().usage if run is not None else None
        self.tell(wire.CallAnswered(call, ErrorRecord.of(refused) if refused is not None else None, usage))

    def _found(self, call: int, found: Code | None, error: ErrorRecord | None) -> None:
        waiting = self._finding.get(call)
        if waiting is None or waiting.done():
            return
        if found is not None:
            waiting.set_result(found)
        elif error is not None:
            waiting.set_exception(error.error())

    # ---- to the front

    def _watch(self, run: Run) -> None:
        self._runs[run.id] = run
        self._unread[run.id] = 0
        run.watcher = self._on_change
        run_id = run.id  # a closure over the run would be a reference cycle, which keeps its result
        run.has_room = lambda: self._unread.get(run_id, 0) < wire.WINDOW_BYTES
        if run.record().parent is not None:
            self.tell(wire.RunCreated(run.record()))

    def _on_change(self, run: Run, change: RunChange) -> None:
        if change.message is not None:
            self._unread[run.id] += len(change.message)
            self.tell(wire.MessageSent(run.id, change.message))
        elif change.line is not None:
            self.tell(wire.LineLogged(run.id, change.line))
        elif change.status == "running":
            self.tell(wire.RunStarted(run.id))
        elif run.ended:
            self._runs.pop(run.id, None)
            self._unread.pop(run.id, None)
            self._refused.pop(run.id, None)
            self.tell(wire.RunOver(run.record(), run.result))


def calm_collector() -> None:
    """Make Python's garbage collector examine long-lived objects less often; most objects of a program host are such.

    Nine hundred paused programs have a hundred thousand objects. A full collection takes 150 ms, in which no program
    gets its tokens; with Python's defaults, every burst of launches causes one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 10, 25)


async def serve(args: wire.HostArgs, address: str) -> int:
    """Run programs until stdin closes; the exit status of the process."""
    engines = [AttachedEngine() for _ in args.models]
    server = HostServer(engines, address)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    # Not before the socket is bound, which needs its folder.
    call_when_stdin_closes(lambda: loop.call_soon_threadsafe(stopping.set), address)
    await server.heard.wait()
    try:
        models = []
        for spec, engine in zip(args.models, engines, strict=True):
            tokenizer = await asyncio.to_thread(load_tokenizer, spec.model, spec.revision, spec.offline)
            models.append(
                ProgramModel(
                    spec.name,
                    Runtime(engine, tokenizer, engine_wait_s=args.engine_wait_s),
                    tool_call_parser=spec.tool_call_parser,
                    reasoning_parser=spec.reasoning_parser,
                )
            )
        store = open_store(Path(args.store_folder) if args.store_folder is not None else None, args.config)
        parts = host_parts(models, args.config, store, guests_for(args.config))
    except (WeftError, OSError) as error:
        known = error if isinstance(error, WeftError) else WeftError(str(error))
        server.tell(wire.HostFailed(ErrorRecord.of(known)))
        server.close()
        return EXIT_UNUSABLE
    parts = dataclasses.replace(parts, resolve=server.resolve)
    host = ProgramHost(parts, HostOptions(max_waiting=args.config.max_waiting, allow_trusted=True, max_ended=0))
    calm_collector()
    server.serve(host)
    await stopping.wait()
    await host.close()
    await parts.close()
    for engine in engines:
        await engine.close()
    server.close()
    return 0


def main(address: str) -> int:
    """Run a program host until told to stop; the exit status of the process."""
    args = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.HostArgs)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _be_first_to_go()
    return asyncio.run(serve(args, address))


def _be_first_to_go() -> None:
    """If memory runs out, make the kernel end this process before an engine, the front, or a process of another user:
    only programs are lost with it, and it is restarted."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
