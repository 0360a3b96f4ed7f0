"""The only file that touches wasmtime's private bindings and the C shim: untyped below, typed above.

Owns pools, the shim's functions, and the few calls of the asynchronous C API that fibers need. It does not know what
guests ask for. Used by `fibers`.

`wasmtime._ffi` is private: the version is pinned, the layouts are compared here, and `selftest` runs before anything
else does.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from functools import cache
from typing import Any

import wasmtime
import wasmtime.component
from wasmtime import _ffi as _ffi_untyped

from weft.abi.errors import ConfigError
from weft.programs.sandbox import build_shim
from weft.programs.sandbox.engine import STACK_BYTES, TABLE_ELEMENTS, WASMTIME_VERSION, engine_config

ffi: Any = _ffi_untyped
MAX_ARGS = 8
FIRST_TURN_TICKS = 5
YIELDED, FINISHED, PARKED, GARBLED = range(4)


class BindingsUnavailable(ConfigError):
    """Fibers cannot be used here; the message says why."""


class FiberFields(ctypes.Structure):
    """What Python sees of the shim's `fiber`."""

    _fields_ = (
        ("function", c_uint32),
        ("count", c_uint32),
        ("args", c_int64 * MAX_ARGS),
        ("bytes", pointer),
        ("size", c_size_t),
        ("cpu_s", c_double),
        ("clock_offset", c_double),
    )


def pooled_engine(slots: int, memory_bytes: int, *, components: bool) -> wasmtime.Engine:
    """An engine with room for `slots` instances at once, of `memory_bytes` at most each."""
    config = engine_config()
    ffi.wasmtime_config_async_stack_size_set(config.ptr(), STACK_BYTES)
    pool = ffi.wasmtime_pooling_allocation_config_new()
    # A component of CPython consists of some thirty core modules, with a memory between them.
    settings = {
        "total_component_instances": slots if components else 0,
        "total_core_instances": slots * (60 if components else 1),
        "total_memories": slots,
        "total_tables": slots * (8 if components else 4),
        "total_stacks": slots,
        "max_memory_size": memory_bytes,
        "table_elements": TABLE_ELEMENTS,
        "max_tables_per_module": 4,
        # Slots are given back to the system some at a time, in fewer calls.
        "decommit_batch_size": 16,
        "max_core_instance_size": 1 << 20,
        "max_component_instance_size": 1 << 20,
    }
    for name, value in settings.items():
        getattr(ffi, f"wasmtime_pooling_allocation_config_{name}_set")(pool, value)
    ffi.wasmtime_pooling_allocation_strategy_set(config.ptr(), pool)
    ffi.wasmtime_pooling_allocation_config_delete(pool)
    return wasmtime.Engine(config)


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "weft_fiber_new": (pointer, [pointer]),
    "weft_fiber_delete": (None, [pointer]),
    "weft_answer_i32": (None, [pointer, c_int32]),
    "weft_answer_bytes": (None, [pointer, c_char_p, c_size_t]),
    "weft_set_string": (None, [pointer, c_char_p, c_size_t]),
    "weft_is_kind": (c_int, [pointer, c_uint8]),
    "weft_take_string": (c_int, [pointer, POINTER(pointer), POINTER(c_size_t)]),
    "weft_free": (None, [pointer]),
    "weft_ticker_start": (pointer, [pointer, c_double]),
    "weft_ticker_stop": (None, [pointer]),
    "weft_ticker_is_asleep": (c_int, [pointer]),
    "weft_poll": (c_int, [pointer, pointer, pointer]),
    "weft_set_up": (None, [pointer, pointer, pointer, pointer, c_uint8, c_uint8]),
    "weft_layout": (None, [POINTER(c_uint64 * 8)]),
    "weft_source_hash": (c_char_p, []),
}


@cache
def shim() -> Any:
    """The shim, checked and set up. Raises `BindingsUnavailable`."""
    try:
        library = ctypes.CDLL(str(build_shim.LIBRARY))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BindingsUnavailable(
            f"no shim: {error}; build it with `python -m weft.programs.sandbox.build_shim`"
        ) from None
    if library.weft_source_hash().decode() != build_shim.source_hash():
        raise BindingsUnavailable(
            "the shim was built from another source; build it with `python -m weft.programs.sandbox.build_shim`"
        )
    layout = (c_uint64 * 8)()
    library.weft_layout(byref(layout))
    core, component = ffi.wasmtime_val_t, ffi.wasmtime_component_val_t
    expected = [ctypes.sizeof(core), core.of.offset, ctypes.sizeof(component), component.of.offset]
    expected += [ctypes.sizeof(ffi.wasm_byte_vec_t), ctypes.sizeof(ffi.wasmtime_async_continuation_t)]
    if list(layout)[:6] != expected:
        raise BindingsUnavailable(
            f"wasmtime {WASMTIME_VERSION} lays its values out as {expected}, not as {list(layout)[:6]}"
        )
    kind = ffi.wasmtime_extern_t.kind
    if (kind.offset, kind.size) != (0, 1):
        raise BindingsUnavailable(
            f"wasmtime {WASMTIME_VERSION} does not begin an export with a byte that says its kind"
        )
    names = ("wasmtime_call_future_poll", "wasmtime_context_set_epoch_deadline", "wasm_byte_vec_new_uninitialized")
    functions = [address(getattr(ffi.dll, name)) for name in (*names, "wasmtime_engine_increment_epoch")]
    library.weft_set_up(*functions, ffi.WASMTIME_COMPONENT_F64, ffi.WASMTIME_COMPONENT_STRING)
    return library


