"""The functions a core module may import: Weft's five and a few harmless ones of WASI preview 1, written here.

Owns their types and what each does. `docs/wasm.md` describes them. It does not know how a guest is suspended: each
function is called with the guest waiting, and reads and writes its memory. Real WASI is never linked. Imports nothing
beyond the standard library: the process that checks uploads uses the types.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.abi.errors import ProgramFailed
from weft.abi.frames import pack
from weft.abi.operations import Op
from weft.programs.sandbox.module_shape import Entry, Signature, entry_of, shape_of

if TYPE_CHECKING:
    from weft.programs.sandbox.machine import Machine, Value

_TYPES = {"i": "i32", "l": "i64", "d": "f64"}
_BADF, _INVAL, _NOSYS = 8, 28, 52


MAX_EXCHANGE_BYTES = 32 << 20
"""Of the commands that a module hands over at once."""


class Exited(Exception):
    """The program asked to be ended; `code` is what it says."""

    def __init__(self, code: int):
        super().__init__(f"the program exited with status {code}")
        self.code = code


class GuestRun(Protocol):
    """What the functions need of one run."""

    machine: Machine
    module_args: bytes
    events: memoryview
    output: bytes
    entropy: GuestEntropy

    def say(self, data: bytes) -> None:
        """Commands that wait for no answer."""

    def exchange(self, data: bytes, timeout_s: float) -> bytes | Awaitable[bytes]:
        """Pass commands to the host and events back."""

    def count(self, size: int) -> None:
        """So many bytes cross between the guest and its host."""

    def check_result(self, size: int) -> None:
        """Raise where a result of this size is too large."""


Handler = Callable[..., "int | Awaitable[int]"]


class Import(NamedTuple):
    """One function: i is an i32 (unsigned here), l an i64, d an f64."""

    module: str
    name: str
    params: str
    results: str
    handler: Handler | None = None

    @property
    def signature(self) -> Signature:
        """The Wasm type of the import."""
        return Signature(tuple(_TYPES[kind] for kind in self.params), tuple(_TYPES[kind] for kind in self.results))


class GuestEntropy:
    """Bytes from a seed: SHAKE-256 of it and a counter. The same seed gives the same bytes."""

    def __init__(self, seed: bytes):
        self._seed = seed
        self._counter = 0

    def take(self, size: int) -> bytes:
        """The next `size` pseudo-random bytes."""
        self._counter += 1
        return hashlib.shake_256(self._seed + self._counter.to_bytes(8, "little")).digest(size)


# ---- weft


def _exchange(run: GuestRun, address: int, size: int, timeout_s: float) -> int | Awaitable[int]:
    if size > MAX_EXCHANGE_BYTES:
        # Copying it would keep all others waiting, and take the host's memory.
        raise ProgramFailed(f"the program handed over {size} bytes in one exchange; {MAX_EXCHANGE_BYTES} is the most")
    events = run.exchange(run.machine.read(address, size), timeout_s)
    if isinstance(events, bytes):
        # A view, so that reading them piece by piece costs the same as at once.
        run.events = memoryview(events)
        return len(events)
    return _later(run, events)


async def _later(run: GuestRun, coming: Awaitable[bytes]) -> int:
    run.events = memoryview(await coming)
    return len(run.events)


def _read(run: GuestRun, address: int, capacity: int) -> int:
    taken = run.events[:capacity]
    run.machine.write(address, bytes(taken))
    run.events = run.events[len(taken) :]
    return len(taken)


def _args(run: GuestRun, address: int, capacity: int) -> int:
    run.count(min(capacity, len(run.module_args)))
    run.machine.write(address, run.module_args[:capacity])
    return len(run.module_args)


def _result(run: GuestRun, address: int, size: int) -> int:
    run.check_result(size)
    run.count(size)
    run.output = run.machine.read(address, size)
    return 0


def _fail(run: GuestRun, address: int, size: int) -> int:
    raise ProgramFailed(run.machine.read(address, min(size, 1 << 16)).decode("utf-8", "replace"))


# ---- WASI


def _fd_write(run: GuestRun, descriptor: int, vectors: int, count: int, written: int) -> int:
    if descriptor not in (1, 2):
        return _BADF
    if count > 1024:
        return _INVAL
    pieces, size_of_all = [], 0
    for address, size in struct.iter_unpack("<II", run.machine.read(vectors, 8 * count)):
        size_of_all += size
        if size_of_all > 1 << 20:
            return _INVAL
        pieces.append(run.machine.read(address, size))
    run.count(size_of_all)
    data = b"".join(pieces)
    if data:
        run.say(
            pack(Op.LOG, 0, 1 if descriptor == 1 else 3, data.decode("utf-8", "replace").removesuffix("\n").encode())
        )
    run.machine.write(written, len(data).to_bytes(4, "little"))
    return 0


def _random_get(run: GuestRun, address: int, size: int) -> int:
    if size > 1 << 20:
        return _INVAL
    run.count(size)
    run.machine.write(address, run.entropy.take(size))
    return 0


def _clock_time_get(run: GuestRun, clock: int, precision: int, address: int) -> int:
    run.machine.write(address, time.time_ns().to_bytes(8, "little"))
    return 0


def _nothing_there(run: GuestRun, count: int, size: int) -> int:
    run.machine.write(count, bytes(4))
    run.machine.write(size, bytes(4))
    return 0


def _proc_exit(run: GuestRun, code: int) -> int:
    raise Exited(code)


def _always(number: int) -> Handler:
    def answer(run: GuestRun, *args: Value) -> int:
        return number

    return answer


_WASI = "wasi_snapshot_preview1"
IMPORTS = (
    Import("weft", "exchange", "iid", "i", _exchange),
    Import("weft", "read", "ii", "i", _read),
    Import("weft", "args", "ii", "i", _args),
    Import("weft", "result", "ii", "", _result),
    Import("weft", "fail", "ii", "", _fail),
    Import(_WASI, "fd_write", "iiii", "i", _fd_write),
    Import(_WASI, "random_get", "ii", "i", _random_get),
    Import(_WASI, "clock_time_get", "ili", "i", _clock_time_get),
    Import(_WASI, "clock_res_get", "ii", "i", _always(_NOSYS)),
    Import(_WASI, "environ_sizes_get", "ii", "i", _nothing_there),
    Import(_WASI, "environ_get", "ii", "i", _always(0)),
    Import(_WASI, "args_sizes_get", "ii", "i", _nothing_there),
    Import(_WASI, "args_get", "ii", "i", _always(0)),
    Import(_WASI, "proc_exit", "i", "", _proc_exit),
    Import(_WASI, "sched_yield", "", "i", _always(0)),
    Import(_WASI, "fd_close", "i", "i", _always(_BADF)),
    Import(_WASI, "fd_fdstat_get", "ii", "i", _always(_BADF)),
    Import(_WASI, "fd_prestat_get", "ii", "i", _always(_BADF)),
    Import(_WASI, "fd_prestat_dir_name", "iii", "i", _always(_BADF)),
    Import(_WASI, "fd_read", "iiii", "i", _always(_BADF)),
    Import(_WASI, "fd_seek", "ilii", "i", _always(_BADF)),
)
CLOCKS = (Import("weft", "now", "", "d"),)
"""Answered without suspending the guest."""
_KNOWN = {(function.module, function.name): function.signature for function in (*IMPORTS, *CLOCKS)}


def checked_entry(code: bytes) -> Entry:
    """How a module is started. Raises `InvalidRequest` for one that does not keep to the interface."""
    return entry_of(shape_of(code), _KNOWN)
