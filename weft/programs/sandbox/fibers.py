"""Guests on fibers: any number of them on the loop's own thread, each suspended where it asks its host for something.

Owns pools of slots, and gives guests their turns. It does not know what is asked. No Python runs on a guest's stack:
the shim writes requests down and `next` reads them after the poll.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wasmtime
import wasmtime.component

from weft.abi.errors import ProgramFailed, WeftError
from weft.abi.frames import WireError
from weft.programs.sandbox import bindings
from weft.programs.sandbox.bytecode import CallInstruction, Calls
from weft.programs.sandbox.compiled import CompiledModule
from weft.programs.sandbox.engine import EXPORTS, INTERFACE, function_type
from weft.programs.sandbox.imports import CLOCKS, IMPORTS
from weft.programs.sandbox.machine import GuestLimits, Request, Trapped, Value, out_of_bounds, refused, trapped
from weft.programs.sandbox.module_shape import INITIALIZE
from weft.programs.sandbox.turns import Turns

_KEPT_BYTES = 4096
_SHORT_PART = 1 / 8
"""Of a pass: a turn that begins a module or follows an answer takes a tenth of a millisecond, most of the time. Python
takes milliseconds to start."""
_Q, _D = struct.Struct("<q"), struct.Struct("<d")


class Pool:
    """An engine with slots, and the thread that gives its guests turns. Must be closed, after its machines."""

    def __init__(self, slots: int, memory_bytes: int, tick_s: float, turns: Turns, *, components: bool):
        """`turns` are those of the guests of all pools."""
        bindings.shim()
        self.memory_bytes, self.turns = memory_bytes, turns
        try:
            self.engine = bindings.pooled_engine(slots, memory_bytes, components=components)
        except wasmtime.WasmtimeError as error:
            raise bindings.BindingsUnavailable(f"no room for {slots} slots of the sandbox: {error}") from None
        self.ticker = bindings.Ticker(self.engine, tick_s)
        self.first_part = 1.0 if components else _SHORT_PART

    def close(self) -> None:
        """Stop the thread. Loaded code stays usable as long as it is referenced."""
        self.ticker.close()


class _FiberMachine:
    """What components and modules have in common: polling, turns, the end."""

    def __init__(self, pool: Pool, limits: GuestLimits, check: Callable[[], None]):
        self._pool, self._limits, self._check = pool, limits, check
        most = pool.memory_bytes
        self._instance: bindings.Instance | None = bindings.Instance(
            pool.engine, most if limits.memory_bytes is None else min(limits.memory_bytes, most)
        )
        self._cpu_s = 0.0
        self._has_turn = False
        """Whether it goes on without waiting for another turn."""

    @property
    def cpu_s(self) -> float:
        """See `Machine`."""
        return self._cpu_s

    def close(self) -> None:
        """Release the instance and its slot. Idempotent."""
        if self._instance is not None:
            instance, self._instance = self._instance, None
            instance.close()

    async def give_way(self) -> None:
        """Wait for the guest's next turn."""
        await self._take_turn()

    async def _take_turn(self, part: float = 1.0) -> None:
        await self._pool.turns.next(self._limits.tenant, part=part)
        self._has_turn = True

    async def _go_on(self) -> None:
        """Wait for a turn, where a guest that its host has answered needs one."""
        turns, tenant = self._pool.turns, self._limits.tenant
        if not self._has_turn and not turns.runs_at_once(tenant):
            await turns.next(tenant, part=_SHORT_PART, answered=True)
        self._has_turn = False

    async def _poll(self) -> bool:
        """Run on; whether the guest asks for something, else the future has ended. A guest that computes gives way to
        the loop at each tick."""
        ticker = self._pool.ticker.handle
        while True:
            instance = self._running()
            state = instance.poll(ticker)
            before_s, self._cpu_s = self._cpu_s, instance.fields.cpu_s
            self._pool.turns.spent(self._limits.tenant, self._cpu_s - before_s)
            if state == bindings.FINISHED:
                return False
            if state == bindings.PARKED:
                return True
            if state == bindings.GARBLED:
                raise WireError("the program handed over text where bytes were expected")
            self._check()
            if self._limits.pause is not None:
                await self._limits.pause()
            await self._pool.turns.next(self._limits.tenant)

    def _running(self) -> bindings.Instance:
        if self._instance is None:
            raise RuntimeError("the machine is closed")
        return self._instance