def address(thing: Any) -> int:
    """Where a function or structure is."""
    return ctypes.cast(thing, pointer).value or 0


def error_text(error: Any) -> str:
    """The text of a `wasmtime_error_t`, which is freed."""
    return str(wasmtime.WasmtimeError._from_ptr(error))


_NOTHING = ctypes.cast(0, ctypes.CFUNCTYPE(None, pointer))


def define_component_imports(linker: wasmtime.component.Linker, instance: str, calls: list[str], clock: str) -> None:
    """Define an instance's functions: each call `(string, f64) -> string` is numbered in order, the clock answers."""
    library = shim()
    with linker.root() as root, root.add_instance(instance) as defined:
        for number, name in enumerate((*calls, clock)):
            entry = library.weft_on_component_now if name == clock else library.weft_on_component_call
            callback = ctypes.cast(entry, ffi.wasmtime_component_func_async_callback_t)
            error = ffi.wasmtime_component_linker_instance_add_func_async(
                defined.ptr(),
                ctypes.create_string_buffer(name.encode()),
                len(name.encode()),
                callback,
                number,
                _NOTHING,
            )
            if error:
                raise BindingsUnavailable(error_text(error))


def define_module_import(linker: wasmtime.Linker, module: str, name: str, kind: wasmtime.FuncType, number: int) -> None:
    """Define a core function; number -1: the clock, which answers at once."""
    library = shim()
    callback = ctypes.cast(
        library.weft_on_core_now if number < 0 else library.weft_on_core_call, ffi.wasmtime_func_async_callback_t
    )
    parts = [
        part for text in (module, name) for part in (ctypes.create_string_buffer(text.encode()), len(text.encode()))
    ]
    error = ffi.wasmtime_linker_define_async_func(linker.ptr(), *parts, kind.ptr(), callback, max(number, 0), _NOTHING)
    if error:
        raise BindingsUnavailable(error_text(error))


def component_export(component: wasmtime.component.Component, name: str) -> Any:
    """The index of an exported function."""
    index = ffi.wasmtime_component_get_export_index(
        component.ptr(), None, ctypes.create_string_buffer(name.encode()), len(name.encode())
    )
    if not index:
        raise BindingsUnavailable(f"the component has no export {name}")
    return index


class Ticker:
    """Advances an engine's epoch every `period_s` while guests run in it. Must be closed."""

    def __init__(self, engine: wasmtime.Engine, period_s: float):
        self._engine = engine
        self.handle = shim().weft_ticker_start(address(engine.ptr()), period_s)
        if not self.handle:
            raise BindingsUnavailable("no thread for the sandbox's clock could be started")

    @property
    def is_asleep(self) -> bool:
        """Whether it waits for a guest to run."""
        return bool(shim().weft_ticker_is_asleep(self.handle))

    def close(self) -> None:
        """Stop it, and wait for its thread."""
        if self.handle:
            shim().weft_ticker_stop(self.handle)
            self.handle = None


