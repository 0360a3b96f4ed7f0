"""`ChildSupervisor`: starts, watches, stops and restarts one child process of a front.

Owns the process, the private directory of its socket and the pauses between restarts. Messages on the socket belong to
the owner: `weft.engine.supervisor` for an engine, `weft.programs.host.client` for the program host.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from weft.abi.errors import ConfigError
from weft.children.progress import ProgressCounter
from weft.children.watchdog import Signs, Watchdog

LOOK_EVERY_S = 1.0
"""Interval of pings and of checks of the child's progress."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pauses before restarts: doubled each time, reset after a child that lived longer than the longest pause."""
KILL_AFTER_S = 10.0
"""Time after the child's stdin was closed until the child is killed. It ends itself before (`STOP_GRACE_S` of
`weft.children.entry`), unless it cannot run at all."""
LAST_WORDS_S = 0.05
"""Time for messages that a child sent just before its end to arrive."""

_log = logging.getLogger("weft.children")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """Settings of one kind of child."""

    name: str
    """Name in logs, such as "the engine"."""
    module: str
    """Module that `weft.children.entry` runs."""
    args: bytes
    """The line that the child reads from stdin."""
    deadline_s: float
    """Deadline of the `Watchdog` once the child is ready."""
    start_deadline_s: float = float("inf")
    """Deadline of the `Watchdog` before the child is ready."""
    environment: Mapping[str, str] | None = None
    """Environment of the child; None: the front's."""


class ChildOwner(Protocol):
    """Callbacks from a supervisor to the owner of its child. Called on the event loop; must not block."""

    def connect(self, address: str) -> None:
        """A process is about to start, and will listen at this address."""

    def disconnect(self) -> None:
        """Close the connection to the child. Idempotent."""

    def ping(self) -> None:
        """Send the child something that its loop answers."""

    def lost(self, reason: str) -> bool:
        """The process has ended or is about to be killed; `reason` is the end of a sentence. Returns whether to start
        another one."""


FOLDER_PREFIX = "weft-"
MAX_SOCKET_PATH_BYTES = 107
"""Of Unix sockets on Linux."""


class ChildSupervisor:
    """Runs one child at a time. Used from one event loop."""

    def __init__(self, settings: ChildSettings, owner: ChildOwner):
        self._settings = settings
        self._owner = owner
        self._task: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.folder: Path | None = None
        """Directory of the child's socket; only this user can read it."""
        self.address: str | None = None
        """Address of the latest child."""
        self.is_ready = False
        """Set by the owner when the child reports that it is ready."""
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """The process id of the child; None without one."""
        return None if self.process is None else self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a child or one will be started."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start a child and keep it running. Does nothing if already started. Raises `ConfigError` where the folder for
        temporary files has no room for the path of a socket."""
        if not self.is_running:
            longest = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}12345678" / self._name("12345", 1 << 22)
            if (excess := len(os.fsencode(longest)) - MAX_SOCKET_PATH_BYTES) > 0:
                raise ConfigError(
                    f"the path of the folder for temporary files, {tempfile.gettempdir()}, is {excess} bytes too long "
                    "for a socket in it: set TMPDIR to another one"
                )
            self._task = asyncio.create_task(self._supervise(), name=f"weft-supervisor-{self._settings.module}")

    async def close(self) -> None:
        """Stop the child: it ends by itself, or is killed after `KILL_AFTER_S`. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.stop(kill=False)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def stop(self, *, kill: bool) -> None:
        """End the process, with `kill` at once, otherwise by closing its stdin. If cancelled, the next call completes
        it."""
        self.is_ready = False
        self._owner.disconnect()
        process = self.process
        if process is None:
            return
        if kill and process.returncode is None:
            _kill(process)  # first: a child whose stdin closes removes the folder
        if process.stdin is not None:
            process.stdin.close()  # also after the process has ended, or asyncio keeps its transport
        if process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), KILL_AFTER_S)
            except TimeoutError:
                _kill(process)
                await process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
        self.process = None

    # ---- inside

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = loop.time()
            try:
                reason = await self._live()
            except Exception as error:  # nothing would start a child again
                _log.exception("%s cannot be watched", self._settings.name)
                reason = f"cannot be watched: {error!r}"
            goes_on = self._owner.lost(reason)
            await self.stop(kill=True)
            if not goes_on:
                return
            self.num_restarts += 1
            if loop.time() - began_s > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            _log.error("%s %s; restarting it in %g s", self._settings.name, reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _live(self) -> str:
        """Start a process and watch it until it ends or must be killed; returns the reason, as the end of a
        sentence."""
        try:
            process, progress = await self._spawn()
        except OSError as error:
            return f"cannot be started: {error}"
        ended = asyncio.ensure_future(process.wait())
        watchdog, watched_ready = None, False
        try:
            while True:
                await asyncio.wait({ended}, timeout=LOOK_EVERY_S)
                if ended.done():
                    await asyncio.sleep(LAST_WORDS_S)
                    return describe_end(ended.result())
                self._owner.ping()
                signs = Signs(asyncio.get_running_loop().time(), progress.read(), _cpu_s(process.pid))
                if watchdog is None or watched_ready != self.is_ready:
                    watched_ready = self.is_ready
                    watchdog = Watchdog(self._deadline_s, signs)
                if (stuck := watchdog.look(signs)) is not None:
                    return stuck
        finally:
            ended.cancel()
            progress.close()

    @property
    def _deadline_s(self) -> float:
        return self._settings.deadline_s if self.is_ready else self._settings.start_deadline_s

    def _name(self, number: object, pid: int) -> str:
        """The name of a child's socket: the next child has another."""
        return f"{self._settings.module.split('.')[1]}-{number}-{pid}"

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, ProgressCounter]:
        settings = self._settings
        if self.folder is None or not self.folder.is_dir():  # temporary files are cleaned up on some systems
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        path = self.folder / self._name(self.num_restarts, os.getpid())
        progress = ProgressCounter(path.with_suffix(".progress"))
        self.address = f"ipc://{path}"
        self._owner.connect(self.address)
        try:
            self.process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "weft.children.entry",
                settings.module,
                self.address,
                stdin=asyncio.subprocess.PIPE,
                env=settings.environment,
            )
        except BaseException:
            progress.close()
            raise
        if process.stdin is not None:
            process.stdin.write(settings.args + b"\n")
        return process, progress


def describe_end(returncode: int) -> str:
    """How a process ended, as the end of a sentence."""
    if returncode < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    return f"ended with status {returncode}"


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its reaped children; 0 if the process has just ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
