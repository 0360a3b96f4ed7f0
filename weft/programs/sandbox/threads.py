"""Guests on a thread each, on wasmtime's public API: for machines where fibers do not work.

The same interface as the machines on fibers. Slower by far (a request crosses threads twice), and each guest has an
engine of its own, because advancing an engine's epoch is the one public way to stop code that computes. Code that
computes cannot be interrupted to go on later, so guests have no turns by tenant here: the operating system shares the
processor among their threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wasmtime
import wasmtime.component

from weft.abi.errors import Overloaded, ProgramFailed, WeftError
from weft.abi.frames import WireError
from weft.programs.sandbox.bytecode import CallInstruction, Calls
from weft.programs.sandbox.compiled import CompiledModule
from weft.programs.sandbox.engine import INTERFACE, TABLE_ELEMENTS, engine_config, function_type
from weft.programs.sandbox.imports import CLOCKS, IMPORTS
from weft.programs.sandbox.machine import GuestLimits, Request, Trapped, Value, out_of_bounds, refused, trapped
from weft.programs.sandbox.module_shape import INITIALIZE

_LOOK_S = 0.02
"""How often limits are looked at while a guest computes."""


class _Ended(Exception):
    """Thrown through a guest's code, to end it."""


class Slots:
    """How many guests there may be at once."""

    def __init__(self, count: int, memory_bytes: int):
        self.memory_bytes = memory_bytes
        self._free = count

    def take(self) -> None:
        """Take a slot. Raises `Overloaded` where none is free."""
        if self._free < 1:
            raise Overloaded("all slots of the sandbox are taken; try again later, or raise the number of slots")
        self._free -= 1

    def give(self) -> None:
        """Return a slot that `take` took, once its guest has ended."""
        self._free += 1


class _ThreadMachine:
    """A guest's thread, and the mailboxes between it and the loop. Subclasses say what the thread does."""

    def __init__(self, slots: Slots, limits: GuestLimits, check: Callable[[], None]):
        slots.take()
        self._slots, self._limits, self._check = slots, limits, check
        self._loop = asyncio.get_running_loop()
        self._answers: queue.SimpleQueue[int | bytes | None] = queue.SimpleQueue()
        self._outcome: asyncio.Future[Request | None] = self._loop.create_future()
        self._engine = wasmtime.Engine(engine_config())
        self._store = wasmtime.Store(self._engine)
        most = slots.memory_bytes
        most = most if limits.memory_bytes is None else min(limits.memory_bytes, most)
        self._store.set_limits(memory_size=most, table_elements=TABLE_ELEMENTS)
        # Only `close` advances the epoch, which thereby ends all code that runs.
        self._store.set_epoch_deadline(1)
        self._closing = self._closed = False
        self._cpu_s = 0.0
        self._clock: int | None = None
        self._returned = b""
        self._thread = threading.Thread(target=self._main, name="weft-guest", daemon=True)

    @property
    def cpu_s(self) -> float:
        """See `Machine`."""
        if self._clock is not None:
            # It may end between the two looks.
            with contextlib.suppress(OSError):
                self._cpu_s = time.clock_gettime(self._clock)
        return self._cpu_s

    async def next(self) -> Request | None:
        """The guest's next request, or None once it has ended."""
        if self._thread.ident is None:
            self._thread.start()
        looking = self._loop.call_later(_LOOK_S, self._look)
        self._looking = looking
        try:
            return await self._outcome
        finally:
            self._looking.cancel()
            self._outcome = self._loop.create_future()

    async def give_way(self) -> None:
        """Let other tasks of the loop run."""
        await asyncio.sleep(0)

    def answer(self, value: int | bytes) -> None:
        """Pass the answer of a request to the guest and let it continue."""
        self._answers.put(value)

    def result(self) -> bytes:
        """The value that the entry point returned."""
        return self._returned

    def close(self) -> None:
        """Release the instance and wait for its thread, which is about to end. Idempotent."""
        if self._closed:
            return
        self._closed = self._closing = True
        self._answers.put(None)
        self._engine.increment_epoch()
        if self._thread.ident is not None:
            self._thread.join()
        self._store.close()
        self._engine.close()
        self._slots.give()

    def _look(self) -> None:
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        try:
            self._check()
        except Exception as error:
            self._looking.cancel()
            if not self._outcome.done():
                self._outcome.set_exception(error)

    # ---- on the thread

    def _main(self) -> None:
        outcome: Request | BaseException | None = None
        # Only the thread itself may ask for its clock: a thread that has ended has none.
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._work()
        except (wasmtime.WasmtimeError, wasmtime.Trap) as error:
            outcome = trapped(str(error))
        except (Trapped, WeftError, WireError) as error:
            outcome = error
        except BaseException as error:
            # wasmtime keeps the last exception of any thread, so this may be another guest's.
            outcome = Trapped(f"its code was ended ({type(error).__name__})")
        self._clock, self._cpu_s = None, time.thread_time()
        self._resolve(outcome)

    def _work(self) -> None:
        raise NotImplementedError

    def _ask(self, function: int, args: tuple[Value, ...]) -> int | bytes:
        """Suspend the thread until the loop has answered."""
        if self._closing:
            raise _Ended
        self._resolve(Request(function, args))
        value = self._answers.get()
        if value is None:
            raise _Ended
        return value

    def _resolve(self, outcome: Request | BaseException | None) -> None:
        def deliver() -> None:
            if not self._outcome.done() and not self._closing:
                if isinstance(outcome, BaseException):
                    self._outcome.set_exception(outcome)
                else:
                    self._outcome.set_result(outcome)

        if not self._closing:
            self._loop.call_soon_threadsafe(deliver)


