"""`ProcessEngine`: starts an engine process, talks to it, watches it, and starts it again when it dies or hangs.

A death is seen at once (the process ends); a hang when nothing has been heard for `progress_deadline_s` although a
ping was sent: then the process is killed. Either way every open operation fails with `EngineDead` and the engine is
started again, with a growing pause. An engine that cannot load its model the first time is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weft.abi.errors import EngineDead, WeftError, from_kind
from weft.config import EngineConfig
from weft.core.wire import Command, EngineInfo, Envelope, Failed, Hello, Loading, Welcome
from weft.engine.connection import Connection
from weft.engine.process import LaunchArgs
from weft.engine.request_tracker import TrackingClient
from weft.worker.memory import usable_cores
from weft.worker.sizing import kernel_environment, kernel_threads

PING_EVERY_S = 1.0
MAX_PAUSE_S = 30.0
STOP_GRACE_S = 10.0
"""How long a process that was asked to stop may take before it is killed."""

Progress = Callable[[int, int], None]

_log = logging.getLogger("weft.engine")


class ProcessEngine(TrackingClient):
    """Implements `weft.engine.client.EngineClient`. `wait_ready` starts the process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        trace: bool = False,
        log_level: str = "warning",
    ):
        self._config = config
        self._args = LaunchArgs(config=config, trace=trace, log_level=log_level)
        self._progress = progress
        super().__init__(self._deliver)
        self._connection: Connection | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._welcome: asyncio.Future[EngineInfo] | None = None
        self._folder: Path | None = None
        self._address: str | None = None
        self._closing = False
        self.num_restarts = 0
        self.on_ready_change: Callable[[bool], None] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def address(self) -> str | None:
        """Where the engine listens, for further clients (`weft.engine.attached`); None while it is not ready."""
        return self._address if self.ready else None

    async def wait_ready(self) -> EngineInfo:
        """Start the process, and wait until it has loaded its model; after its death, until its successor has.

        Raises what the first loading raised, and `EngineDead` once the engine is closed.
        """
        if self._supervisor is None:
            self._started = asyncio.get_running_loop().create_future()
            self._supervisor = asyncio.create_task(self._supervise(), name="weft-engine-supervisor")
        if self._started is None:
            raise EngineDead("the engine was closed")
        await asyncio.shield(self._started)
        return await self._requests.until_ready()

    async def close(self) -> None:
        """Stop the process. Idempotent."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._stop_process()
        self._requests.close(EngineDead("the engine was stopped"))
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDead("the engine was stopped before it had started"))
            self._started.exception()  # nobody may be waiting for it
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # Supervision

    async def _supervise(self) -> None:
        pause_s = 0.5
        while not self._closing:
            try:
                info = await self._start()
            except WeftError as error:
                await self._stop_process()
                if self._started is not None and not self._started.done():
                    self._started.set_exception(error)
                    self._requests.close(error)
                    return
                _log.error("the engine could not be started again: %s; trying again in %g s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
                continue
            self._requests.begin(info)
            self._announce(True)
            if self._started is not None and not self._started.done():
                self._started.set_result(info)
            began = asyncio.get_running_loop().time()
            reason = await self._watch()
            self._requests.fail(EngineDead(f"the engine {reason}; it is being restarted, try again in a moment"))
            self._announce(False)
            await self._stop_process()
            self.num_restarts += 1
            if asyncio.get_running_loop().time() - began > MAX_PAUSE_S:
                pause_s = 0.5
            _log.error("the engine %s; restarting it in %g s", reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _start(self) -> EngineInfo:
        """Start a process and wait for its welcome."""
        try:
            address, process = await self._spawn()
        except OSError as error:
            raise EngineDead(f"the engine process cannot be started: {error}") from error
        self._process, self._address = process, address
        self._welcome = asyncio.get_running_loop().create_future()
        if process.stdin is None:
            raise EngineDead("the engine process has no stdin")
        process.stdin.write(msgspec.json.encode(self._args) + b"\n")
        self._connection = Connection(address, self._receive)
        self._connection.send([Hello()])
        ended = asyncio.ensure_future(process.wait())
        waiting: set[asyncio.Future[Any]] = {ended, self._welcome}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self._welcome.done():
            await asyncio.sleep(0.05)  # its last words may still be on their way
        if self._welcome.done():
            ended.cancel()
            return self._welcome.result()
        raise EngineDead(f"the engine process {_describe(ended.result())} before it was ready; see its log above")

    async def _spawn(self) -> tuple[str, asyncio.subprocess.Process]:
        """A process, and the address at which it will listen."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="weft-"))  # readable by this user alone
        address = f"ipc://{self._folder}/engine-{self.num_restarts}-{os.getpid()}"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weft.children.entry",
            "weft.engine.process",
            address,
            stdin=asyncio.subprocess.PIPE,
            env=self._environment(),
        )
        return address, process

    async def _watch(self) -> str:
        """Wait until the process ends or hangs; what happened, as the end of a sentence."""
        process, connection = self._process, self._connection
        if process is None or connection is None:
            return "is gone"
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(process.wait())
        try:
            while True:
                pinged_at = loop.time()
                ping = asyncio.ensure_future(self._requests.stats())
                done, _ = await asyncio.wait({ended}, timeout=PING_EVERY_S)
                if done:
                    ping.cancel()
                    return _describe(ended.result())
                while not ping.done():
                    silent_s = loop.time() - max(connection.last_heard_s, pinged_at)
                    if silent_s > self._config.progress_deadline_s:
                        return f"did not answer for {silent_s:.0f} s and was killed"
                    await asyncio.wait({ended, ping}, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        ping.cancel()
                        return _describe(ended.result())
                ping.exception()
        finally:
            ended.cancel()

    async def _stop_process(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            await self._end_process(process)
        if process.stdin is not None:
            # Or asyncio keeps what belongs to a process that is gone.
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()

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

    # Messages

    def _deliver(self, commands: list[Command]) -> None:
        if self._connection is not None:
            self._connection.send(commands)

    def _receive(self, envelope: Envelope) -> None:
        if self._welcome is not None and not self._welcome.done():
            for event in envelope.events:
                self._starting(self._welcome, event)
            return
        self._requests.receive(envelope)

    def _starting(self, welcome: asyncio.Future[EngineInfo], event: object) -> None:
        if isinstance(event, Loading) and self._progress is not None:
            self._progress(event.done, event.total)
        elif isinstance(event, Welcome):
            welcome.set_result(event.info)
        elif isinstance(event, Failed):
            welcome.set_exception(from_kind(event.kind, event.message))

    def _announce(self, ready: bool) -> None:
        if self.on_ready_change is not None:
            self.on_ready_change(ready)

    def _environment(self) -> dict[str, str]:
        return kernel_environment(kernel_threads(self._config.threads, usable_cores())) | os.environ


def _describe(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
