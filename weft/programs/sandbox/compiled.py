"""Machine code of Wasm, kept per machine: found, or compiled in a limited process of its own.

Owns the folder `sandbox` of the cache: for each key an index file that names a file of machine code by its hash. The
index is written last and in one step, so two processes may compile the same at once. Machine code is run as it is, so
it must never come from a user: the folder is this user's alone, and each file is compared with its hash when opened.

Tenants share machine code, since compiling it takes seconds and the folder is bounded for all of them: a tenant that
uploads a module can tell by the time whether the same module was used on this machine before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from weft.abi.errors import ConfigError, InvalidRequest, StorageFailed
from weft.programs.sandbox import compile_worker
from weft.programs.sandbox.engine import ENGINE_FORMAT, WASMTIME_VERSION
from weft.programs.sandbox.module_shape import Entry
from weft.programs.sandbox.workers import WorkerEnded, WorkerProcess

logger = logging.getLogger("weft.programs")

Kind = Literal["component", "module"]
MODULE_BYTES = 16 << 20
"""Of an uploaded module, at most."""
KEPT_BYTES = 1 << 30
"""Of machine code in the folder; what was not used for longest goes first."""
MODULE_CPU_S, _RUNNER_CPU_S = 20, 300
"""Of the process that compiles, at most."""
MODULE_COMPILER_BYTES, _RUNNER_COMPILER_BYTES = 2 << 30, 6 << 30
"""Of its address space."""
_THREADS = {"RAYON_NUM_THREADS": str(min(4, os.cpu_count() or 1))}
_ONE_THREAD = {"RAYON_NUM_THREADS": "1"}


class CompiledModule(NamedTuple):
    """Machine code of an uploaded module."""

    path: Path
    entry: Entry


_Found = tuple[Path, list[object] | None]
"""Machine code, and how a module is started, as it is kept."""


@cache
def _machine() -> str:
    """What machine code depends on besides its source: the engine's version and settings, and the processor."""
    flags = ""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{WASMTIME_VERSION} {ENGINE_FORMAT} {sys.platform} {platform.machine()} {flags}"


def key_of(kind: Kind, identity: bytes) -> str:
    """The name of machine code: what it was made of, for what, by what."""
    return hashlib.sha256(b"%s %s " % (kind.encode(), _machine().encode()) + identity).hexdigest()


class CompiledCode:
    """The folder. `directory` is made if need be, for this user alone."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"{directory} holds machine code, but others may write to it; remove it or name another WEFT_CACHE"
            )

    def component(self, identity: str, code: bytes | None) -> Path | None:
        """Machine code of our own component, whose hash is `identity`; without `code`, None where it is not there."""
        key = key_of("component", identity.encode())
        found = self._find(key)
        if found is None and code is not None:
            found = self._kept("component", key, code, WorkerProcess())
        return None if found is None else found[0]

    def module(self, code: bytes, worker: WorkerProcess | None = None) -> CompiledModule:
        """Machine code of an uploaded module; `worker` compiles it where it is not known. Raises `InvalidRequest` for a
        module that is not usable, `StorageFailed` where the disk takes no more, and `WorkerKilled`."""
        if len(code) > MODULE_BYTES:
            raise InvalidRequest(f"a module may have {MODULE_BYTES} bytes, this one has {len(code)}", "source")
        key = key_of("module", hashlib.sha256(code).digest())
        path, entry = self._find(key) or self._kept("module", key, code, worker or WorkerProcess())
        return CompiledModule(path, Entry(*entry or ()))

    def _find(self, key: str) -> _Found | None:
        """What the index names, if it is whole and ours."""
        try:
            described = json.loads((self.directory / f"{key}.json").read_text())
            digest, entry = str(described["sha256"]), described["entry"]
            path = self.directory / f"{digest}.cwasm"
            if not digest.isalnum() or path.is_symlink() or path.stat().st_uid != os.getuid():
                return None
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if found != digest:
            return None
        with contextlib.suppress(OSError):
            os.utime(self.directory / f"{key}.json")
        return path, entry

    def _kept(self, kind: Kind, key: str, code: bytes, worker: WorkerProcess) -> _Found:
        """Compile it, and keep it whole or not at all. Raises `StorageFailed` too."""
        try:
            return self._compile(kind, key, code, worker)
        except OSError as error:
            raise self._unkept(error.strerror or str(error)) from error

    def _unkept(self, reason: str) -> StorageFailed:
        logger.error("storage failed at %s: %s", self.directory, reason)
        return StorageFailed(
            f"machine code of the sandbox cannot be kept: {reason}; free space in the server's cache folder, or name "
            "another one with WEFT_CACHE"
        )

    def _compile(self, kind: Kind, key: str, code: bytes, worker: WorkerProcess) -> _Found:
        cpu_s, memory_bytes, environment = MODULE_CPU_S, MODULE_COMPILER_BYTES, _ONE_THREAD
        if kind == "component":
            cpu_s, memory_bytes, environment = _RUNNER_CPU_S, _RUNNER_COMPILER_BYTES, _THREADS
        with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
            target = Path(scratch, "code")
            args = [kind, str(target), str(cpu_s), str(memory_bytes)]
            ended = worker.run("weft.programs.sandbox.compile_worker", args, code, environment=environment)
            if ended.status == compile_worker.UNWRITTEN:
                raise self._unkept(ended.errors.strip())
            if ended.status != 0:
                raise self._failed(kind, ended)
            entry = json.loads(ended.output)
            digest = hashlib.sha256(target.read_bytes()).hexdigest()
            final = self.directory / f"{digest}.cwasm"
            # Replacing also mends a file that is damaged; a process that has mapped the old one keeps it.
            os.replace(target, final)
            index = Path(scratch, "index")
            described = {"sha256": digest, "kind": kind, "entry": entry, "wasmtime": WASMTIME_VERSION}
            index.write_text(json.dumps(described))
            os.replace(index, self.directory / f"{key}.json")
        self._prune(final)
        return final, entry

    def _prune(self, newest: Path) -> None:
        """Remove the files beyond the bound. A process that has one mapped keeps it."""
        room, kept, dropped = KEPT_BYTES, {newest}, set()
        with contextlib.suppress(OSError):
            files = sorted(self.directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            for index in files:
                named = self._named(index)
                if named is not None and named.exists():
                    room -= named.stat().st_size
                    if room >= 0:
                        kept.add(named)
                        continue
                if named != newest:
                    index.unlink(missing_ok=True)
                    dropped.add(named)
            for path in set(self.directory.glob("*.cwasm")) - kept:
                # Without an index it may be another process's, which writes that next.
                if path in dropped or path.stat().st_mtime < time.time() - 3600:
                    path.unlink(missing_ok=True)

    def _named(self, index: Path) -> Path | None:
        try:
            return self.directory / f"{json.loads(index.read_text())['sha256']}.cwasm"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def _failed(kind: Kind, ended: WorkerEnded) -> Exception:
        lines = [line.strip() for line in ended.errors.splitlines() if line.strip()]
        reason = ": ".join(dict.fromkeys(line for line in lines if line != "Caused by:")) or f"status {ended.status}"
        if kind == "component":
            return ConfigError(f"the sandbox's Python could not be compiled: {reason[-2000:]}")
        if ended.out_of_time:
            reason = f"compiling it takes more than {MODULE_CPU_S} s of processor time; make it smaller"
        elif ended.status != 1:
            most = MODULE_COMPILER_BYTES >> 20
            reason = f"its compiler ended with status {ended.status}, most likely for more than {most} MiB of memory"
        return InvalidRequest(f"the module was refused: {reason[-2000:]}", "source")