class ComponentMachine(_ThreadMachine):
    """An instance of a component."""

    def __init__(self, slots: Slots, compiled: Path, limits: GuestLimits, calls: Calls, check: Callable[[], None]):
        super().__init__(slots, limits, check)
        self._compiled, self._calls = compiled, calls

    @property
    def memory_bytes(self) -> int:
        """0: the memory of a component cannot be seen."""
        return 0

    def read(self, address: int, size: int) -> bytes:
        """Raise `ProgramFailed`: the memory of a component cannot be read."""
        raise out_of_bounds(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Raise `ProgramFailed`: the memory of a component cannot be written."""
        raise out_of_bounds(address, len(data))

    def _work(self) -> None:
        component = wasmtime.component.Component.deserialize_file(self._engine, str(self._compiled))
        linker = wasmtime.component.Linker(self._engine)
        with linker.root() as root, root.add_instance(INTERFACE) as defined:
            defined.add_func("exchange", self._exchange)
            defined.add_func("now", lambda store: time.time())
        try:
            instance = linker.instantiate(self._store, component)
        except wasmtime.WasmtimeError as error:
            raise refused(str(error), self._limits) from None
        call = next(self._calls)
        while True:
            returned = self._call(instance, call)
            try:
                call = self._calls.send(returned)
            except StopIteration as over:
                self._returned = over.value
                return

    def _call(self, instance: wasmtime.component.Instance, call: CallInstruction) -> bytes:
        function = instance.get_func(self._store, call.export)
        if function is None:
            raise Trapped(f"it has no function {call.export}")
        returned: Any = function(self._store, *(arg.decode("latin-1") for arg in call.args))
        function.post_return(self._store)
        return _narrow(returned)

    def _exchange(self, store: object, commands: str, timeout_s: float) -> str:
        try:
            data: int | bytes = commands.encode("latin-1")
        except UnicodeEncodeError:
            # Let the loop find out: not a number is refused there.
            data, timeout_s = b"", math.nan
        answer = self._ask(0, (data, timeout_s))
        return answer.decode("latin-1") if isinstance(answer, bytes) else ""


class ModuleMachine(_ThreadMachine):
    """An instance of a core module."""

    def __init__(self, slots: Slots, compiled: CompiledModule, limits: GuestLimits, check: Callable[[], None]):
        super().__init__(slots, limits, check)
        self._compiled = compiled
        self._memory: wasmtime.Memory | None = None
        self._memory_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the module's memory."""
        if self._memory is not None and not self._closed:
            self._memory_bytes = self._memory.data_len(self._store)
        return self._memory_bytes

    def close(self) -> None:
        """Release the instance and its slot. Idempotent."""
        self._memory_bytes = self.memory_bytes
        super().close()

    def read(self, address: int, size: int) -> bytes:
        """Read bytes of the module's memory. Raises `ProgramFailed` outside of it."""
        return bytes(self._checked(address, size).read(self._store, address, address + size))

    def write(self, address: int, data: bytes) -> None:
        """Write bytes to the module's memory. Raises `ProgramFailed` outside of it."""
        self._checked(address, len(data)).write(self._store, data, address)

    def _checked(self, address: int, size: int) -> wasmtime.Memory:
        if self._memory is None or address + size > self._memory.data_len(self._store):
            raise out_of_bounds(address, size)
        return self._memory

    def _work(self) -> None:
        module = wasmtime.Module.deserialize_file(self._engine, str(self._compiled.path))
        linker = wasmtime.Linker(self._engine)
        for number, function in enumerate(IMPORTS):
            linker.define_func(function.module, function.name, function_type(function.signature), self._import(number))
        for function in CLOCKS:
            linker.define_func(function.module, function.name, function_type(function.signature), time.time)
        linker.define_unknown_imports_as_traps(module)
        entry = self._compiled.entry
        try:
            instance = linker.instantiate(self._store, module)
        except wasmtime.WasmtimeError as error:
            raise refused(str(error), self._limits) from None
        exports = instance.exports(self._store)
        memory = exports["memory"]
        self._memory = memory if isinstance(memory, wasmtime.Memory) else None
        for name in (INITIALIZE, entry.name):
            callee = exports.get(name)
            if isinstance(callee, wasmtime.Func):
                status = callee(self._store)
                if name == entry.name and entry.num_results and status != 0:
                    raise ProgramFailed(f"{entry.name} returned {status}")

    def _import(self, number: int) -> Callable[..., int | None]:
        function = IMPORTS[number]

        def call(*args: Any) -> int | None:
            values = tuple(
                arg & 0xFFFFFFFF if kind == "i" else arg for kind, arg in zip(function.params, args, strict=True)
            )
            answer = self._ask(number, values)
            return answer if function.results and isinstance(answer, int) else None

        return call


def _narrow(text: Any) -> bytes:
    try:
        return str(text).encode("latin-1")
    except UnicodeEncodeError:
        raise Trapped("it returned no bytes") from None


class _Component:
    def __init__(self, slots: Slots, compiled: Path):
        self._slots, self._compiled = slots, compiled

    def machine(self, limits: GuestLimits, calls: Calls, check: Callable[[], None]) -> ComponentMachine:
        """See `Code`."""
        return ComponentMachine(self._slots, self._compiled, limits, calls, check)


class _Module:
    def __init__(self, slots: Slots, compiled: CompiledModule):
        self._slots, self._compiled = slots, compiled

    def machine(self, limits: GuestLimits, calls: Calls, check: Callable[[], None]) -> ModuleMachine:
        """See `Code`."""
        return ModuleMachine(self._slots, self._compiled, limits, check)


class ThreadBackend:
    """A `backend.Backend` with one thread per running guest."""

    name = "threads"

    def __init__(self, slots: int, memory_bytes: int):
        self._slots = Slots(slots, memory_bytes)

    def component(self, compiled: Path) -> _Component:
        """Prepare a compiled component (`Backend.component`)."""
        return _Component(self._slots, compiled)

    def module(self, compiled: CompiledModule) -> _Module:
        """Prepare a compiled core module (`Backend.module`)."""
        return _Module(self._slots, compiled)

    def close(self) -> None:
        """Do nothing: a thread ends with its guest."""
