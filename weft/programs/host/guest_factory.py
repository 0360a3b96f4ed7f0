"""From a program to a guest that runs it: the sandbox, or plain asyncio for what is trusted.

Owns the choice, and the sandbox, which is opened when the first program needs it: on a thread, because the first time
on a machine takes seconds. `weft.programs.host.run_task` calls it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from weft.abi.errors import InvalidRequest, WeftError
from weft.programs.guest import Guest, GuestHost, GuestUsage
from weft.programs.host.trusted import TrustedGuest
from weft.programs.quota.limits import Limits
from weft.programs.registry import Code
from weft.programs.run.command_queue import CommandQueue
from weft.programs.run.runs import RunSpec
from weft.programs.sandbox.checker import CodeChecker
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.sandbox import Module, Sandbox, SandboxConfig
from weft.programs.sandbox.workers import Charge, WorkerPool, WorkerProcess

COMPILERS = 4
"""Processes that compile modules at once, one for each tenant."""


class GuestFactory:
    """Makes guests. Used from one event loop."""

    def __init__(self, config: SandboxConfig | None = None):
        self._config = config
        self._sandbox: asyncio.Future[Sandbox] | None = None
        self.checker = CodeChecker()
        """Of sources that programs launch."""
        self._compilers = WorkerPool(COMPILERS)
        self.modules: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()
        """Those that the sandbox has loaded, by hash: a burst of launches does not go by a thread one by one."""

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox, where it is open."""
        is_open = self._sandbox is not None and self._sandbox.done() and self._sandbox.exception() is None
        return self._sandbox.result() if self._sandbox is not None and is_open else None

    def make(self, host: GuestHost, spec: RunSpec, limits: Limits, tenant: str, charge: Charge) -> Guest:
        """A guest that has not begun. `charge` gets the processor time that compiling its module takes. Raises
        `InvalidRequest`."""
        code = spec.code
        name = _file_name(code.name)
        if not spec.trusted:
            return _SandboxedLater(self, host, spec, limits, lambda code: self._compiled(code, tenant, charge))
        if code.kind != "python":
            raise InvalidRequest("Only Python can be trusted; a Wasm module runs in the sandbox.", "trusted")
        return TrustedGuest(host, args=spec.args, source=code.content.decode(), name=name)

    async def open(self) -> Sandbox:
        """The sandbox. Raises `ConfigError` where it cannot work; then it is tried again the next time."""
        if self._sandbox is None or (self._sandbox.done() and self._sandbox.exception() is not None):
            self._sandbox = asyncio.ensure_future(asyncio.to_thread(Sandbox.open, self._config))
        # The first caller may be cancelled; the others wait for the same compilation.
        return await asyncio.shield(self._sandbox)

    async def close(self) -> None:
        """Close the sandbox, and kill what compiles. Its guests must have ended."""
        await self.checker.close()
        await self._compilers.close()
        if self._sandbox is not None:
            await asyncio.wait([self._sandbox])
            if self._sandbox.exception() is None:
                self._sandbox.result().close()
            self._sandbox = None

    async def _compiled(self, code: Code, tenant: str, charge: Charge) -> Module:
        """A module, compiled when it is the tenant's turn where it is not known. Where this is cancelled, its compiler
        is killed."""
        module = self.modules.get(code.hash)
        if module is None:
            sandbox = await self.open()

            def compiled(worker: WorkerProcess) -> Module:
                # Another run of it may have been first.
                return self.modules.get(code.hash) or sandbox.compile(code.content, worker)

            module = self.modules[code.hash] = await self._compilers.call(tenant, compiled, charge)
        return module


class _SandboxedLater:
    """A guest in the sandbox, which may have to be opened, as a module may have to be compiled, before it runs."""

    def __init__(
        self,
        guests: GuestFactory,
        host: GuestHost,
        spec: RunSpec,
        limits: Limits,
        compiled: Callable[[Code], Awaitable[Module]],
    ):
        self._guests, self._host, self._compiled = guests, host, compiled
        self._code, self._args = spec.code, spec.args
        self._limits = GuestLimits(
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            host_calls=limits.host_calls,
            pause=host.pause if isinstance(host, CommandQueue) and host.is_rated else None,
        )
        self._guest: Guest | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._killed: WeftError | None = None

    async def run(self) -> bytes:
        """See `Guest`."""
        if self._killed is not None:
            raise self._killed
        sandbox = self._guests.sandbox or await self._unless_killed(self._guests.open())
        if self._code.kind == "python":
            name = _file_name(self._code.name)
            source = self._code.content.decode()
            self._guest = sandbox.python(source, self._args, self._host, self._limits, name=name)
        else:
            module = await self._unless_killed(self._compiled(self._code))
            self._guest = sandbox.module(module, self._args, self._host, self._limits)
        return await self._guest.run()

    def kill(self, error: WeftError) -> None:
        """See `Guest`."""
        if self._guest is not None:
            self._guest.kill(error)
            return
        self._killed = self._killed or error
        if self._waiting is not None:
            self._waiting.cancel()

    def usage(self) -> GuestUsage:
        """See `Guest`."""
        return self._guest.usage() if self._guest is not None else GuestUsage()

    async def _unless_killed(self, work: Any) -> Any:
        if self._killed is not None:
            work.close()
            raise self._killed
        self._waiting = asyncio.ensure_future(work)
        try:
            done = await self._waiting
        except asyncio.CancelledError:
            if self._killed is not None:
                raise self._killed from None
            raise
        finally:
            self._waiting = None
        # It may have been done already when it was cancelled, and heard nothing of it.
        if self._killed is not None:
            raise self._killed
        return done


def _file_name(name: str) -> str:
    """What tracebacks call a program."""
    return name if name.endswith(".py") else f"{name or 'program'}.py"