class ComponentCode:
    """A compiled component that imports `INTERFACE` and exports `EXPORTS`, functions of strings."""

    def __init__(self, pool: Pool, compiled: Path):
        self.pool = pool
        self.component = wasmtime.component.Component.deserialize_file(pool.engine, str(compiled))
        self.linker = wasmtime.component.Linker(pool.engine)
        bindings.define_component_imports(self.linker, INTERFACE, ["exchange"], "now")
        self.exports = {name: bindings.component_export(self.component, name) for name in EXPORTS}

    def machine(self, limits: GuestLimits, calls: Calls, check: Callable[[], None]) -> ComponentMachine:
        """A fresh machine that runs this code."""
        return ComponentMachine(self, limits, calls, check)


class ComponentMachine(_FiberMachine):
    """An instance of a component. Its requests: the bytes and the number of a call."""

    def __init__(self, code: ComponentCode, limits: GuestLimits, calls: Calls, check: Callable[[], None]):
        super().__init__(code.pool, limits, check)
        self._code, self._calls = code, calls
        self._made: Any = None
        self._results: Any = None
        """Of the call that was begun last; None before the first."""
        self._result = b""

    @property
    def memory_bytes(self) -> int:
        """0: the memory of a component cannot be seen."""
        return 0

    async def next(self) -> Request | None:
        """The guest's next request, or None once it has ended."""
        if self._made is None:
            await self._take_turn(self._pool.first_part)
            await self._start()
            self._call(next(self._calls))
        await self._go_on()
        while not await self._poll():
            returned = self._returned()
            try:
                self._call(self._calls.send(returned))
            except StopIteration as over:
                self._result = over.value
                return None
        fields = self._running().fields
        data = ctypes.string_at(fields.bytes, fields.size)
        if len(data) > _KEPT_BYTES:
            # A guest may be suspended for long: what it said is not kept twice.
            bindings.shim().weft_free(fields.bytes)
            fields.bytes, fields.size = None, 0
        return Request(fields.function, (data, _D.unpack(_Q.pack(fields.args[0]))[0]))

    def answer(self, value: int | bytes) -> None:
        """Pass the answer of a request to the guest and let it continue."""
        data = value if isinstance(value, bytes) else b""
        instance = self._running()
        bindings.shim().weft_answer_bytes(instance.fiber, data, len(data))

    def result(self) -> bytes:
        """The value that the entry point returned."""
        return self._result

    def read(self, address: int, size: int) -> bytes:
        """Raise `ProgramFailed`: the memory of a component cannot be read."""
        raise out_of_bounds(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Raise `ProgramFailed`: the memory of a component cannot be written."""
        raise out_of_bounds(address, len(data))

    async def _start(self) -> None:
        instance = self._running()
        self._made = instance.instantiate_component(self._code.linker, self._code.component)
        if await self._poll():
            raise Trapped("it called its host before it was started")
        message = instance.end()
        if message is not None:
            raise refused(message, self._limits)

    def _call(self, call: CallInstruction) -> None:
        self._results = self._running().call_component(self._made, self._code.exports[call.export], call.args)

    def _returned(self) -> bytes:
        """What the call came to that has just ended."""
        instance = self._running()
        message = instance.end()
        if message is not None:
            raise trapped(message)
        result = instance.take_component_result(self._results)
        if result is None:
            raise Trapped("it returned no bytes")
        return result


class ModuleCode:
    """A compiled core module, its imports defined: ours, the harmless ones of WASI, traps."""

    def __init__(self, pool: Pool, compiled: CompiledModule):
        self.pool = pool
        self.module = wasmtime.Module.deserialize_file(pool.engine, str(compiled.path))
        linker = wasmtime.Linker(pool.engine)
        for number, function in enumerate(IMPORTS):
            bindings.define_module_import(
                linker, function.module, function.name, function_type(function.signature), number
            )
        for function in CLOCKS:
            bindings.define_module_import(linker, function.module, function.name, function_type(function.signature), -1)
        linker.define_unknown_imports_as_traps(self.module)
        self.pre = linker.instantiate_pre(self.module)
        self.entry = compiled.entry

    def machine(self, limits: GuestLimits, calls: Calls, check: Callable[[], None]) -> ModuleMachine:
        """A fresh machine that runs this code."""
        return ModuleMachine(self, limits, check)


class ModuleMachine(_FiberMachine):
    """An instance of a core module: it is instantiated, `_initialize` is called where there is one, then its entry."""

    def __init__(self, code: ModuleCode, limits: GuestLimits, check: Callable[[], None]):
        super().__init__(code.pool, limits, check)
        self._code = code
        self._made: Any = None
        self._phases: list[str] = []
        self._results: Any = None
        self._memory: Any = None
        self._memory_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the module's memory."""
        if self._instance is not None and self._memory is not None:
            self._memory_bytes = self._instance.memory(self._memory)[1]
        return self._memory_bytes

    async def next(self) -> Request | None:
        """The guest's next request, or None once it has ended."""
        if self._made is None:
            await self._take_turn(self._pool.first_part)
            self._made = self._running().instantiate_module(self._code.pre)
            entry = self._code.entry
            self._phases = [INITIALIZE] * entry.has_initialize + [entry.name]
        await self._go_on()
        while not await self._poll():
            self._finish()
            if not self._advance():
                return None
        fields = self._running().fields
        function = IMPORTS[fields.function]
        values: list[Value] = []
        for index, kind in enumerate(function.params):
            bits = fields.args[index]
            values.append(_D.unpack(_Q.pack(bits))[0] if kind == "d" else bits & 0xFFFFFFFF if kind == "i" else bits)
        return Request(fields.function, tuple(values))

    def answer(self, value: int | bytes) -> None:
        """Pass the answer of a request to the guest and let it continue."""
        if isinstance(value, int):
            bindings.shim().weft_answer_i32(self._running().fiber, value)

    def result(self) -> bytes:
        """The value that the entry point returned."""
        return b""

    def read(self, address: int, size: int) -> bytes:
        """Read bytes of the module's memory. Raises `ProgramFailed` outside of it."""
        return ctypes.string_at(self._at(address, size), size)

    def write(self, address: int, data: bytes) -> None:
        """Write bytes to the module's memory. Raises `ProgramFailed` outside of it."""
        ctypes.memmove(self._at(address, len(data)), data, len(data))

    def close(self) -> None:
        """Release the instance and its slot. Idempotent."""
        if self._instance is not None:
            self._memory_bytes = self.memory_bytes
        super().close()

    def _at(self, address: int, size: int) -> int:
        if self._memory is None:
            raise out_of_bounds(address, size)
        base, length = self._running().memory(self._memory)
        if address + size > length:
            raise out_of_bounds(address, size)
        return base + address

    def _finish(self) -> None:
        """A future has ended: whether that was well."""
        instance = self._running()
        message = instance.end()
        if message is not None:
            raise (
                trapped(message)
                if self._results is not None or self._memory is not None
                else self._not_started(message)
            )
        if self._memory is None:
            self._memory = instance.exported_memory(self._made, "memory")
        entry = self._code.entry
        if self._results is not None and entry.num_results and self._results[0].of.i32 != 0:
            raise ProgramFailed(f"{entry.name} returned {self._results[0].of.i32}")

    def _not_started(self, message: str) -> WeftError | Trapped:
        return trapped(message) if "wasm trap" in message else refused(message, self._limits)

    def _advance(self) -> bool:
        """Begin what comes next; False where nothing does."""
        if not self._phases:
            return False
        name, entry, instance = self._phases.pop(0), self._code.entry, self._running()
        is_entry = name == entry.name
        results = instance.call_module(
            instance.exported_function(self._made, name), entry.num_results if is_entry else 0
        )
        self._results = results if is_entry else None
        return True


class FiberBackend:
    """The `Backend` that runs guests on fibers of one thread. Components and modules have a pool each, made when it is
    first needed."""

    name = "fibers"

    def __init__(self, slots: int, memory_bytes: int, tick_s: float):
        self._slots, self._memory_bytes, self._tick_s = slots, memory_bytes, tick_s
        self._turns = Turns(tick_s)
        self._pools: dict[bool, Pool] = {}

    def component(self, compiled: Path) -> ComponentCode:
        """Prepare a compiled component (`Backend.component`)."""
        return ComponentCode(self._pool(components=True), compiled)

    def module(self, compiled: CompiledModule) -> ModuleCode:
        """Prepare a compiled core module (`Backend.module`)."""
        return ModuleCode(self._pool(components=False), compiled)

    def close(self) -> None:
        """Close the pools of instances. Idempotent."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _pool(self, *, components: bool) -> Pool:
        if components not in self._pools:
            self._pools[components] = Pool(
                self._slots, self._memory_bytes, self._tick_s, self._turns, components=components
            )
        return self._pools[components]
