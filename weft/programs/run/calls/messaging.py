"""The Messaging trait: broadcasts and subscriptions within the tenant, and programs that the program launches.

Owns the run's subscriptions and children. `weft.programs.run.context` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from weft.abi.errors import InvalidRequest, LimitExceeded, Overloaded, UnknownHandle, WeftError
from weft.core.waits import WaitKind
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import limits_from_json
from weft.programs.run.calls.call_kinds import answer_by_task
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size
from weft.programs.run.messages import MessageQueue, TopicSubscription, check_json, reason
from weft.programs.run.services import ChildRun, ChildSpec

MAX_LAUNCH_BYTES = 4 << 20
"""Source, arguments and limits of a child, as JSON."""
MAX_CHILDREN = 4096
"""Children that a program may still ask about; those that ended and were joined, or killed, are forgotten first."""
MAX_KEPT_RESULT_BYTES = 16 << 20
"""Results of joined children that the program may join again; a child whose result does not fit is forgotten. As many
of children that ended and were not joined; one that does not fit is lost."""


class _LaunchArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    program: str | None = None
    source: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")
    limits: msgspec.Raw = msgspec.Raw(b"{}")


_launch_args = msgspec.json.Decoder(_LaunchArgs)


class MessagingCalls:
    """Calls of the trait Messaging for one run."""

    def __init__(self, view: RunView):
        self._view = view
        self._calls = view.calls
        self._children: dict[int, _Launched] = {}
        self._kept_bytes = 0
        """Bytes of the results of joined children."""
        self._unjoined_bytes = 0
        """Bytes of the results of those that have ended and were not joined."""
        self.num_launched = 0
        """Children launched so far."""

    def broadcast(self, call: int, topic: bytes, message: bytes) -> None:
        """To all who listen now."""
        self._view.check_message(message)
        check_json(message, "the message", "message")
        self._view.services.hub.broadcast(self._view.caller.tenant, topic, message)

    def subscribe(self, call: int, topic: bytes) -> None:
        """From now on, until it is cancelled or falls behind."""
        self._calls.check_free(call)
        self._calls.begin(call, _Listener(self._view, call, topic))

    def launch(self, call: int, number: int, about: bytes) -> None:
        """Launch a child within what is left of the run's limits. Raises `LimitExceeded`, `Overloaded`."""
        check_size(about, MAX_LAUNCH_BYTES, "launch")
        self._calls.check_free(call, len(about))
        if number in self._children:
            raise InvalidRequest(f"child {number} was launched already; give every child a number of its own", "child")
        self._forget_some()
        try:
            args = _launch_args.decode(about)
        except UNREADABLE as error:
            raise InvalidRequest(f"the launch cannot be used: {reason(error)}", "launch") from error
        # Arguments and limits are not decoded yet.
        check_json(about, "the launch", "launch")
        if (args.program is None) == (args.source is None):
            raise InvalidRequest("a launch names one of program and source", "program")
        if len(args.args) > self._view.budget.limits.message_bytes:
            raise LimitExceeded(
                f"the arguments have {len(args.args)} bytes; the limit is {self._view.budget.limits.message_bytes}",
                "message_bytes",
            )
        budget = self._view.budget.child(limits_from_json(bytes(args.limits), self._view.budget.remaining()))
        spec = ChildSpec(program=args.program, source=args.source, args=bytes(args.args))
        self.num_launched += 1
        launched = self._children[number] = _Launched(self._view, spec, budget, self._ended)
        answer_by_task(self._calls, call, launched.started(), held=len(about))

    def join(self, call: int, number: int) -> None:
        """Answer with the result of a child, or with its error."""
        answer_by_task(self._calls, call, self._joined(number, self._find(number)), wait=WaitKind.MESSAGE)

    def kill(self, call: int, number: int) -> None:
        """Cancel the run of a child."""
        self._find(number).kill()

    def close(self) -> None:
        """Children do not outlive their parent."""
        children, self._children = self._children, {}
        for launched in children.values():
            launched.kill()

    def _forget_some(self) -> None:
        if len(self._children) < MAX_CHILDREN:
            return
        for number in [number for number, launched in self._children.items() if launched.settled]:
            self._forget(number)
        if len(self._children) >= MAX_CHILDREN:
            raise Overloaded(f"{MAX_CHILDREN} children were launched and not joined; join or kill some of them")

    def _forget(self, number: int) -> None:
        launched = self._children.pop(number)
        self._kept_bytes -= launched.result_bytes
        self._unjoined_bytes -= launched.take_unjoined()

    def _ended(self, launched: _Launched) -> None:
        """A child has ended."""
        if self._unjoined_bytes + launched.unjoined_bytes > MAX_KEPT_RESULT_BYTES:
            launched.lose_result()
        self._unjoined_bytes += launched.unjoined_bytes

    def _find(self, number: int) -> _Launched:
        launched = self._children.get(number)
        if launched is None:
            raise UnknownHandle(f"this program launched no child {number}, or it was joined and is forgotten")
        return launched

    async def _joined(self, number: int, launched: _Launched) -> tuple[bytes, ...]:
        result = await launched.joined()
        self._unjoined_bytes -= launched.take_unjoined()
        if self._children.get(number) is launched:
            self._kept_bytes += len(result) - launched.result_bytes
            launched.result_bytes = len(result)
            if self._kept_bytes > MAX_KEPT_RESULT_BYTES:
                self._forget(number)
        return (result,)


