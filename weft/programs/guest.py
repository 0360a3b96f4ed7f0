"""The seam between one running program and the host it talks to.

A `Guest` is a program that runs: sandboxed (`weft.programs.sandbox`) or trusted. A `GuestHost` is all it can reach: a
session, or a fake in tests. Between them travel the bytes of `weft.abi.frames` and nothing else. Both live in one
asyncio loop and are used from there alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from weft.abi.errors import WeftError


class GuestHost(Protocol):
    """What a guest reaches: commands go in, events come out."""

    def commands(self, data: bytes) -> None:
        """Carry out what the guest said; never blocks. Raises `WeftError` or `weft.abi.frames.WireError`: the run must
        end with it."""

    def behind(self) -> Awaitable[None] | None:
        """Where commands wait for their turn: what a guest awaits before it says more. None: it may go on."""

    def take_events(self) -> bytes:
        """The events so far, `b""` if there are none. Never waits."""

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """The events so far; if there are none, wait for some, but no longer than `timeout_s` seconds (None: without
        end). `b""` where the time is over."""

    def on_events(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in the loop, whenever events become available after there were none."""


class GuestUsage(msgspec.Struct, frozen=True):
    """What a guest has used so far."""

    cpu_s: float = 0.0
    """Processor time in its own code."""
    memory_bytes: int = 0
    """The most memory it held at once; 0 where that is not known: of trusted guests, and of Python in the sandbox, as
    the engine shows the memory of components to nobody."""
    host_calls: int = 0
    """How often it turned to its host."""


class Guest(Protocol):
    """One running instance of a program."""

    async def run(self) -> bytes:
        """Run it to its end, once. Returns what its main returned, as JSON.

        Raises `ProgramFailed` where its code raised, `EngineDead` where it let that go by, `LimitExceeded`, the error
        it was killed with, or what the host raised.
        """

    def kill(self, error: WeftError) -> None:
        """End it, also while it computes: `run` raises `error`. From the loop it runs in; once it has ended, nothing
        happens."""

    def usage(self) -> GuestUsage:
        """What it has used; also after its end."""
