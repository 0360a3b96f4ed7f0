"""Modules of every shape, each run once: `python -m tests.programs.sandbox.module_shapes FOLDER SEED COUNT`.

Makes small modules from a seed: exports of every kind under every name that the host looks for, wrong signatures, no
memory and several, start functions, imports of wrong types, declared sizes beyond all limits, damaged bytes. Each is
compiled, loaded on fibers and run, with the check of its exports and without it, as if that had let it pass. A module
may end in any error of Weft's, never in the end of this process: so this runs in a process of its own. Prints how many
modules ended how.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import wasmtime

from tests.programs.sandbox.help import FakeHost
from weft.abi.errors import InvalidRequest, WeftError
from weft.abi.frames import WireError
from weft.programs.sandbox import compile_worker
from weft.programs.sandbox.compiled import CompiledModule
from weft.programs.sandbox.fibers import FiberBackend
from weft.programs.sandbox.guest import ModuleGuest
from weft.programs.sandbox.imports import CLOCKS, IMPORTS
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.module_shape import Entry

NAMES = ("run", "_start", "_initialize", "memory")
_TYPES = ("i32", "i64", "f32", "f64", "v128", "funcref", "externref")
_ZERO = {
    "i32": "(i32.const 0)",
    "i64": "(i64.const 0)",
    "f32": "(f32.const 0)",
    "f64": "(f64.const 0)",
    "v128": "(v128.const i64x2 0 0)",
    "funcref": "(ref.null func)",
    "externref": "(ref.null extern)",
}
_LIMITS = GuestLimits(cpu_s=0.05, memory_bytes=1 << 20, host_calls=100)
_TABLE_SIZES = ("0", "1", "20001", "4294967295")
_MEMORY_SIZES = ("0", "1", "1", "1", "1", "2 3", "16", "17", "65536", "0 65536")
_LETTERS = {"i": "i32", "l": "i64", "d": "f64"}


class Maker:
    """Modules as text, from a seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def module(self) -> bytes:
        """The next module, as bytes; not always a valid one."""
        chosen = self._random
        parts = [self._import() for _ in range(chosen.choice((0, 0, 1, 3)))]
        if chosen.random() < 0.05:
            sizes = ("0", "1", "17", "1 1", "1 65536", "65536", "i64 1", "1 2 shared")
            parts.append(f"(memory {chosen.choice(sizes)})")
        for name in NAMES:
            usual = "memory" if name == "memory" else "function"
            kinds = ("global", "table", "memory", "none", "function", "tag")
            kind = usual if chosen.random() < 0.7 else chosen.choices(kinds, (9, 9, 9, 9, 9, 1))[0]
            parts.append(self._export(name, kind))
        if chosen.random() < 0.3:
            parts.append(f"(func $start {self._body()}) (start $start)")
        if chosen.random() < 0.2:
            parts.append(f"(table {chosen.choice(('1', '20001', '4294967295'))} funcref)")
        if chosen.random() < 0.2:
            parts.append(f'(data (i32.const {chosen.choice((0, 65530, -1))}) "12345678")')
        # Imports come first; a module with two exports of one name is not valid, and is tried too.
        code = bytearray(wasmtime.wat2wasm(f"(module {' '.join(parts)})"))
        if chosen.random() < 0.1:
            for _ in range(chosen.randrange(1, 4)):
                code[chosen.randrange(8, len(code))] = chosen.randrange(256)
        return bytes(code)

    def _import(self) -> str:
        known = self._random.choice((*IMPORTS, *CLOCKS))
        params, results = [_LETTERS[kind] for kind in known.params], [_LETTERS[kind] for kind in known.results]
        if self._random.random() < 0.3:
            params, results = self._some_types(), self._some_types()
        kind = self._random.choice(("function",) * 16 + ("global", "table", "memory", "tag"))
        described = {
            "function": f"(func {self._signature(params, results)})",
            "global": "(global i32)",
            "table": "(table 1 funcref)",
            "memory": "(memory 1)",
            "tag": "(tag)",
        }[kind]
        module = self._random.choice((known.module,) * 4 + ("other",))
        return f'(import "{module}" "{known.name}" {described})'

    def _export(self, name: str, kind: str) -> str:
        export = f'(export "{name}")'
        if kind == "function":
            params = self._some_types() if self._random.random() < 0.3 else []
            results = self._random.choice(([], [], ["i32"], self._some_types()))
            return f"(func {export} {self._signature(params, results)} {self._body()} {self._values(results)})"
        value = self._random.choice(_TYPES)
        own_memory = f"(memory {export} {self._random.choice(_MEMORY_SIZES)})"
        return {
            "global": f"(global {export} {value} {_ZERO[value]})",
            "table": f"(table {export} {self._random.choice(_TABLE_SIZES)} funcref)",
            "memory": own_memory if name == "memory" else f'(export "{name}" (memory 0))',
            "tag": f"(tag {export})",
            "none": "",
        }[kind]

    def _body(self) -> str:
        return self._random.choice(
            (
                *("", "", "nop", "unreachable", "(loop $on (br $on))", "(drop (i32.load (i32.const 99999999)))"),
                *("(drop (memory.grow (i32.const 65535)))", "(call 0)"),
                "(memory.fill (i32.const 0) (i32.const 1) (i32.const 9))",
            )
        )

    def _some_types(self) -> list[str]:
        return [self._random.choice(_TYPES) for _ in range(self._random.choice((0, 1, 2, 9, 40)))]

    @staticmethod
    def _signature(params: list[str], results: list[str]) -> str:
        return f"(param {' '.join(params)}) (result {' '.join(results)})"

    @staticmethod
    def _values(results: list[str]) -> str:
        return " ".join(_ZERO[result] for result in results)


async def _end_of(backend: FiberBackend, compiled: CompiledModule) -> str:
    """Load machine code and run it: how that ends."""
    try:
        code = backend.module(compiled)
    except wasmtime.WasmtimeError:
        return "not loaded"
    guest = ModuleGuest(code, FakeHost(), _LIMITS, b"null", b"seed")
    try:
        await guest.run()
    except (WeftError, WireError) as error:
        return type(error).__name__
    return "finished"


async def _try_all(folder: Path, seed: int, count: int) -> Counter[str]:
    maker, ends, path = Maker(seed), Counter[str](), folder / "code"
    backend = FiberBackend(4, 16 << 20, 0.002)
    for _ in range(count):
        code = maker.module()
        (folder / "module.wasm").write_bytes(code)  # the one that ends this process is the last
        for check in ("checked", "unchecked"):
            passing = mock.patch.object(compile_worker, "checked_entry", return_value=Entry("run", 0, True))
            with passing if check == "unchecked" else contextlib.nullcontext():
                try:
                    machine_code, entry = compile_worker.machine_code("module", code)
                except (wasmtime.WasmtimeError, InvalidRequest) as error:
                    ends[f"{check}: {type(error).__name__}"] += 1
                    continue
            path.write_bytes(machine_code)
            assert entry is not None
            ends[f"{check}: {await _end_of(backend, CompiledModule(path, entry))}"] += 1
            path.unlink()
    backend.close()
    return ends


def main() -> None:
    """As the command line says."""
    folder, seed, count = sys.argv[1:4]
    print(dict(asyncio.run(_try_all(Path(folder), int(seed), int(count)))))


if __name__ == "__main__":
    main()