class Instance:
    """A store and the fiber of what runs in it. One future at a time; `close` in any state."""

    def __init__(self, engine: wasmtime.Engine, memory_bytes: int):
        self.store = wasmtime.Store(engine)
        self.store.set_limits(memory_size=memory_bytes, table_elements=TABLE_ELEMENTS)
        self.context = self.store._context()
        # The first turn is a long one: most launches end within it, and one that is interrupted finds cold caches.
        self.store.set_epoch_deadline(FIRST_TURN_TICKS)
        # It returns nothing: the value that the bindings read as an error is the rest of a register.
        ffi.wasmtime_context_epoch_deadline_async_yield_and_update(self.context, 1)
        self.fiber = shim().weft_fiber_new(address(self.context))
        if not self.fiber:
            raise MemoryError("no memory for a fiber")
        self.fields = FiberFields.from_address(self.fiber)
        self.trap = POINTER(ffi.wasm_trap_t)()
        self.error = POINTER(ffi.wasmtime_error_t)()
        self._future: Any = None
        self._future_address = 0
        self._kept: Any = None
        self._args: Any = ()
        """Of the call in progress: they are ours, and the future may read them until it is gone."""

    def begin(self, future: Any, kept: Any) -> None:
        """Take over a future; `kept` is what it points to."""
        self._future, self._future_address, self._kept = future, address(future), kept

    def poll(self, ticker: int) -> int:
        """Run the guest: YIELDED, FINISHED, PARKED or GARBLED."""
        state: int = shim().weft_poll(self.fiber, self._future_address, ticker)
        return state

    def end(self) -> str | None:
        """After FINISHED: the message of what went wrong, None if nothing did."""
        self._drop_future()
        if self.error:
            message, self.error = error_text(self.error), POINTER(ffi.wasmtime_error_t)()
            return message
        if self.trap:
            trap, self.trap = wasmtime.Trap._from_ptr(self.trap), POINTER(ffi.wasm_trap_t)()
            return str(trap)
        return None

    def close(self) -> None:
        """Drop the future first (it holds the fiber's stack), then the store, then the fiber."""
        self._drop_future()
        self.store.close()
        if self.fiber:
            shim().weft_fiber_delete(self.fiber)
            self.fiber = None

    def _drop_future(self) -> None:
        if self._future is not None:
            ffi.wasmtime_call_future_delete(self._future)
            self._future = None
        args, self._args = self._args, ()
        for arg in args:
            ffi.wasmtime_component_val_delete(byref(arg))

    # ---- components

    def instantiate_component(self, linker: Any, component: Any) -> Any:
        """Begin; returns the instance, to be used when that has finished."""
        made = ffi.wasmtime_component_instance_t()
        future = ffi.wasmtime_component_linker_instantiate_async(
            linker.ptr(), self.context, component.ptr(), byref(made), byref(self.error)
        )
        self.begin(future, made)
        return made

    def call_component(self, instance: Any, export: Any, args: tuple[bytes, ...]) -> Any:
        """Begin a call of a function of strings; returns where its result will be."""
        function = ffi.wasmtime_component_func_t()
        if not ffi.wasmtime_component_instance_get_func(byref(instance), self.context, export, byref(function)):
            raise BindingsUnavailable("the component's function is not there")
        values = (ffi.wasmtime_component_val_t * len(args))()
        results = (ffi.wasmtime_component_val_t * 1)()
        for value, arg in zip(values, args, strict=True):
            shim().weft_set_string(ctypes.addressof(value), arg, len(arg))
        future = ffi.wasmtime_component_func_call_async(
            byref(function), self.context, values, len(args), results, 1, byref(self.error)
        )
        self.begin(future, (function, values, results))
        self._args = values
        return results

    def take_component_result(self, results: Any) -> bytes | None:
        """The bytes of a string; None if it is none."""
        data, size = pointer(), c_size_t()
        try:
            if not shim().weft_take_string(ctypes.addressof(results[0]), byref(data), byref(size)):
                return None
            try:
                return ctypes.string_at(data, size.value)
            finally:
                shim().weft_free(data)
        finally:
            ffi.wasmtime_component_val_delete(byref(results[0]))

    # ---- modules

    def instantiate_module(self, pre: Any) -> Any:
        """Begin; returns the instance, to be used when that has finished."""
        made = ffi.wasmtime_instance_t()
        future = ffi.wasmtime_instance_pre_instantiate_async(
            pre.ptr(), self.context, byref(made), byref(self.trap), byref(self.error)
        )
        self.begin(future, made)
        return made

    def exported_function(self, instance: Any, name: str) -> Any:
        """An exported function. Raises `BindingsUnavailable` for an export of another kind, and for none."""
        return self._export(instance, name, ffi.WASMTIME_EXTERN_FUNC)

    def exported_memory(self, instance: Any, name: str) -> Any:
        """An exported memory. Raises `BindingsUnavailable` for an export of another kind, and for none."""
        return self._export(instance, name, ffi.WASMTIME_EXTERN_MEMORY)

    def _export(self, instance: Any, name: str, kind: Any) -> Any:
        found = ffi.wasmtime_extern_t()
        text = name.encode()
        buffer = ctypes.create_string_buffer(text)
        if not ffi.wasmtime_instance_export_get(self.context, byref(instance), buffer, len(text), byref(found)):
            raise BindingsUnavailable(f"the module does not export {name}")
        # The C API takes any bytes for a function's: what is none ends the process.
        if not shim().weft_is_kind(ctypes.addressof(found), kind.value):
            ffi.wasmtime_extern_delete(byref(found))
            raise BindingsUnavailable(f"the module exports {name} as another kind than it was checked for")
        return found

    def call_module(self, function: Any, num_results: int) -> Any:
        """Begin a call without arguments; returns where its results will be."""
        results = (ffi.wasmtime_val_t * max(num_results, 1))()
        callee = function.of.func
        future = ffi.wasmtime_func_call_async(
            self.context, byref(callee), None, 0, results, num_results, byref(self.trap), byref(self.error)
        )
        self.begin(future, (function, callee, results))
        return results

    def memory(self, found: Any) -> tuple[int, int]:
        """Address and size in bytes of an exported memory. It moves when the guest runs."""
        memory = found.of.memory
        data = ffi.wasmtime_memory_data(self.context, byref(memory))
        return address(data), int(ffi.wasmtime_memory_data_size(self.context, byref(memory)))
