"""A host that guests of tests talk to: scripted, in memory, without a model."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from weft.abi.errors import ConfigError, ProgramFailed
from weft.abi.frames import CommandFrame, EventKind, commands, pack_event
from weft.abi.operations import Op
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.sandbox import Sandbox, SandboxConfig

T = TypeVar("T")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "wasm"
SHORT = GuestLimits(cpu_s=5.0)


class FakeHost:
    """Tokens are bytes; generating repeats what was appended, one token a part; RECEIVE is never answered."""

    def __init__(self) -> None:
        self.said: list[CommandFrame] = []
        self.sequences: dict[int, bytes] = {}
        self.waits = 0
        self.on_wait: Callable[[], None] | None = None
        self.on_command: Callable[[CommandFrame], None] | None = None
        self._events = b""
        self._news = asyncio.Event()

    @property
    def logs(self) -> list[str]:
        return [command.blobs[0].decode() for command in self.said if command.op is Op.LOG]

    def commands(self, data: bytes) -> None:
        for command in commands(data):
            self.said.append(command)
            if self.on_command is not None:
                self.on_command(command)
            self._carry_out(command)

    def behind(self) -> None:
        """All is carried out at once."""

    def take_events(self) -> bytes:
        events, self._events = self._events, b""
        self._news.clear()
        return events

    async def wait_events(self, timeout_s: float | None) -> bytes:
        self.waits += 1
        if self.on_wait is not None:
            self.on_wait()
        if not self._events:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return b""
        return self.take_events()

    def on_events(self, wake: Callable[[], None]) -> None:
        raise NotImplementedError

    def emit(self, event: bytes) -> None:
        self._events += event
        self._news.set()

    def _carry_out(self, command: CommandFrame) -> None:
        call = command.call
        match command.op:
            case Op.TOKENIZE:
                text = command.blobs[0]
                self.emit(pack_event(EventKind.RESULT, call, struct.pack(f"<{len(text)}i", *text)))
            case Op.SLEEP:
                answer = pack_event(EventKind.RESULT, call)
                asyncio.get_running_loop().call_later(command.numbers[0], self.emit, answer)
            case Op.SEQ_OPEN:
                self.sequences[int(command.numbers[0])] = b""
            case Op.SEQ_APPEND:
                self.sequences[int(command.numbers[0])] += command.blobs[0]
            case Op.SEQ_RELEASE:
                del self.sequences[int(command.numbers[0])]
            case Op.SEQ_GENERATE:
                tokens = self.sequences[int(command.numbers[0])]
                for (token,) in struct.iter_unpack("<i", tokens):
                    self.emit(pack_event(EventKind.PART, call, struct.pack("<i", token), bytes([token])))
                self.emit(pack_event(EventKind.RESULT, call, b"{}"))
            case Op.STORE_GET:
                self.emit(pack_event(EventKind.ERROR, call, b"invalid_request", b"no store here", b"name"))
            case Op.STORE_PUT:
                self.emit(pack_event(EventKind.RESULT, call))


CALL = """
import asyncio, struct
from weft.sdk.channel import current
from weft.abi.operations import Op
def ask(op, *values): return current().ask(op, *values)
"""
"""What programs of tests begin with: the library's lowest level, so that they depend on nothing above it."""


def execute(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end; a test that hangs fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


def python(
    sandbox: Sandbox, source: str, args: bytes = b"null", *, limits: GuestLimits = SHORT, host: FakeHost | None = None
) -> bytes:
    """What a program returns."""

    async def run() -> bytes:
        return await sandbox.python(source, args, host or FakeHost(), limits).run()

    return execute(run())


def failure(sandbox: Sandbox, source: str, args: bytes = b"null", *, limits: GuestLimits = SHORT) -> ProgramFailed:
    """How a program fails."""
    try:
        result = python(sandbox, source, args, limits=limits)
    except ProgramFailed as error:
        return error
    raise AssertionError(f"it did not fail, and returned {result!r}")


def opened_with(backend: str, slots: int = 256) -> Sandbox:
    """A sandbox; the test is skipped where no C compiler has built what fibers need."""
    try:
        return Sandbox.open(SandboxConfig(slots=slots, backend=backend))  # type: ignore[arg-type]
    except ConfigError as error:
        if backend == "fibers" and "no shim" in str(error):
            pytest.skip(str(error))
        raise
