"""The services of a program host that the context of a run uses: one dataclass, and the protocols of its parts.

`weft.programs.host` implements `Launcher`, `ChildRun` and `Outlet`; tests have fakes.
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
    """The child that a program launches: one of `program` and `source` is set."""

    program: str | None = None
    """The name of an uploaded program of the tenant, or of a built-in one."""
    source: str | None = None
    """Python."""
    args: bytes = b"null"
    """JSON."""


class ChildRun(Protocol):
    """A run that a program launched."""

    @property
    def id(self) -> str:
        """The id of the run."""

    @property
    def result_bytes(self) -> int:
        """Bytes of what `main` returned; 0 before."""
        ...

    async def join(self) -> bytes:
        """Wait for the end and return the JSON of the value that `main` returned. Raises the run's error. May be called
        several times, and be cancelled."""

    def kill(self) -> None:
        """Cancel the child's run. Idempotent."""


class Launcher(Protocol):
    """Starts runs on behalf of programs."""

    async def launch(self, spec: ChildSpec, caller: Caller, budget: RunBudget) -> ChildRun:
        """Start a run with its own budget. The launcher closes the budget when the run ends, also if it cannot start.
        Raises `WeftError` for a program that cannot be started."""


class Web(Protocol):
    """Sends a run's HTTP requests: `weft.programs.network.client.TenantNetwork`."""

    async def fetch(self, request: HttpRequest, allow: Iterable[str]) -> HttpResponse:
        """Send a request on behalf of a run with the allow-list `allow`. Raises `InvalidRequest`, `NetworkDenied`,
        `NetworkFailed`."""


class Outlet(Protocol):
    """Takes a run's messages and log lines, for its launcher and the clients attached to it."""

    def message(self, data: bytes) -> None:
        """Take a JSON message of the program. Raises `Overloaded` if too many wait unread."""

    def log(self, level: int, text: str) -> None:
        """Take a line of the log. `level`: 0 debug, 1 info, 2 warning, 3 error."""

    def end(self, error: WeftError) -> None:
        """End the run with this error: it exceeded a limit outside of a call."""

    def charge(self, cpu_s: float) -> None:
        """Charge processor time that the host spent for the program to the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of one program host, for runs on one model."""

    model: ProgramModel
    models: Callable[[], Sequence[ProgramModel]]
    """All models that the host knows."""
    hub: Hub
    store: ValueStore
    network: Web
    launcher: Launcher
    loop_share: LoopShare = field(default_factory=LoopShare)
