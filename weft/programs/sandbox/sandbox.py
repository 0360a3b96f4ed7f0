"""The sandbox: turns source text and modules into guests.

Owns the choice between fibers and threads, the compiled code, and the slots. `Sandbox.open` is slow the first time on a
machine (it compiles CPython); after that it takes tens of milliseconds. Used by the program host.
"""

from __future__ import annotations

import logging
import lzma
import os
import threading
from pathlib import Path
from typing import Literal

import msgspec
import wasmtime

from weft.abi.errors import ConfigError, InvalidRequest
from weft.config import cache_directory
from weft.programs.guest import GuestHost
from weft.programs.sandbox import build_runner
from weft.programs.sandbox.backend import Backend, choose
from weft.programs.sandbox.bytecode import Bytecode
from weft.programs.sandbox.compiled import CompiledCode
from weft.programs.sandbox.guest import ModuleGuest, PythonGuest, SandboxedGuest
from weft.programs.sandbox.machine import GuestLimits, LoadedCode
from weft.programs.sandbox.workers import WorkerProcess

_LOG = logging.getLogger(__name__)
_LOADED_MODULES = 256


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much there may be at once."""

    slots: int = 1024
    """Python programs at once, and as many modules. A slot costs address space only."""
    memory_bytes: int = 1 << 30
    """Of one program, at most, also where its own limit is larger."""
    tick_s: float = 0.002
    """A program that computes gives way to others this often."""
    backend: Literal["auto", "fibers", "threads"] = "auto"
    """auto: fibers where they work here, else a thread for each program."""


class Module:
    """An uploaded module, compiled and loaded."""

    def __init__(self, code: LoadedCode):
        self.code = code


class Sandbox:
    """Makes guests. `close` when none runs any more."""

    def __init__(self, backend: Backend, compiled: CompiledCode, python: LoadedCode):
        self._backend, self._compiled, self._python = backend, compiled, python
        self._bytecode = Bytecode()
        self._modules: dict[Path, Module] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, config: SandboxConfig | None = None, directory: Path | None = None) -> Sandbox:
        """Blocks, for seconds where CPython has to be compiled first. `directory` is where machine code is kept, by
        default below Weft's cache. Raises `ConfigError`."""
        config = config or SandboxConfig()
        compiled = CompiledCode(directory or cache_directory(os.environ) / "sandbox")
        path = runner(compiled)
        backend = choose(config.backend, config.slots, config.memory_bytes, config.tick_s)
        try:
            python = backend.component(path)
        except wasmtime.WasmtimeError as error:
            raise ConfigError(f"the sandbox's Python cannot be loaded; remove {path} and try again: {error}") from None
        return cls(backend, compiled, python)

    @property
    def backend(self) -> str:
        """The backend in use: `fibers` or `threads`."""
        return self._backend.name

    def python(
        self,
        source: str,
        args: bytes,
        host: GuestHost,
        limits: GuestLimits | None = None,
        *,
        name: str = "program.py",
        seed: bytes | None = None,
    ) -> SandboxedGuest:
        """A program from its source text. `args` is JSON (nothing: null); `name` is what tracebacks call the file; the
        same `seed` gives the same random numbers (None: others each time)."""
        seed = os.urandom(32) if seed is None else seed
        calls = self._bytecode.calls(source.encode("utf-8", "replace"), name.encode("utf-8", "replace"), args, seed)
        return PythonGuest(self._python, host, limits or GuestLimits(), calls)

    def compile(self, code: bytes, worker: WorkerProcess | None = None) -> Module:
        """Check and compile a core module; known ones are found. Blocks, so call it on a thread; `worker` can be killed
        from another. Raises `InvalidRequest`, `StorageFailed`, `WorkerKilled`."""
        compiled = self._compiled.module(code, worker)
        with self._lock:
            try:
                found = self._modules.pop(compiled.path, None) or Module(self._backend.module(compiled))
            except wasmtime.WasmtimeError as error:
                reason = str(error).strip().splitlines()[-1].strip()
                raise InvalidRequest(f"the module does not fit the sandbox: {reason}", "source") from None
            self._modules[compiled.path] = found
            while len(self._modules) > _LOADED_MODULES:
                del self._modules[next(iter(self._modules))]
        return found

    def module(
        self,
        module: Module,
        args: bytes,
        host: GuestHost,
        limits: GuestLimits | None = None,
        *,
        seed: bytes | None = None,
    ) -> SandboxedGuest:
        """A run of a module; see `python`."""
        return ModuleGuest(module.code, host, limits or GuestLimits(), args, os.urandom(32) if seed is None else seed)

    def close(self) -> None:
        """Stop what runs in the background. Guests must have ended."""
        self._modules.clear()
        self._backend.close()


def runner(compiled: CompiledCode) -> Path:
    """The compiled component that runs Python, compiled now if need be."""
    identity = build_runner.metadata()["sha256"]
    found = compiled.component(identity, None)
    if found is None:
        _LOG.info("compiling the sandbox's Python for this machine; this takes some seconds and happens once")
        found = compiled.component(identity, lzma.decompress(build_runner.COMPONENT.read_bytes()))
    if found is None:
        raise AssertionError("compiling gives a path or raises")
    return found
