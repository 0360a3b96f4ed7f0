"""The process that compiles Wasm: `python -m weft.programs.sandbox.compile_worker component|module TARGET CPU_S BYTES`.

Reads the code from its standard input, writes machine code to TARGET, and to standard output how a module is started,
as JSON. It limits itself before it reads anything, since the code that it compiles is untrusted. Exit status 0, or 1
and the reason on standard error; 3 where it is the disk that does not take the machine code. Started by `compiled`.
"""

from __future__ import annotations

import json
import sys

from weft.abi.errors import InvalidRequest
from weft.programs.sandbox.imports import checked_entry
from weft.programs.sandbox.module_shape import Entry
from weft.programs.sandbox.rlimits import limit

UNWRITTEN = 3
FILE_BYTES = 1 << 30


def machine_code(kind: str, code: bytes) -> tuple[bytes, Entry | None]:
    """Machine code of a component or a module, and how a module is started. Raises `InvalidRequest` for a module that
    does not keep to docs/wasm.md, and `wasmtime.WasmtimeError` for code that is not valid."""
    import wasmtime
    import wasmtime.component

    from weft.programs.sandbox.engine import engine_config

    engine = wasmtime.Engine(engine_config())
    if kind == "component":
        return bytes(wasmtime.component.Component(engine, code).serialize()), None
    # Before the engine sees it, and before anything is spent on compiling it.
    entry = checked_entry(code)
    module = wasmtime.Module(engine, code)
    wasmtime.Linker(engine).define_unknown_imports_as_traps(module)
    return bytes(module.serialize()), entry


def main() -> int:
    """Compile the code on standard input; the exit status of the process."""
    kind, target, cpu_s, memory_bytes = sys.argv[1:5]
    limit(int(cpu_s), int(memory_bytes), FILE_BYTES)
    code = sys.stdin.buffer.read()

    import wasmtime

    try:
        compiled, entry = machine_code(kind, code)
    except (wasmtime.WasmtimeError, InvalidRequest) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        with open(target, "wb") as file:
            file.write(compiled)
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return UNWRITTEN
    print(json.dumps(entry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
