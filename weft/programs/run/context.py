"""`RunContext`: the host side of one run. It executes the program's commands and answers them.

Owns the one table from operations to methods, by trait (`weft.programs.run.calls`), the count of the run's calls, and
the timer for `wall_s`. It releases every resource of the run at its end, with or without an error. It does not depend
on the kind of guest, nor on the launcher. `weft.programs.host.run_task` creates it. Used from one event loop.

An error of a call becomes an ERROR event of that call, for this program only: a handle that is unknown, freed, forged
or of another program, a refused request, a dead engine. An error raised by `commands` or `carry_out` ends the run:
bytes that are not commands, or a limit that is used up.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator

from weft.abi.errors import LimitExceeded, WeftError
from weft.abi.frames import CommandFrame, commands
from weft.abi.operations import Op, Trait
from weft.children.progress import made_progress
from weft.core.wire import spaces
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import REFUSED
from weft.programs.quota.loop_share import GoesOn
from weft.programs.run.calls.core import CoreCalls
from weft.programs.run.calls.grammar import GrammarCalls
from weft.programs.run.calls.messaging import MessagingCalls
from weft.programs.run.calls.pages import CommandForm, PageCalls
from weft.programs.run.calls.pending_calls import PendingCalls
from weft.programs.run.calls.sequence import SequenceCalls
from weft.programs.run.calls.store import StoreCalls
from weft.programs.run.calls.tokenize import TokenizeCalls
from weft.programs.run.calls.view import RunView
from weft.programs.run.messages import UnreadBytes
from weft.programs.run.runs import RunUsage
from weft.programs.run.services import Outlet, Services
from weft.programs.types import Caller

logger = logging.getLogger(__name__)

_TRAITS = (CoreCalls, MessagingCalls, TokenizeCalls, SequenceCalls, StoreCalls, PageCalls, GrammarCalls)
"""Each class executes the operations of one or several traits; a context holds one instance of each in this order."""
_CARRIED_OUT_BY: dict[Trait, type] = {
    Trait.CORE: CoreCalls,
    Trait.MESSAGING: MessagingCalls,
    Trait.TOKENIZE: TokenizeCalls,
    Trait.SEQUENCE: SequenceCalls,
    Trait.STORE: StoreCalls,
    Trait.ALLOCATE: PageCalls,
    Trait.FORWARD: PageCalls,
    Trait.INPUT_TEXT: PageCalls,
    Trait.OUTPUT_TEXT: PageCalls,
    Trait.GRAMMAR: GrammarCalls,
}


def _method(op: Op) -> Callable[..., None]:
    """The method of an operation. It takes the instance of its class, the call number, the numbers and the blobs."""
    method: Callable[..., None] = getattr(_CARRIED_OUT_BY[op.trait], op.method)
    if not op.command:
        return method
    return functools.partial(method, form=CommandForm(getattr(spaces, op.command)))


DISPATCH: dict[Op, tuple[int, Callable[..., None]]] = {
    op: (_TRAITS.index(_CARRIED_OUT_BY[op.trait]), _method(op)) for op in Op
}
"""Operation -> (index of its class in `_TRAITS`, method). Built once, because every run creates a context."""

_PAGE_OPS = frozenset(op for op in Op if _CARRIED_OUT_BY[op.trait] is PageCalls)


class RunContext:
    """The context of one run; implements `weft.programs.guest.GuestHost` and `CommandHost`."""

    def __init__(
        self, services: Services, *, caller: Caller, budget: RunBudget, outlet: Outlet, reserve_pages: int = 0
    ):
        """`budget` is the run's own. The caller closes it after the context."""
        self._budget = budget
        self._calls = PendingCalls(outlet.end, outlet.charge)
        view = RunView(
            calls=self._calls, services=services, caller=caller, budget=budget, outlet=outlet, waiting=UnreadBytes()
        )
        self._core = CoreCalls(view)
        self._messaging = MessagingCalls(view)
        self._sequences = SequenceCalls(view)
        self._pages = PageCalls(view, reserve_pages)
        self._grammars = GrammarCalls(view)
        self._traits = (
            self._core,
            self._messaging,
            TokenizeCalls(view),
            self._sequences,
            StoreCalls(view),
            self._pages,
            self._grammars,
        )
        self._host_calls = 0
        self._timer = self._calls.loop.call_later(budget.wall_left_s, self._out_of_time)

    # ---- GuestHost

    def commands(self, data: bytes) -> None:
        """Execute all commands of a message. Never blocks. Raises `WeftError` or `WireError`, which must end the
        run."""
        self.carry_out(commands(data), lambda: True)

    def carry_out(self, commands: Iterator[CommandFrame], goes_on: GoesOn) -> bool:
        """Execute at least one command, and further ones while `goes_on` says so. Returns whether all were executed.
        Never blocks. Raises like `commands`. The time, with that of decoding, is charged to the run as processor
        time."""
        # This method never waits, so elapsed time is processor time. Reading the thread's processor clock is a system
        # call, which costs as much as a command.
        made_progress()
        calls, traits = self._calls, self._traits
        if calls.broken is not None:
            raise calls.broken
        if calls.closed:
            return True
        is_all = False
        count, most = 0, self._budget.host_calls_left
        began_s = time.perf_counter()
        try:
            for op, call, numbers, blobs in commands:
                count += 1
                if count > most:
                    break
                try:
                    place, carry_out = DISPATCH[op]
                    carry_out(traits[place], call, *numbers, *blobs)
                except LimitExceeded as error:
                    if error.param not in REFUSED:
                        raise
                    calls.refuse(call, error)
                except WeftError as error:
                    calls.refuse(call, error)
                    if op in _PAGE_OPS:
                        self._pages.lost(error)
                except Exception as error:
                    calls.refuse(call, calls.as_reported(error))
                if calls.broken is not None:
                    raise calls.broken
                if not goes_on():
                    break
            else:
                is_all = True
            if calls.new_wait is not None:
                self._sequences.begin_wait(*calls.new_wait)
                self._pages.begin_wait(*calls.new_wait)
                calls.new_wait = None
            self._budget.spend("host_calls", count)
        except LimitExceeded as error:
            calls.broken = error
            raise
        finally:
            self._host_calls += count
            calls.charge(time.perf_counter() - began_s)
        return is_all

    def behind(self) -> None:
        """None: the context executes all commands at once."""

    def take_events(self) -> bytes:
        """The events so far; `b""` if there are none. Never waits."""
        return self._calls.take()

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """Wait for the first event, and return all events so far; `b""` after `timeout_s` seconds or `close`."""
        return await self._calls.wait(timeout_s)

    def on_events(self, wake: Callable[[], None]) -> None:
        """Set the callback for the first event after there were none; it is called in the event loop."""
        self._calls.on_events(wake)

    # ---- for its owner

    def deliver(self, message: bytes) -> None:
        """Take a JSON message from the launcher of the run, or from a client attached to it.

        Raises `LimitExceeded` for a message that is too long, `Overloaded` if too many wait unread.
        """
        if not self._calls.closed:
            self._core.deliver(message)

    def usage(self) -> RunUsage:
        """What the run has used through its host, without its children; also valid after its end. The fields that the
        context does not know are 0."""
        sequences, pages = self._sequences.usage, self._pages
        return RunUsage(
            host_calls=self._host_calls,
            prompt_tokens=sequences.prompt_tokens + pages.prompt_tokens,
            cached_tokens=sequences.cached_tokens,
            host_tokens=sequences.host_tokens,
            recomputed_tokens=sequences.recomputed_tokens,
            generated_tokens=sequences.generated_tokens + pages.generated_tokens,
            waited_s=self._calls.waited_s,
            http_requests=self._core.num_requests,
            children=self._messaging.num_launched,
        )

    def close(self) -> None:
        """Release all resources of the run and end its children. No event follows. Idempotent."""
        self._timer.cancel()
        for part in (self._calls, self._core, self._messaging, self._sequences, self._pages, self._grammars):
            try:
                part.close()
            except Exception:
                # The other objects must release their resources too.
                logger.exception("a resource of a run could not be released")

    def _out_of_time(self) -> None:
        message = f"the program ran longer than its limit wall_s of {self._budget.wall_limit_s:g} seconds"
        self._calls.break_run(LimitExceeded(message, "wall_s"))
