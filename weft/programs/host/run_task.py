"""One run while this process executes it: its context, its guest, and the connection of both to the host.

Owns the end of the run: the context releases its resources, the budget is closed, and the run ends exactly once, also
if the program or its host fails. `weft.programs.host.program_host` decides when a run starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec

from weft.abi.errors import InvalidRequest, LimitExceeded, Overloaded, ProgramFailed, RunCancelled, WeftError
from weft.abi.frames import WireError
from weft.programs.guest import Guest, GuestUsage
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.rates import RateWait
from weft.programs.run.command_queue import CommandQueue
from weft.programs.run.context import RunContext
from weft.programs.run.messages import MessageQueue, UnreadBytes, check_json, one_line
from weft.programs.run.runs import Run, RunUsage, log_line
from weft.programs.run.services import Launcher, Services
from weft.programs.types import Caller

MAX_RESULT_BYTES = 16 << 20
MAX_EARLY_MESSAGES = 100
"""Most messages of a run that has not started."""
CHARGED_AT_ONCE_S = 0.001
"""Processor time of this process from which it is charged to a run immediately; smaller amounts are summed up first."""
_WARNING = 2

logger = logging.getLogger("weft.programs")


class RunTask:
    """Implements the `Control` of a run, the `Outlet` of its context, and the `ChildRun` of its parent, if any."""

    def __init__(
        self,
        run: Run,
        caller: Caller,
        *,
        hold: Callable[[str, int], None],
        on_withdrawn: Callable[[RunTask], None],
        charge_late: Callable[[str, float], None] = lambda tenant, cpu_s: None,
    ):
        """`hold` counts more input bytes of a tenant, or raises `Overloaded`. `on_withdrawn` is called if the run ends
        before it has started, `charge_late` with processor time that is told of after its end."""
        self.run = run
        self.caller = caller
        self.input_bytes = len(run.spec.code.content) + len(run.spec.args)
        """Bytes of source and arguments, and of the messages that came before the start."""
        self.task: asyncio.Task[None] | None = None
        self._hold = hold
        self._on_withdrawn = on_withdrawn
        self._charge_late = charge_late
        self._early = MessageQueue(min(run.spec.limits.pending_messages, MAX_EARLY_MESSAGES), UnreadBytes())
        self._context: RunContext | None = None
        self._queue: CommandQueue | None = None
        self._guest: Guest | None = None
        self._budget: RunBudget | None = None
        self._charged_s = 0.0
        self._host_s = self._uncharged_s = 0.0
        """Processor time that this process spent for the run."""
        run.control = self

    @property
    def id(self) -> str:
        """The id of the run that the task carries out."""
        return self.run.id

    # ---- Control

    def deliver(self, message: bytes) -> None:
        """Pass a message on to the program. Raises `Overloaded` or `LimitExceeded`."""
        if self._context is not None:
            self._context.deliver(message)
            return
        limits = self.run.spec.limits
        if len(message) > limits.message_bytes:
            raise LimitExceeded(f"A message of {len(message)} bytes exceeds {limits.message_bytes}.", "message_bytes")
        if not self._early.has_room(message):
            raise Overloaded("The run has not started and takes no more messages; send them when it runs.")
        self._hold(self.caller.tenant, len(message))
        self.input_bytes += len(message)
        self._early.put(message)

    def cancel(self, error: WeftError) -> None:
        """End the run; it may take a few turns of the loop."""
        if self._guest is not None:
            self.end(error)
        elif not self.run.ended:
            self.run.fail(error)
            self._on_withdrawn(self)

    def usage(self) -> RunUsage:
        """What the run has used so far, its children's processor time and pages included."""
        guest = self._guest.usage() if self._guest is not None else GuestUsage()
        if self._context is None or self._budget is None:
            return RunUsage()
        spent = self._budget.used
        return msgspec.structs.replace(
            self._context.usage(),
            cpu_s=max(guest.cpu_s + self._host_s, spent.cpu_s),
            memory_bytes=guest.memory_bytes,
            throttled_s=self._queue.waited_s if self._queue is not None else 0.0,
            pages_peak=spent.pages_peak,
        )

    async def confirm(self) -> None:
        """Return at once: all earlier calls have taken effect in this process."""

    # ---- Outlet

    def message(self, data: bytes) -> None:
        """Pass a message of the program on. Raises `Overloaded` if it sends more than can be passed on."""
        if not self.run.has_room():
            raise Overloaded("messages are sent faster than they are passed on; send fewer, or wait a moment")
        if not self.run.ended:
            self.run.emit(data)

    def log(self, level: int, text: str) -> None:
        """Write a line into the run's log."""
        if not self.run.ended:
            self.run.log(log_line(level, text))

    def end(self, error: WeftError) -> None:
        """End the run with this error: it exceeded a limit outside of a call."""
        if self._queue is not None:
            self._queue.kill(error)
        if self._guest is not None:
            self._guest.kill(error)

    def charge(self, cpu_s: float) -> None:
        """Charge processor time of this process to the run."""
        if self.run.ended:  # a thread has gone on with what began before
            self._charge_late(self.caller.tenant, cpu_s)
            return
        self._host_s += cpu_s
        self._uncharged_s += cpu_s
        if self._uncharged_s >= CHARGED_AT_ONCE_S:
            self.settle_cpu()

    # ---- Child

    @property
    def result_bytes(self) -> int:
        """See `ChildRun`."""
        return len(self.run.result or b"")

    async def join(self) -> bytes:
        """Wait for the end and return the JSON of the value that `main` returned. Raises the run's error."""
        return await self.run.answer()

    def kill(self) -> None:
        """Cancel the run, as its parent asks. Idempotent."""
        self.run.cancel("the program that launched it ended it, or has ended itself")

    # ---- for the host

    def begin(self, services: Services, launcher: Launcher, guests: GuestFactory, budget: RunBudget) -> None:
        """Start the run. Takes the budget over, also if the start fails; the run then ends with the error."""
        self._budget = budget
        try:
            self._context = RunContext(
                replace(services, launcher=launcher),
                caller=self.caller,
                budget=budget,
                outlet=self,
                reserve_pages=self.run.spec.reserve_pages,
            )
            self._queue = CommandQueue(
                self._context,
                budget,
                services.loop_share,
                tenant=self.caller.tenant,
                end=self.end,
                on_wait=self._slowed_down,
            )
            self._guest = guests.make(
                self._queue, self.run.spec, budget.limits, self.caller.tenant, budget.spend_tenant_cpu
            )
            while self._early:
                self._context.deliver(self._early.pop())
        except WeftError as error:
            self._close(error)
            return
        except Exception:
            logger.exception("run %s could not be started", self.id)
            self._close(_our_fault())
            return
        self.run.start()
        self.task = asyncio.create_task(self._carry_out(self._guest), name=self.id)

    def settle_cpu(self) -> None:
        """Charge the processor time since the last call to the run's budget and those above; end a run with none left.

        Trusted programs are not limited: their time cannot be separated from that of other programs.
        """
        if self._guest is None or self._budget is None or self.run.ended:
            return
        self._uncharged_s = 0.0
        total_s = self._guest.usage().cpu_s + self._host_s
        spent_s, self._charged_s = total_s - self._charged_s, total_s
        try:
            self._budget.spend("cpu_s", spent_s)
        except LimitExceeded as error:
            if not self.run.spec.trusted:
                self.end(error)

    # ---- inside

    def _slowed_down(self, wait: RateWait) -> None:
        """Write the first wait for a rate into the run's log."""
        if self._queue is not None and not self._queue.waited_s:
            self.log(_WARNING, f"waiting: {wait}")

    async def _carry_out(self, guest: Guest) -> None:
        outcome: bytes | WeftError = _our_fault()
        try:
            outcome = await self._result(guest)
        except WeftError as error:
            outcome = error
        except WireError as error:
            outcome = ProgramFailed(f"the program sent its host bytes that are not a command: {error}")
        except asyncio.CancelledError:
            outcome = RunCancelled("the program host was stopped")
            guest.kill(outcome)
        except Exception:
            logger.exception("run %s failed in its host", self.id)
        finally:
            # Every run ends here, once, with a result or any exception.
            self._close(outcome)

    async def _result(self, guest: Guest) -> bytes:
        """JSON of the program's result. Raises the errors of `Guest.run`, and `ProgramFailed` for an invalid result."""
        returned = await self._ran(guest)
        if len(returned) > MAX_RESULT_BYTES:
            raise ProgramFailed(f"main returned {len(returned)} bytes of JSON; {MAX_RESULT_BYTES} is the most")
        try:
            # Responses embed the result unchanged: text beyond one value would become fields of the response.
            check_json(returned, "what main returned")
        except InvalidRequest as error:
            raise ProgramFailed(error.message) from None
        return one_line(returned)

    async def _ran(self, guest: Guest) -> bytes:
        """Like `Guest.run`, but return only when all commands of the program are executed."""
        try:
            outcome = await guest.run()
        except ProgramFailed:
            await self._settled()
            raise
        await self._settled()
        return outcome

    async def _settled(self) -> None:
        if self._queue is not None:
            await self._queue.settled()

    def _close(self, outcome: bytes | WeftError) -> None:
        self.settle_cpu()
        usage = self.usage()
        if self._queue is not None:
            self._queue.close()
        if self._context is not None:
            try:
                self._context.close()
            except Exception:
                logger.exception("the session of run %s could not be closed", self.id)
        if self._budget is not None:
            self._budget.close()
        self.run.control = _Over(usage)
        # Break the reference cycle, so that the run's arguments and other content are freed at once.
        self._context = self._guest = self._queue = None
        if isinstance(outcome, WeftError):
            self.run.fail(outcome)
        else:
            with contextlib.suppress(RuntimeError):
                self.run.finish(outcome)


class _Over:
    """The `Control` of a run that is ending."""

    def __init__(self, usage: RunUsage):
        self._usage = usage

    def deliver(self, message: bytes) -> None:
        raise Overloaded("the run is ending")

    def cancel(self, error: WeftError) -> None:
        pass

    def usage(self) -> RunUsage:
        return self._usage

    async def confirm(self) -> None:
        pass


def _our_fault() -> WeftError:
    return WeftError("The program host failed while it ran this program; its log has the cause.")
