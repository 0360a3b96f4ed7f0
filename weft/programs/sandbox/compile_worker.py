"""The process that compiles Wasm: `python -m weft.programs.sandbox.compile_worker component|module TARGET LIMITS`.

Reads the code from its standard input, writes machine code to TARGET. It limits itself before it reads anything, since
what it compiles may come from a stranger. Exit status 0, or 1 and the reason on standard error; 3 where it is the disk
that does not take the machine code. Started by `compiled`.
"""

from __future__ import annotations

import resource
import sys

UNWRITTEN = 3
CPU_S, MEMORY_BYTES, FILE_BYTES = 300, 6 << 30, 1 << 30


def limit(cpu_s: int) -> None:
    """No more time, memory, disk or files than compiling needs, and no core dumps."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def main() -> int:
    """Compile what comes in."""
    kind, target, cpu_s = sys.argv[1:4]
    limit(min(int(cpu_s), CPU_S))
    code = sys.stdin.buffer.read()

    import wasmtime
    import wasmtime.component

    from weft.abi.errors import InvalidRequest
    from weft.programs.sandbox.engine import engine_config
    from weft.programs.sandbox.imports import entry_of, module_linker

    engine = wasmtime.Engine(engine_config())
    try:
        if kind == "component":
            compiled = wasmtime.component.Component(engine, code).serialize()
        else:
            module = wasmtime.Module(engine, code)
            entry_of(module)
            module_linker(wasmtime.Linker(engine), module)
            compiled = module.serialize()
    except (wasmtime.WasmtimeError, InvalidRequest) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        with open(target, "wb") as file:
            file.write(compiled)
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return UNWRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
