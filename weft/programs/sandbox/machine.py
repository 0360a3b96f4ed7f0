"""What the two ways to run a guest have in common: limits, requests, and the seam `Machine`.

A machine is one instance of Wasm code that runs until it asks its host for something. `weft.programs.sandbox.fibers`
and `.threads` make machines; `.guest` drives them and does not know which it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import msgspec

from weft.abi.errors import LimitExceeded, Overloaded, ProgramFailed, WeftError
from weft.programs.sandbox.bytecode import Calls

Value = int | float | bytes


class GuestLimits(msgspec.Struct, frozen=True):
    """What one guest may use, and in whose turns. None: as much as it wants, but for memory, where the pool's slots
    end."""

    cpu_s: float | None = 30.0
    memory_bytes: int | None = 64 << 20
    """Of its linear memory. A Python guest needs about 24 MiB for itself."""
    host_calls: int | None = 1_000_000
    """Requests; one that carries more than 64 KiB counts once more for each."""
    result_bytes: int = 16 << 20
    """Of what its main returns."""
    pause: Callable[[], Awaitable[None]] | None = None
    """Awaited by one that computes each time it gives way to others: it goes on when this returns. On fibers alone."""
    tenant: str = ""
    """Guests of one tenant share its turns to compute. On fibers alone."""


class Request(NamedTuple):
    """A guest asks: the number of the import, and its arguments (numbers; a component's bytes first)."""

    function: int
    args: tuple[Value, ...]


class Machine(Protocol):
    """One instance. Used from one loop; `close` must be called, in any state."""

    @property
    def cpu_s(self) -> float:
        """Processor time in its code so far."""

    @property
    def memory_bytes(self) -> int:
        """The size of its linear memory where that can be seen, else 0. Such memory never shrinks."""

    async def next(self) -> Request | None:
        """Run until the guest asks for something (which must then be answered) or has ended (None). Other tasks of the
        loop run meanwhile. Raises `Trapped`, and what `check` raises, which is called now and then."""

    async def give_way(self) -> None:
        """Let other guests and tasks of the loop run, before the guest goes on: it has asked for long."""

    def answer(self, value: int | bytes) -> None:
        """What the last request comes to; `next` goes on."""

    def result(self) -> bytes:
        """Of a component, after its end: what its calls came to. Of a module: nothing."""

    def read(self, address: int, size: int) -> bytes:
        """Bytes of a module's memory. Raises `ProgramFailed` outside of it."""

    def write(self, address: int, data: bytes) -> None:
        """Change a module's memory. Raises `ProgramFailed` outside of it."""

    def close(self) -> None:
        """End it and give everything back. Twice is once."""


class LoadedCode(Protocol):
    """Compiled code, ready to make machines of."""

    def machine(self, limits: GuestLimits, calls: Calls, check: Callable[[], None]) -> Machine:
        """A new instance that has not begun. `calls` are those of a component; a module has none but its entry. Raises
        `Overloaded` where all slots are taken."""


class Trapped(Exception):
    """The guest's code was ended by the engine: out of bounds, out of stack, unreachable, an abort."""

    def __init__(self, message: str, *, no_memory: bool = False):
        """`no_memory`: it gave up because it was given no more memory."""
        super().__init__(message)
        self.no_memory = no_memory


_NO_MEMORY = (
    "handle_alloc_error",
    "rust_oom",
    "raw_vec::handle_error",
    "wit_dylib_push_string",
    "wit_dylib_pop_string",
)
"""Functions in a backtrace that say so: Rust's, and those that give up where CPython has no room for what passes
between the runner and its host."""


def trapped(message: str) -> Trapped:
    """The engine's message, reduced to what concerns a program's author."""
    lines = [line.strip() for line in message.splitlines()]
    causes = [
        line for line in lines if line and not line[0].isdigit() and not line.startswith(("error while", "note:"))
    ]
    causes = [line for line in causes if line not in ("Caused by:", "wasm backtrace:")]
    no_memory = any(name in message for name in _NO_MEMORY)
    return Trapped(causes[-1] if causes else message.strip(), no_memory=no_memory)


def out_of_bounds(address: int, size: int) -> ProgramFailed:
    """The program gave its host a piece of memory that it does not have."""
    return ProgramFailed(f"the program handed over {size} bytes at {address}, which are not in its memory")


def refused(message: str, limits: GuestLimits) -> WeftError:
    """Why an instance could not be made, from the engine's message."""
    if "concurrent" in message and "limit" in message:
        return Overloaded("all slots of the sandbox are taken; try again later, or raise the number of slots")
    if "memory" in message and ("exceeds" in message or "limit" in message):
        return LimitExceeded(f"the program needs more memory to start than {limits.memory_bytes} bytes", "memory_bytes")
    return ProgramFailed(f"the program could not be started: {message.strip().splitlines()[-1].strip()}")
