"""A sandboxed program that runs: carries out its requests, watches its limits, and reports its end.

Owns one run. Drives a `Machine` and does not know whether that is a fiber or a thread. Made by `Sandbox`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable

from weft.abi.errors import EngineDead, LimitExceeded, ProgramFailed, WeftError
from weft.abi.frames import WireError
from weft.programs.guest import GuestHost, GuestUsage
from weft.programs.sandbox.bytecode import Calls
from weft.programs.sandbox.imports import IMPORTS, Exited, GuestEntropy, Handler
from weft.programs.sandbox.machine import GuestLimits, LoadedCode, Machine, Request, Trapped

_TURN_S = 0.002
_BYTES_PER_CALL = 64 << 10
_ENGINE_DEAD = "EngineDead: "
"""How what a program in Python failed with begins where it let that error of the SDK go by."""
_MAX_FAILURE_BYTES = 1 << 20
"""Of what the runner says of a failure; it shortens texts, so a longer one is a program's own."""
_MAX_MEMORY_SHARE = 0.9
"""A module that ends with a trap while its memory is fuller than this ran out of memory, most likely."""


class SandboxedGuest:
    """The `Guest` of a WebAssembly instance. Components ask by name, modules by import: see the two kinds below."""

    def __init__(self, code: LoadedCode, host: GuestHost, limits: GuestLimits):
        self._code, self._host, self._limits = code, host, limits
        self._machine: Machine | None = None
        self._task: asyncio.Task[object] | None = None
        self._killed: WeftError | None = None
        self._ended = False
        self._host_calls = 0
        self._used = GuestUsage()

    async def run(self) -> bytes:
        """Run the program to its end (`Guest.run`)."""
        if self._ended or self._task is not None:
            raise RuntimeError("a guest runs once")
        self._task = asyncio.current_task()
        try:
            return await self._run()
        except asyncio.CancelledError:
            if self._killed is None:
                raise
            # The cancellation was ours, unless the task is being cancelled besides.
            if self._task is not None and self._task.uncancel() > 0:
                raise
            raise self._killed from None
        finally:
            self._ended = True
            self._close()

    def kill(self, error: WeftError) -> None:
        """End the program from outside (`Guest.kill`)."""
        if self._ended or self._killed is not None:
            return
        self._killed = error
        if self._task is None:
            return
        # From within its own host calls it ends as soon as those return.
        if asyncio.current_task() is not self._task:
            self._task.cancel()

    def usage(self) -> GuestUsage:
        """What the program has used so far (`Guest.usage`)."""
        if self._machine is None:
            return self._used
        memory_bytes = max(self._used.memory_bytes, self._machine.memory_bytes)
        return GuestUsage(self._machine.cpu_s, memory_bytes, self._host_calls)

    # ---- for the kinds

    def calls(self) -> Calls:
        """The host functions that a component may call."""
        raise NotImplementedError

    def handle(self, request: Request) -> int | bytes | Awaitable[int | bytes]:
        """Carry out one request of the guest."""
        raise NotImplementedError

    def outcome(self, returned: bytes) -> bytes:
        """The JSON of the result, from what the machine returned."""
        raise NotImplementedError

    def exchange(self, data: bytes, timeout_s: float) -> bytes | Awaitable[bytes]:
        """Commands out, events in; without waiting where there are some, or none are wanted."""
        if math.isnan(timeout_s):
            raise WireError("the program waits for a time that is not a number")
        self.count(len(data))
        if data:
            self._host.commands(data)
            # A command may have ended the run.
            self._check()
            behind = self._host.behind()
            if behind is not None:
                return self._caught_up(behind, timeout_s)
        events = self._host.take_events()
        if events or timeout_s == 0:
            return events
        return self._host.wait_events(None if timeout_s < 0 or timeout_s == math.inf else timeout_s)

    async def _caught_up(self, behind: Awaitable[None], timeout_s: float) -> bytes:
        """The same, once its commands have had their turns: what it says does not pile up."""
        await behind
        self._check()
        answer = self.exchange(b"", timeout_s)
        return answer if isinstance(answer, bytes) else await answer

    def count(self, size: int) -> None:
        """So many bytes cross between the guest and its host: what takes the host's time counts as calls."""
        self._host_calls += size // _BYTES_PER_CALL

    def say(self, data: bytes) -> None:
        """Commands that wait for nothing."""
        self._host.commands(data)

    def check_result(self, size: int) -> None:
        """Raise where a result is too large."""
        if size > self._limits.result_bytes:
            most = self._limits.result_bytes
            raise LimitExceeded(f"the result has {size} bytes; {most} are allowed", "result_bytes")

    # ---- inside

    async def _run(self) -> bytes:
        self._check()
        machine = self._machine = self._code.machine(self._limits, self.calls(), self._check)
        turn_ends = time.monotonic() + _TURN_S
        try:
            request = await machine.next()
            while request is not None:
                self._host_calls += 1
                self._check()
                answer = self.handle(request)
                if not isinstance(answer, int | bytes):
                    answer = await answer
                    turn_ends = time.monotonic() + _TURN_S
                elif time.monotonic() > turn_ends:
                    # One that asks without end gives way as one does that computes without end.
                    await machine.give_way()
                    turn_ends = time.monotonic() + _TURN_S
                self._check()
                machine.answer(answer)
                request = await machine.next()
            return self.outcome(machine.result())
        except Trapped as error:
            self._check()
            raise self._explained(error) from None
        except Exited as error:
            if error.code == 0:
                return self.outcome(b"")
            raise ProgramFailed(str(error)) from None

    def _check(self) -> None:
        """Raise the error that ends it, if there is one. Called often."""
        if self._killed is not None:
            raise self._killed
        limits = self._limits
        if limits.host_calls is not None and self._host_calls > limits.host_calls:
            raise LimitExceeded(f"the program turned to its host more than {limits.host_calls} times", "host_calls")
        if limits.cpu_s is not None and self._machine is not None and self._machine.cpu_s > limits.cpu_s:
            raise LimitExceeded(f"the program computed for more than {limits.cpu_s:g} s", "cpu_s")

    def _explained(self, error: Trapped) -> WeftError:
        used, most = self.usage().memory_bytes, self._limits.memory_bytes
        if error.no_memory:
            return LimitExceeded(f"the program needs more than {most} bytes of memory: {error}", "memory_bytes")
        if most is not None and used > most * _MAX_MEMORY_SHARE:
            return LimitExceeded(f"the program ended with {used} of {most} bytes in use: {error}", "memory_bytes")
        return ProgramFailed(f"the sandbox ended the program: {error}")

    def _close(self) -> None:
        machine = self._machine
        if machine is not None:
            machine.close()
            self._used = self.usage()
            self._machine = None