class _Listener:
    """A subscription as a call."""

    def __init__(self, view: RunView, call: int, topic: bytes):
        self._calls, self._call = view.calls, call
        queue = MessageQueue(view.budget.limits.pending_messages, view.waiting)
        self._subscription: TopicSubscription = view.services.hub.subscribe(
            view.caller.tenant, topic, queue, self._on_message
        )

    def turn_into_events(self, most: int) -> int:
        """The program reads: what waits becomes its own, the oldest first."""
        subscription = self._subscription
        if not self._calls.is_pending(self._call, self):
            return 0
        count = min(most, len(subscription.queue))
        for _ in range(count):
            self._calls.part(self._call, subscription.topic, subscription.queue.pop())
        if len(subscription.queue):
            self._calls.add_source(self)
        elif subscription.error is not None:
            self._calls.error(self._call, subscription.error)
            count += 1
        return count

    def cancel(self) -> None:
        """The program wants no more; what it has not read is lost."""
        self.drop()
        self._calls.remove_source(self)
        self._calls.cancelled(self._call)

    def drop(self) -> None:
        """Listen no longer."""
        self._subscription.close()

    def _on_message(self) -> None:
        self._calls.add_source(self)


class _Launched:
    """A child, from before it has started."""

    def __init__(self, view: RunView, spec: ChildSpec, budget: RunBudget, ended: Callable[[_Launched], None]):
        """`ended` is called when its run has ended."""
        self.result_bytes = 0
        """Bytes of its result, once it was joined."""
        self.unjoined_bytes = 0
        """Bytes of its result from its end until it is joined."""
        self._ended = ended
        self._budget = budget
        self._killed = False
        self._joined = False
        self._child: ChildRun | None = None
        # A launch is not given up half-way: the launcher closes the budget. A kill waits for it.
        self._loop = view.calls.loop
        launching = self._loop.create_task(view.services.launcher.launch(spec, view.caller, budget))
        launching.add_done_callback(self._begun)
        self._launching: asyncio.Future[ChildRun] = launching
        self._waiting: asyncio.Task[None] | None = None
        """For its end."""

    async def started(self) -> tuple[bytes, ...]:
        """The id of its run."""
        child = await asyncio.shield(self._launching)
        return (msgspec.json.encode({"run": child.id}),)

    async def joined(self) -> bytes:
        """What its main returned."""
        child = await asyncio.shield(self._launching)
        try:
            result = await child.join()
        except WeftError:
            self._joined = True
            raise
        self._joined = True
        return result

    @property
    def settled(self) -> bool:
        """Whether its parent knows how it ended, or wanted it to."""
        failed = self._launching.done() and self._child is None
        return self._joined or self._killed or failed

    def take_unjoined(self) -> int:
        """The bytes of a result that was not joined before; 0 from then on."""
        num_bytes, self.unjoined_bytes = self.unjoined_bytes, 0
        return num_bytes

    def lose_result(self) -> None:
        """Drop the run with its result."""
        most = f"{MAX_KEPT_RESULT_BYTES >> 20} MiB"
        self.unjoined_bytes, self._child = 0, None
        self._launching = self._loop.create_future()
        self._launching.set_exception(
            LimitExceeded(
                f"the child's result was dropped: results of children that were not joined had more than {most}; "
                "join children as they end",
                "result_bytes",
            )
        )
        self._launching.exception()  # it need not be joined

    def kill(self) -> None:
        """Now, or as soon as it has started."""
        self._killed = True
        if self._child is not None:
            self._child.kill()

    def _begun(self, launching: asyncio.Task[ChildRun]) -> None:
        if launching.cancelled() or launching.exception() is not None:
            # The launcher does so too; one with a bug must not leave a child that counts for ever.
            self._budget.close()
            return
        self._child = launching.result()
        if self._killed:
            self._child.kill()
        self._waiting = self._loop.create_task(self._wait(self._child))

    async def _wait(self, child: ChildRun) -> None:
        with suppress(WeftError):
            await child.join()
        # One that was killed may be forgotten by now, and would count for ever.
        self.unjoined_bytes = 0 if self._joined or self._killed else child.result_bytes
        self._ended(self)
