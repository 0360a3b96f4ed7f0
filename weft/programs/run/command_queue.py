"""`CommandQueue`: executes a program's commands in order, in bounded portions, at the rates of its tenant.

Owns the waiting commands. It stands between a guest and the context of its run, and delays commands for two reasons:

- Programs have used up their share of this pass of the event loop (`LoopShare`). The rest of a message is executed in
  later passes, between the other work of the loop, and the guest sends no further message before (`behind`).
- The tenant has used up a rate (`weft.programs.quota.rates`). The usage of the tenant's other programs slows a program
  down but never fails it: a refusal would hit an arbitrary call, and few programs retry every call. The run's time goes
  on meanwhile, so `wall_s` bounds the wait.

No command is lost, and the order is kept. Operations in progress continue, and their events arrive. Created for every
run by `weft.programs.host.run_task`; used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol

from weft.abi.errors import LimitExceeded, Overloaded, ProgramFailed, WeftError
from weft.abi.frames import CommandFrame, WireError, commands
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.loop_share import GoesOn, LoopShare
from weft.programs.quota.rates import RateWait

MAX_WAITING_BYTES = 64 << 20
"""Most bytes of one program's commands that wait for a rate. More commands end the run."""

_MIN_COMMAND_BYTES = 9
"""Size, operation and call."""


class CommandHost(Protocol):
    """Executes commands: the context of a run."""

    def carry_out(self, commands: Iterator[CommandFrame], goes_on: GoesOn) -> bool:
        """Execute at least one command, and further ones while `goes_on` says so. Returns whether all were executed.
        Never blocks. Raises `WeftError` or `WireError`, which must end the run."""

    def take_events(self) -> bytes:
        """The events so far; never waits (`GuestHost.take_events`)."""

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """Wait for the first event (`GuestHost.wait_events`)."""

    def on_events(self, wake: Callable[[], None]) -> None:
        """Set the callback for new events (`GuestHost.on_events`)."""


class _Message(NamedTuple):
    """The commands of one message of the guest that were not executed yet."""

    size: int
    commands: Iterator[CommandFrame]


class CommandQueue:
    """Executes a guest's commands in portions; implements `weft.programs.guest.GuestHost`."""

    def __init__(
        self,
        host: CommandHost,
        budget: RunBudget,
        share: LoopShare,
        *,
        tenant: str,
        end: Callable[[WeftError], None],
        on_wait: Callable[[RateWait], None] = lambda wait: None,
    ):
        """`end(error)` ends the run when a delayed command fails it; `on_wait` is called when the program begins to
        wait for a rate."""
        self._host, self._budget, self._share, self._tenant = host, budget, share, tenant
        self._end, self._on_wait = end, on_wait
        self._waiting: deque[_Message] = deque()
        self._waiting_bytes = 0
        self._is_begun = False
        """Whether a part of the first waiting message has been executed."""
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
        """Seconds for which commands have waited because a rate was used up."""
        now_s = self._since_s if self._timer is None else asyncio.get_running_loop().time()
        return self._waited_s + now_s - self._since_s

    def commands(self, data: bytes) -> None:
        """Execute a message's commands now or later (`GuestHost.commands`). Raises `Overloaded`, which must end the
        run, if too many bytes wait for a rate. More commands than `exchange_commands` end it when their turn comes."""
        self._waiting_bytes += len(data)
        self._waiting.append(_Message(len(data), self._bounded(data)))
        if len(self._waiting) > 1:
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self._shrink()
        elif self._share.is_used_up or self._begin():
            self._share.wait(self._tenant, self._portion)

    def behind(self) -> Awaitable[None] | None:
        """An awaitable that ends when no command waits any more; None if none waits (`GuestHost.behind`)."""
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
        """Wait as a command of the guest would, for a guest that computes without sending commands."""
        loop = asyncio.get_running_loop()
        while (wait := self._budget.wait()) is not None:
            began_s, is_counted = loop.time(), self._timer is not None
            if not is_counted:
                self._on_wait(wait)
            await asyncio.sleep(wait.seconds)
            if not is_counted:
                self._waited_s += loop.time() - began_s

    async def settled(self) -> None:
        """Wait until all commands are executed, with the program's last ones. Raises the error of `kill`."""
        if self._waiting:
            await self._until_nothing_waits()
        if self._error is not None:
            raise self._error

    def kill(self, error: WeftError) -> None:
        """End the queue with this error; waiting commands are not executed."""
        self._error = self._error or error
        self.close()

    def close(self) -> None:
        """Close the queue at the end of the run; waiting commands are not executed. Idempotent."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._stop_timer()
        self._rest()

    # ---- inside

    def _bounded(self, data: bytes) -> Iterator[CommandFrame]:
        most = self._budget.limits.exchange_commands
        found = commands(data)
        # Most messages are too short to have so many.
        return found if len(data) <= most * _MIN_COMMAND_BYTES else _at_most(most, found)

    def _begin(self) -> bool:
        """Execute a portion now. Returns whether commands wait for a later one."""
        try:
            return self._share.run(self._carry_out)
        except BaseException:
            # The caller ends the run with the error.
            self.close()
            raise

    def _until_nothing_waits(self) -> Awaitable[None]:
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        # Several tasks may await it, and each may be cancelled.
        return asyncio.shield(self._over)

    def _rest(self) -> None:
        """Reset the state, when no command waits any more."""
        over, self._over = self._over, None
        if over is not None and not over.done():
            over.set_result(None)

    def _shrink(self) -> None:
        """Handle too many waiting bytes. If they wait for a rate, raise. Otherwise the program is a trusted one that
        does not yield to the event loop, and its oldest commands are executed at once."""
        if self._timer is not None:
            raise Overloaded(f"the program says more than {MAX_WAITING_BYTES} bytes while its tenant's rate is used up")
        while self._waiting_bytes > MAX_WAITING_BYTES and self._timer is None:
            self._carry_out(lambda: self._waiting_bytes > MAX_WAITING_BYTES)

    def _portion(self, goes_on: GoesOn) -> bool:
        """Execute a portion in a later pass of the loop, as a callback of `LoopShare`."""
        try:
            return self._carry_out(goes_on)
        except WeftError as error:
            self._broken(error)
        except WireError as error:
            self._broken(ProgramFailed(f"the program sent its host bytes that are not a command: {error}"))
        return False

    def _carry_out(self, goes_on: GoesOn) -> bool:
        """Execute waiting commands as far as the tenant's rate allows. Returns whether commands wait for a later
        portion."""
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
                return False  # a command has ended the run
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

    def _wait(self, wait: RateWait) -> None:
        """Begin to wait for a rate."""
        self._on_wait(wait)
        self._since_s = asyncio.get_running_loop().time()
        self._sleep(wait)

    def _sleep(self, wait: RateWait) -> None:
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


def _at_most(most: int, commands: Iterator[CommandFrame]) -> Iterator[CommandFrame]:
    for number, command in enumerate(commands):
        if number == most:
            message = f"the program sent more than {most} commands in one exchange, its limit exchange_commands"
            raise LimitExceeded(f"{message}: wait for some of them first", "exchange_commands")
        yield command