class PythonGuest(SandboxedGuest):
    """A program in Python: requests are exchanges; the component returns a letter and JSON."""

    def __init__(self, code: LoadedCode, host: GuestHost, limits: GuestLimits, calls: Calls):
        super().__init__(code, host, limits)
        self._calls = calls

    def calls(self) -> Calls:
        """Of the component that runs Python."""
        return self._calls

    def handle(self, request: Request) -> bytes | Awaitable[bytes]:
        """The one request there is."""
        data, timeout_s = request.args
        if not isinstance(data, bytes) or isinstance(timeout_s, bytes):
            raise WireError("an exchange without bytes")
        return self.exchange(data, timeout_s)

    def outcome(self, returned: bytes) -> bytes:
        """`R` and JSON, or `E` and why not."""
        self.check_result(len(returned) - 1)
        if returned[:1] == b"R":
            return returned[1:]
        if len(returned) > _MAX_FAILURE_BYTES:
            raise ProgramFailed(f"the program failed with a text of {len(returned)} bytes, which is not kept")
        try:
            failure = json.loads(returned[1:])
            kind, message = failure["kind"], str(failure["message"])
            traceback = str(failure.get("traceback", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ProgramFailed("the program ended without a result that can be read") from None
        if kind == "memory_bytes":
            most = self._limits.memory_bytes
            message = f"the program needs more than {most} bytes of memory\n{traceback}".strip()
            raise LimitExceeded(message, "memory_bytes")
        if message.startswith(_ENGINE_DEAD):
            # Nothing is wrong with the program: it may be launched again.
            raise EngineDead(message.removeprefix(_ENGINE_DEAD))
        raise ProgramFailed(message, traceback=traceback)


class ModuleGuest(SandboxedGuest):
    """A core module: requests are those of `imports`. It is also the `Run` that they work on."""

    def __init__(self, code: LoadedCode, host: GuestHost, limits: GuestLimits, args: bytes, seed: bytes):
        super().__init__(code, host, limits)
        self.module_args, self.events, self.output = args, memoryview(b""), b"null"
        self.entropy = GuestEntropy(seed)

    @property
    def machine(self) -> Machine:
        """The machine, while the program runs."""
        if self._machine is None:
            raise RuntimeError("the guest does not run")
        return self._machine

    def calls(self) -> Calls:
        """None: a module has an entry."""
        yield from ()
        return b""

    def handle(self, request: Request) -> int | Awaitable[int]:
        """By the number of the import."""
        handler: Handler | None = IMPORTS[request.function].handler
        if handler is None:
            raise WireError("a function without a meaning")
        return handler(self, *request.args)

    def outcome(self, returned: bytes) -> bytes:
        """What it handed over as its result."""
        return self.output
