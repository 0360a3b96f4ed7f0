"""`CommandQueue`: what a program says, carried out in order, in bounded portions, when its tenant may go on.

Owns the commands that wait. It stands between a guest and the host's side of its run, and holds back what the guest
says for two reasons:

- Programs have used up their share of this pass of the event loop (`LoopShare`). What is left of a message is carried
  out in later passes, with everything else that the loop has to do in between, and the guest says nothing more before
  (`behind`).
- The tenant has used up a rate (`weft.programs.quota.rates`). The program is slowed down by what others of its tenant
  used and never broken by it: a refusal would hit whichever call comes next, in the middle of a text, and few programs
  are written to try every call again. While it waits, its time runs: `wall_s` bounds the wait.

Nothing is lost and the order is kept. What was begun before goes on, and its events arrive. Made for every run by
`weft.programs.host.run_task`; used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol

from weft.abi.errors import Overloaded, ProgramFailed, WeftError
from weft.abi.frames import CommandFrame, WireError, commands
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.loop_share import GoesOn, LoopShare
from weft.programs.quota.rates import Wait

MAX_WAITING_BYTES = 64 << 20
"""Of commands of one program that wait for a rate. One that goes on asking without waiting for answers is ended."""


class CommandHost(Protocol):
    """Where commands are carried out: a session."""

    def carry_out(self, commands: Iterator[CommandFrame], goes_on: GoesOn) -> bool:
        """Carry out commands, at least one, for as long as `goes_on`; whether that were all. Never blocks. Raises
        `WeftError` or `WireError`: the run must end with it."""

    def take_events(self) -> bytes:
        """The events so far; never waits (`GuestHost.take_events`)."""

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """Wait for the first event (`GuestHost.wait_events`)."""

    def on_events(self, wake: Callable[[], None]) -> None:
        """Set the callback for new events (`GuestHost.on_events`)."""


class _Message(NamedTuple):
    """What a guest said at once, as far as it is not carried out."""

    size: int
    commands: Iterator[CommandFrame]


class CommandQueue:
    """Carries out a guest's commands in portions; a `weft.programs.guest.GuestHost`."""

    def __init__(
        self,
        host: CommandHost,
        budget: RunBudget,
        share: LoopShare,
        *,
        tenant: str,
        end: Callable[[WeftError], None],
        on_wait: Callable[[Wait], None] = lambda wait: None,
    ):
        """`end` ends the run where a command that had waited breaks it; `on_wait` is called when the program begins to
        wait for a rate."""
        self._host, self._budget, self._share, self._tenant = host, budget, share, tenant
        self._end, self._on_wait = end, on_wait
        self._waiting: deque[_Message] = deque()
        self._waiting_bytes = 0
        self._is_begun = False
        """Whether some of the first message that waits is carried out."""
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._waited_s = 0.0
        self._over: asyncio.Future[None] | None = None
        self._error: WeftError | None = None

    @property
    def is_rated(self) -> bool:
        """Whether `pause` can ever wait."""
        return self._budget.is_rated

    @property
    def waited_s(self) -> float:
        """How long commands were held back so far because a rate was used up."""
        now_s = self._since_s if self._timer is None else asyncio.get_running_loop().time()
        return self._waited_s + now_s - self._since_s

    def commands(self, data: bytes) -> None:
        """As `GuestHost.commands`, now or later. Raises `Overloaded` where too much waits for a rate: the run must end
        with it."""
        self._waiting_bytes += len(data)
        self._waiting.append(_Message(len(data), commands(data)))
        if len(self._waiting) > 1:
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self._shrink()
        elif self._share.is_used_up or self._begin():
            self._share.wait(self._tenant, self._portion)

    def behind(self) -> Awaitable[None] | None:
        """An awaitable that ends when no command waits any more; None where none does (`GuestHost.behind`)."""
        return self._until_nothing_waits() if self._waiting and self._timer is None else None

    def take_events(self) -> bytes:
        """The events so far; never waits (`GuestHost.take_events`)."""
        return self._host.take_events()

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """Wait for the first event (`GuestHost.wait_events`)."""
        return await self._host.wait_events(timeout_s)

    def on_events(self, wake: Callable[[], None]) -> None:
        """Set the callback for new events (`GuestHost.on_events`)."""
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
        if self._waiting:
            await self._until_nothing_waits()
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
        self._stop_timer()
        self._rest()

    # ---- inside

    def _begin(self) -> bool:
        """A turn now; whether more waits for another."""
        try:
            return self._share.run(self._carry_out)
        except BaseException:
            # The run ends with it.
            self.close()
            raise

    def _until_nothing_waits(self) -> Awaitable[None]:
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        # Several may wait for it, and each may be cancelled.
        return asyncio.shield(self._over)

    def _rest(self) -> None:
        """Nothing waits."""
        over, self._over = self._over, None
        if over is not None and not over.done():
            over.set_result(None)

    def _shrink(self) -> None:
        """Too much waits. A rate leaves no choice. A program that never lets its host take turns is trusted: the oldest
        of what it said is carried out at once."""
        if self._timer is not None:
            raise Overloaded(f"the program says more than {MAX_WAITING_BYTES} bytes while its tenant's rate is used up")
        while self._waiting_bytes > MAX_WAITING_BYTES and self._timer is None:
            self._carry_out(lambda: self._waiting_bytes > MAX_WAITING_BYTES)

    def _portion(self, goes_on: GoesOn) -> bool:
        """A turn in a later pass of the loop, as `LoopShare` wants it."""
        try:
            return self._carry_out(goes_on)
        except WeftError as error:
            self._broken(error)
        except WireError as error:
            self._broken(ProgramFailed(f"the program sent its host bytes that are not a command: {error}"))
        return False

    def _carry_out(self, goes_on: GoesOn) -> bool:
        """Carry out what waits, as far as the rate goes: others of the tenant use it too. Whether more waits for a
        turn."""
        while self._waiting and self._timer is None:
            message = self._waiting[0]
            if not self._is_begun:
                wait = self._budget.wait()
                if wait is not None:
                    self._wait(wait)
                    return False
            self._is_begun = True
            is_done = self._host.carry_out(message.commands, goes_on)
            if not self._waiting:
                return False  # one of them has ended the run
            if not is_done:
                return True
            self._is_begun = False
            self._waiting.popleft()
            self._waiting_bytes -= message.size
            if self._waiting and not goes_on():
                return True
        if not self._waiting:
            self._rest()
        return False

    def _wait(self, wait: Wait) -> None:
        """For a rate."""
        self._on_wait(wait)
        self._since_s = asyncio.get_running_loop().time()
        self._sleep(wait)

    def _sleep(self, wait: Wait) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait.seconds, self._wake)

    def _wake(self) -> None:
        wait = self._budget.wait()
        if wait is not None:
            self._sleep(wait)
            return
        self._stop_timer()
        self._share.wait(self._tenant, self._portion)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._waited_s, self._timer = self.waited_s, None
            self._since_s = 0.0

    def _broken(self, error: WeftError) -> None:
        self.kill(error)
        self._end(error)
