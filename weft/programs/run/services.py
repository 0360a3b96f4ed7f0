"""What a session needs from the program host that runs it: one value, and the protocols of what the host itself builds.

Owns nothing. `weft.programs.host` implements `Launcher`, `ChildRun` and `Outlet`; tests have fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from weft.abi.errors import WeftError
from weft.programs.network.requests import HttpRequest, HttpResponse
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.loop_share import LoopShare
from weft.programs.run.messages import Hub
from weft.programs.run.model import ProgramModel
from weft.programs.types import Caller
from weft.store.values import ValueStore


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a program launches: one of `program` and `source`."""

    program: str | None = None
    """Of the tenant's uploaded programs, or a built-in one."""
    source: str | None = None
    """Python."""
    args: bytes = b"null"
    """JSON."""


class ChildRun(Protocol):
    """A run that a program launched."""

    @property
    def id(self) -> str:
        """The id of the run."""

    async def join(self) -> bytes:
        """JSON of what its main returned. Raises what it failed with. May be called often, and be cancelled."""

    def kill(self) -> None:
        """Cancel the run. Idempotent."""


class Launcher(Protocol):
    """Starts runs on behalf of programs."""

    async def launch(self, spec: ChildSpec, caller: Caller, budget: RunBudget) -> ChildRun:
        """Start a run within a budget that is already its own; the launcher closes it when the run is over, and where
        it raises. Raises `WeftError` for a program that cannot be started."""


class Web(Protocol):
    """What a run's requests go through: `weft.programs.network.client.TenantNetwork`."""

    async def fetch(self, request: HttpRequest, allow: Iterable[str]) -> HttpResponse:
        """Send a request on behalf of a run with this list. Raises `InvalidRequest`, `NetworkDenied`,
        `NetworkFailed`."""


class Outlet(Protocol):
    """Where a run's messages and log lines go: its launcher, and clients that are attached to it."""

    def message(self, data: bytes) -> None:
        """A JSON message. Raises `Overloaded` where too many wait unread."""

    def log(self, level: int, text: str) -> None:
        """level: 0 debug, 1 info, 2 warning, 3 error."""

    def end(self, error: WeftError) -> None:
        """A limit was gone beyond while the program was not calling: end it with this error."""

    def charge(self, cpu_s: float) -> None:
        """Processor time that the host spent on the program's behalf: it counts as the program's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Of one program host, for runs on one model."""

    model: ProgramModel
    models: Callable[[], Sequence[ProgramModel]]
    """All models that the host knows."""
    hub: Hub
    store: ValueStore
    network: Web
    launcher: Launcher
    loop_share: LoopShare = field(default_factory=LoopShare)
