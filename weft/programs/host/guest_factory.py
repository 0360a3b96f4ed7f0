"""Creates the guest that runs a program: in the sandbox, or as an asyncio task for trusted programs.

Owns the choice, and the sandbox, which is opened for the first program that needs it: on a thread, because the first
time on a machine takes seconds. `weft.programs.host.run_task` calls it.
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
"""Most processes that compile modules at the same time, at most one for each tenant."""


class GuestFactory:
    """Creates the guests of a host. Used from one event loop."""

    def __init__(self, config: SandboxConfig | None = None):
        self._config = config
        self._sandbox: asyncio.Future[Sandbox] | None = None
        self.checker = CodeChecker()
        """Checks sources that programs launch."""
        self._compilers = WorkerPool(COMPILERS)
        self.modules: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()
        """Hash -> module that the sandbox has loaded, so that launches of a known module need no thread."""

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox; None while it is not open."""
        is_open = self._sandbox is not None and self._sandbox.done() and self._sandbox.exception() is None
        return self._sandbox.result() if self._sandbox is not None and is_open else None

    def make(self, host: GuestHost, spec: RunSpec, limits: Limits, tenant: str, charge: Charge) -> Guest:
        """Create a guest, without starting it. `charge` gets the processor time of compiling its module. Raises
        `InvalidRequest`."""
        code = spec.code
        name = _file_name(code.name)
        if not spec.trusted:
            return _SandboxedLater(self, host, spec, limits, tenant, lambda code: self._compiled(code, tenant, charge))
        if code.kind != "python":
            raise InvalidRequest("Only Python can be trusted; a Wasm module runs in the sandbox.", "trusted")
        return TrustedGuest(host, args=spec.args, source=code.content.decode(), name=name)

    async def open(self) -> Sandbox:
        """Open the sandbox, if it is not open, and return it. Raises `ConfigError` if it cannot work; the next call
        then tries again."""
        if self._sandbox is None or (self._sandbox.done() and self._sandbox.exception() is not None):
            self._sandbox = asyncio.ensure_future(asyncio.to_thread(Sandbox.open, self._config))
        # The first caller may be cancelled while others wait for the same compilation.
        return await asyncio.shield(self._sandbox)

    async def close(self) -> None:
        """Close the sandbox, and kill its compiler processes. All guests must have ended."""
        await self.checker.close()
        await self._compilers.close()
        if self._sandbox is not None:
            await asyncio.wait([self._sandbox])
            if self._sandbox.exception() is None:
                self._sandbox.result().close()
            self._sandbox = None

    async def _compiled(self, code: Code, tenant: str, charge: Charge) -> Module:
        """The module of a code; an unknown one is compiled in the tenant's turn. Cancellation kills the compiler
        process."""
        module = self.modules.get(code.hash)
        if module is None:
            sandbox = await self.open()

            def compiled(worker: WorkerProcess) -> Module:
                # Another run of the same module may have compiled it meanwhile.
                return self.modules.get(code.hash) or sandbox.compile(code.content, worker)

            module = self.modules[code.hash] = await self._compilers.call(tenant, compiled, charge)
        return module


class _SandboxedLater:
    """A guest in the sandbox that first opens the sandbox and compiles its module, where needed."""

    def __init__(
        self,
        guests: GuestFactory,
        host: GuestHost,
        spec: RunSpec,
        limits: Limits,
        tenant: str,
        compiled: Callable[[Code], Awaitable[Module]],
    ):
        self._guests, self._host, self._compiled = guests, host, compiled
        self._code, self._args = spec.code, spec.args
        self._limits = GuestLimits(
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            host_calls=limits.host_calls,
            pause=host.pause if isinstance(host, CommandQueue) and host.is_rated else None,
            tenant=tenant,
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
        # The work may have been done before its cancellation, which then has no effect.
        if self._killed is not None:
            raise self._killed
        return done


def _file_name(name: str) -> str:
    """The file name of a program in tracebacks."""
    return name if name.endswith(".py") else f"{name or 'program'}.py"
