"""`EngineClient`, the seam between programs, which ask for tokens, and engines, which compute them.

Implementations: `weft.engine.inline.InlineEngine` (same process; tests, notebooks, the offline API) and
`weft.engine.supervisor.ProcessEngine` (a process of its own behind zmq; the default of the server).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from weft.core.wire import Command, EngineInfo, EngineStats, Envelope, Sessions

OnEnvelope = Callable[[Envelope], None]


class EngineClient(Protocol):
    """One client of one engine, used from one asyncio event loop.

    When the engine dies, every open operation of this client ends with `Failed(kind="engine_dead")`, operation 0 where
    none is open; its sequences are gone, and after a restart (`ready` is true again) new ones may be opened.
    """

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises `EngineDead` before the first `wait_ready`."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the engine answers now."""
        ...

    async def wait_ready(self) -> EngineInfo:
        """Start the engine where that has not happened, and wait until it answers; after its death, until another one
        does. Raises `ModelLoadError`, `ConfigError`, and `EngineDead` where none will."""
        ...

    def subscribe(self, on_envelope: OnEnvelope) -> None:
        """Set the receiver of all events; called on the event loop, in order, once per step with events."""
        ...

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands, in order, as one message. Never blocks. Raises `EngineDead` while the engine is down."""
        ...

    @property
    def latest_stats(self) -> EngineStats | None:
        """The statistics that the engine sent last; None: it is down, or has sent none."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often a dead engine was replaced."""
        ...

    async def stats(self) -> EngineStats:
        """The engine's statistics of this moment. Raises `EngineDead`."""
        ...

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        """The `limit` sequences of a tenant that wait longest, of all clients. Raises `EngineDead`."""
        ...

    async def drain(self) -> None:
        """Have the engine refuse new sequences, and wait until the last one is released."""
        ...

    async def close(self) -> None:
        """Release everything this client holds and, where it owns the engine, stop it. Idempotent."""
        ...
