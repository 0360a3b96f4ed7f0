"""`RunContext`: the host side of one run. It carries out the program's commands and answers them.

Owns the one table from operations to the methods that carry them out, by trait (`weft.programs.run.calls`), the count
of the run's calls, its timer for `wall_s`, and the promise that everything the run holds is given back when it ends,
however that happens. It does not know what kind of guest it serves, nor who launched the run. Made by
`weft.programs.host.run_task`; used from one event loop.

An error in a call is that call's ERROR event, to this program alone: a handle that is unknown, freed, forged or of
another program, a refused request, a dead engine. An error that `commands` and `carry_out` raise ends the run: bytes
that are no commands, and a limit that is used up.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

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
from weft.programs.run.services import Outlet, Services
from weft.programs.types import Caller

logger = logging.getLogger(__name__)

_TRAITS = (CoreCalls, MessagingCalls, TokenizeCalls, SequenceCalls, StoreCalls, PageCalls, GrammarCalls)
"""Each carries out the operations of one trait, or of several; the order is that of the traits in a session."""
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
    """What carries an operation out: called with its trait, the number of the call, its numbers and its blobs."""
    method: Callable[..., None] = getattr(_CARRIED_OUT_BY[op.trait], op.method)
    if not op.command:
        return method
    return functools.partial(method, form=CommandForm(getattr(spaces, op.command)))


DISPATCH: dict[Op, tuple[int, Callable[..., None]]] = {
    op: (_TRAITS.index(_CARRIED_OUT_BY[op.trait]), _method(op)) for op in Op
}
"""Operation -> (place of its trait in a session, method): built once, since a session is made for every run."""

_PAGE_OPS = frozenset(op for op in Op if _CARRIED_OUT_BY[op.trait] is PageCalls)


class ContextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asked of its host, without its children."""

    host_calls: int = 0
    prompt_tokens: int = 0
    """Appended to sequences."""
    cached_tokens: int = 0
    """Of those, tokens whose KV was found instead of computed."""
    generated_tokens: int = 0
    forward_tokens: int = 0
    """Put through forwards over the program's own pages."""
    waited_s: float = 0.0
    """Summed time of its waits for anything but the device: HTTP, messages, sleeps, children."""
    http_requests: int = 0
    children: int = 0
    """Launched."""


class RunContext:
    """The context of one run; implements `weft.programs.guest.GuestHost` and `CommandHost`."""

    def __init__(
        self, services: Services, *, caller: Caller, budget: RunBudget, outlet: Outlet, reserve_pages: int = 0
    ):
        """`budget` is the run's own; its owner closes it, after the context."""
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
        wall_s = budget.wall_left_s
        self._timer = self._calls.loop.call_later(wall_s, self._out_of_time, wall_s)

    # ---- GuestHost

    def commands(self, data: bytes) -> None:
        """Carry out all that the guest said; never blocks. Raises `WeftError` or `WireError`: the run must end with
        it."""
        self.carry_out(commands(data), lambda: True)

    def carry_out(self, commands: Iterator[CommandFrame], goes_on: GoesOn) -> bool:
        """Carry out commands, at least one, for as long as `goes_on`; whether those were all. Never blocks. Raises as
        `commands`. The time is charged to the run as processor time, that of decoding them included."""
        # Nothing here waits, so the time that it takes the loop is processor time; the thread's own clock is a system
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
            self._budget.spend("host_calls", count)
        except LimitExceeded as error:
            calls.broken = error
            raise
        finally:
            self._host_calls += count
            calls.charge(time.perf_counter() - began_s)
        return is_all

    def behind(self) -> None:
        """Nothing waits here: all commands are carried out at once."""

    def take_events(self) -> bytes:
        """The events so far, `b""` if there are none. Never waits."""
        return self._calls.take()

    async def wait_events(self, timeout_s: float | None) -> bytes:
        """The events so far, waiting for the first; `b""` where `timeout_s` seconds are over, or the session closed."""
        return await self._calls.wait(timeout_s)

    def on_events(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in the loop, whenever events become available after there were none."""
        self._calls.on_events(wake)

    # ---- for its owner

    def deliver(self, message: bytes) -> None:
        """A JSON message from the launcher of the run, or a client that is attached to it.

        Raises `LimitExceeded` for one that is too long, `Overloaded` where too many wait unread.
        """
        if not self._calls.closed:
            self._core.deliver(message)

    def usage(self) -> ContextUsage:
        """What the run asked so far; also after its end."""
        sequences = self._sequences.usage
        return ContextUsage(
            host_calls=self._host_calls,
            prompt_tokens=sequences.prompt_tokens,
            cached_tokens=sequences.cached_tokens,
            generated_tokens=sequences.generated_tokens,
            forward_tokens=self._pages.forward_tokens,
            waited_s=self._calls.waited_s,
            http_requests=self._core.num_requests,
            children=self._messaging.num_launched,
        )

    def close(self) -> None:
        """Give back everything the run holds, its children included. Nothing is said any more. Idempotent."""
        self._timer.cancel()
        for part in (self._calls, self._core, self._messaging, self._sequences, self._pages, self._grammars):
            try:
                part.close()
            except Exception:
                # The others hold things too.
                logger.exception("something that a run held could not be given back")

    def _out_of_time(self, wall_s: float) -> None:
        message = f"the program ran longer than its limit wall_s of {wall_s:g} seconds"
        self._calls.break_run(LimitExceeded(message, "wall_s"))
