"""`Throttle`: a run whose tenant has used up a rate (`weft.programs.rates`) waits, and then goes on.

Owns the commands that wait. It stands between a guest and its session, and holds back what the guest says until
nothing is owed any more: in order, and nothing of it is lost. So a program is slowed down by what others of its tenant
used, and never broken by it: a refusal would hit whichever call comes next, in the middle of a text, and few programs
are written to try every call again. While it waits, its time runs: `wall_s` bounds the wait. What was begun before goes
on, and its events arrive. Made by `weft.programs.host.run_task` where the tenant has a rate; used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from weft.abi.errors import Overloaded, ProgramFailed, WeftError
from weft.abi.frames import WireError
from weft.programs.guest import GuestHost
from weft.programs.limits import Budget
from weft.programs.rates import Wait

MAX_WAITING_BYTES = 64 << 20
"""Of commands of one program. One that goes on asking without waiting for answers is ended."""


class Throttle:
    """Implements `weft.programs.guest.GuestHost`, on one."""

    def __init__(
        self,
        host: GuestHost,
        budget: Budget,
        *,
        end: Callable[[WeftError], None],
        on_wait: Callable[[Wait], None] = lambda wait: None,
    ):
        """`end` ends the run where a command that had waited breaks it; `on_wait` is told when it begins to wait."""
        self._host, self._budget = host, budget
        self._end, self._on_wait = end, on_wait
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._waited_s = 0.0
        self._over: asyncio.Future[None] | None = None
        self._error: WeftError | None = None

    @property
    def waited_s(self) -> float:
        """How long commands were held back so far."""
        now_s = self._since_s if self._timer is None else asyncio.get_running_loop().time()
        return self._waited_s + now_s - self._since_s

    def commands(self, data: bytes) -> None:
        """As `GuestHost.commands`, now or later. Raises `Overloaded` where too much waits: the run must end with it."""
        if self._timer is None:
            wait = self._budget.wait()
            if wait is None:
                self._host.commands(data)
                return
            self._on_wait(wait)
            self._since_s = asyncio.get_running_loop().time()
            self._sleep(wait)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise Overloaded(f"the program says more than {MAX_WAITING_BYTES} bytes while its tenant's rate is used up")
        self._waiting.append(data)

    def take_events(self) -> bytes:
        """As `GuestHost.take_events`."""
        return self._host.take_events()

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """As `GuestHost.wait_events`."""
        return await self._host.wait_events(timeout_s)

    def on_events(self, wake: Callable[[], None]) -> None:
        """As `GuestHost.on_events`."""
        self._host.on_events(wake)

    async def pause(self) -> None:
        """For a guest that computes: wait as its commands would."""
        loop = asyncio.get_running_loop()
        while (wait := self._budget.wait()) is not None:
            began_s, is_counted = loop.time(), self._timer is not None
            if not is_counted:
                self._on_wait(wait)
            await asyncio.sleep(wait.seconds)
            if not is_counted:
                self._waited_s += loop.time() - began_s

    async def settled(self) -> None:
        """Wait until nothing waits: what a program said last is carried out too. Raises what it was killed with."""
        if self._timer is not None:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        if self._error is not None:
            raise self._error

    def kill(self, error: WeftError) -> None:
        """The run ends with this: what waits is not carried out."""
        self._error = self._error or error
        self.close()

    def close(self) -> None:
        """The run is over: what waits is not carried out. Idempotent."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._rest()

    # ---- inside

    def _sleep(self, wait: Wait) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait.seconds, self._go_on)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._waited_s, self._timer = self.waited_s, None
            self._since_s = 0.0
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _go_on(self) -> None:
        """Carry out what waits, as far as the rate goes: others of the tenant use it too."""
        while self._waiting:
            wait = self._budget.wait()
            if wait is not None:
                self._sleep(wait)
                return
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            try:
                self._host.commands(data)
            except WeftError as error:
                self._broken(error)
                return
            except WireError as error:
                self._broken(ProgramFailed(f"the program sent its host what is no command: {error}"))
                return
        self._rest()

    def _broken(self, error: WeftError) -> None:
        self.kill(error)
        self._end(error)
