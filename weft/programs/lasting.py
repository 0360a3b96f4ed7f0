"""`LastingSequence`: a sequence that outlives its engine. Programs of users hold such sequences.

Owns what is needed to make the sequence anew: its tokens and masks, and what the program has put on it that has not
ended. When the engine has died, or has dropped this client because its lease ended, nothing happens at first. The next
operation opens the sequence again, on the engine that is there by then, with all its tokens; so sequences that wait
cost a restarted engine nothing. Operations that were under way are continued at once: a generation behind the tokens
that have come, with its random numbers, grammar, penalties and limits (`Generate.num_generated`).

An operation that was under way at two deaths fails with `EngineDead`, since it may be what ends engines, and the
sequence can be used on. Built-in programs do not use this: `weft.programs.recovery` carries them, and tries suspects
alone. That an operation of a program is continued only once leaves them the engine to themselves by then.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from weft.abi.errors import EngineDead, InvalidLogits, InvalidRequest, Overloaded, UnknownHandle, WeftError
from weft.core.waits import WaitKind
from weft.core.wire import (
    Append,
    Cancel,
    Command,
    Fork,
    Generate,
    MaskTokens,
    OperationUsage,
    SetPriority,
    Token,
    Truncate,
)
from weft.programs.engine_link import NOT_READY, EngineLink
from weft.programs.operations import EngineOperation, Report, SilentAppend, TokenStream
from weft.programs.sequence import SequenceHandle
from weft.programs.token_history import TokenHistory
from weft.programs.types import Caller

MAX_DEATHS = 1
"""Deaths of an engine that an operation outlives."""
MAX_WAITING_BYTES = 64 << 20
"""Of `WaitingBytes`; further operations are refused."""
ENTRY_BYTES = 512
"""Of an operation that waits, beside its tokens or ranges."""


class RecordedStream(TokenStream):
    """Remembers all tokens that have come."""

    __slots__ = ("record",)

    def __init__(self, op: int, handle: int):
        super().__init__(op, handle)
        self.record = array("i")

    def put(self, token: Token) -> bool:
        """Take a token. Whether it is the first since the program last looked."""
        self.record.append(token.token)
        self.tokens.append(token)
        return len(self.tokens) == 1


class WaitingBytes:
    """The count of what waits on the sequences of one run, behind operations that have not ended."""

    def __init__(self) -> None:
        self.num_bytes = 0


@dataclass(slots=True)
class _Entry:
    """Something that was put on a sequence and is not yet part of its history."""

    command: Command
    operation: EngineOperation | None = None
    child: LastingSequence | None = None
    """Of a fork."""
    num_deaths: int = 0

    @property
    def awaited(self) -> EngineOperation | None:
        """Its operation, where that reports to the program."""
        return None if isinstance(self.operation, SilentAppend) else self.operation

    @property
    def num_bytes(self) -> int:
        """What it counts for in `WaitingBytes`."""
        match self.command:
            case Append(tokens=data) | MaskTokens(ranges=data):
                return ENTRY_BYTES + len(data)
            case _:
                return ENTRY_BYTES

    @property
    def is_end(self) -> bool:
        """Whether it ends what runs on the sequence."""
        return isinstance(self.command, Cancel | Truncate)


class Revival:
    """Sequences whose operations wait for an engine. One task waits for all of them, `wait_s` seconds at most."""

    def __init__(self, link: EngineLink, wait_s: float):
        self._link = link
        self._wait_s = wait_s
        self._waiting: dict[LastingSequence, None] = {}
        self._task: asyncio.Task[None] | None = None

    def wake(self, sequence: LastingSequence) -> None:
        """The sequence has operations and is on no engine."""
        if self._link.engine.ready:
            sequence.revive()
        elif self._wait_s <= 0:
            # Later: nothing listens yet to an operation that is just being made.
            asyncio.get_running_loop().call_soon(sequence.give_up, EngineDead(NOT_READY))
        else:
            self._waiting[sequence] = None
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._wait(), name="weft-revival")

    def forget(self, sequence: LastingSequence) -> None:
        """The program has given the sequence up."""
        self._waiting.pop(sequence, None)
        if not self._waiting and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _wait(self) -> None:
        error: WeftError | None = None
        try:
            async with asyncio.timeout(self._wait_s):
                await self._link.engine.wait_ready()
        except TimeoutError:
            error = EngineDead(f"the engine was not back within {self._wait_s:g} s; try again later")
        except WeftError as refusal:
            error = refusal
        waiting, self._waiting = self._waiting, {}
        self._task = None
        for sequence in waiting:
            if error is None:
                self.wake(sequence)
            else:
                sequence.give_up(error)


class LastingSequence(SequenceHandle):
    """A sequence and its history. The caller opens it with `revive`, where there is an engine."""

    _stream_type: ClassVar[type[TokenStream]] = RecordedStream

    def __init__(self, link: EngineLink, seq: int, caller: Caller, revival: Revival, waiting: WaitingBytes):
        super().__init__(link, seq, caller)
        self._waiting = waiting
        self._revival = revival
        self._priority = caller.priority
        self._history = TokenHistory()
        self._entries: deque[_Entry] = deque()
        """In the order in which they were put on the sequence."""
        self._parent: LastingSequence | None = None
        """Has the fork that makes this one among its entries."""
        self._is_absent = True
        """It is on no engine."""
        self._is_orphan = False
        """Its parent was given up before the fork that was to make it: its tokens are not known here."""

    # ---- operations

    def check_room(self, num_bytes: int = 0) -> None:
        """Raise `Overloaded` if an operation with so many bytes of tokens or ranges may not wait any more."""
        if self._entries and self._waiting.num_bytes + ENTRY_BYTES + num_bytes > MAX_WAITING_BYTES:
            most = f"{MAX_WAITING_BYTES >> 20} MiB"
            raise Overloaded(f"operations on sequences of this program that wait hold {most}; wait for some of them")

    def fork(self, *, request_id: str = "") -> LastingSequence:
        """A copy that shares all pages, as of the operations put on this sequence so far."""
        child = LastingSequence(self._link, self._begin(), self.caller, self._revival, self._waiting)
        child._parent, child._is_absent, child._priority = self, self._is_absent, self._priority
        self._put(_Entry(Fork(seq=self.id, child=child.id, request_id=request_id), child=child))
        return child

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens past the first `num_tokens`. Ends running operations."""
        self._end(Truncate(seq=self.id, num_tokens=num_tokens))

    def cancel(self) -> None:
        """End running operations; the sequence keeps the tokens it has."""
        self._end(Cancel(seq=self.id))

    def hold(self, ttl_s: float) -> Report:
        """Give it up, but have the engine keep its KV. On no engine there is none to keep: then the result fails."""
        if not self._is_absent:
            return super().hold(ttl_s)
        operation = Report(self._begin(), self.id)
        self._give_up(None)

        def fail() -> None:
            operation.fail(EngineDead("the engine died, and the KV that was to be held with it"))
            operation.wake()

        asyncio.get_running_loop().call_soon(fail)
        return operation

    def set_priority(self, priority: int) -> None:
        """Change how early it runs; lower is earlier."""
        self._check()
        self._priority = priority
        self._send(SetPriority(seq=self.id, priority=priority))

    def expect(self, kind: WaitKind, expected_in_s: float | None) -> None:
        """Tell the engine what the program waits for, if the sequence is there."""
        if not self._is_absent:
            super().expect(kind, expected_in_s)

    # ---- for EngineLink

    def fail(self, operation: EngineOperation, error: WeftError, usage: OperationUsage) -> None:
        """An operation has failed; where the engine or what it knew is gone, it is continued."""
        if isinstance(error, EngineDead | UnknownHandle):
            self._lost(error)
        else:
            super().fail(operation, error, usage)

    def lose(self, error: WeftError, *, engine_died: bool = False) -> None:
        """The engine has died: the sequence is made anew when it is needed. Or it is of no use any more."""
        if engine_died:
            self._lost(error)
            return
        self._lose_here(error)
        _orphan(self._take_children())

    def ended(self, operation: EngineOperation) -> None:
        """Forget an operation that has ended, and make what it did part of the history."""
        if operation.ended:
            super().ended(operation)
            self._fold()

    # ---- for Revival

    def revive(self) -> None:
        """Make the sequence anew on the engine that is there, with everything that has not ended."""
        if self._parent is not None:  # the oldest that is there sends its forks anew
            oldest = self._parent
            while oldest._parent is not None:
                oldest = oldest._parent
            oldest.revive()
            return
        if not self._is_absent or not self._open:
            return
        self._is_absent = self._died_with_engine = False
        self._link.post(replace(self.caller, priority=self._priority).open_command(self.id))
        tokens, put = self._history.tokens(), 0
        for place, ranges in self._history.masks:
            self._resend(Append(seq=self.id, op=0, tokens=tokens[put:place].tobytes()))
            self._resend(MaskTokens(seq=self.id, op=0, ranges=ranges))
            put = place
        self._resend(Append(seq=self.id, op=0, tokens=tokens[put:].tobytes()))
        self._resend_entries()

    def give_up(self, error: WeftError) -> None:
        """There is no engine: fail the operations that wait for one."""
        self._fail_awaited(error)
        self._fold()

    # ---- inside

    def _add(self, operation: EngineOperation, command: Command) -> None:
        entry = _Entry(command, operation)
        if not self._is_absent:
            super()._add(operation, command)
            self._put_entry(entry)
            return
        self._awaited = entry.awaited or self._awaited
        self._put_entry(entry)
        if entry.awaited is not None or self._link.engine.ready:
            self._revival.wake(self)

    def _put(self, entry: _Entry) -> None:
        self._send(entry.command)
        self._put_entry(entry)

    def _put_entry(self, entry: _Entry) -> None:
        self._waiting.num_bytes += entry.num_bytes
        self._entries.append(entry)
        self._fold()

    def _take_entry(self) -> _Entry:
        entry = self._entries.popleft()
        self._waiting.num_bytes -= entry.num_bytes
        return entry

    def _send(self, command: Command) -> None:
        if not self._is_absent:
            self._link.post(command)

    def _end(self, command: Cancel | Truncate) -> None:
        self._check()
        for entry in reversed(self._entries):
            if entry.is_end:
                break  # it has ended those before it
            if entry.operation is not None:
                entry.operation.cancelled_by_program = True
        self._put(_Entry(command))
        if self._is_absent:
            self._end_given_up()

    def _fold(self) -> None:
        """Make the first entries part of the history, up to the first operation that has not ended, and likewise those
        of the forks that come to be by that."""
        folding = [self]
        while folding:
            child = folding[-1]._fold_to_fork()
            if child is not None:
                folding.append(child)
                continue
            last = folding.pop()
            if folding and last._is_absent and last._has_awaited:
                last._revival.wake(last)

    def _fold_to_fork(self) -> LastingSequence | None:
        """Make entries part of the history up to the next fork, which comes to be and is returned."""
        entries, history = self._entries, self._history
        while entries and self._parent is None:
            entry = entries[0]
            command, awaited = entry.command, entry.awaited
            if awaited is not None and not awaited.ended:
                return None
            self._take_entry()
            if entry.child is not None:
                entry.child._parent, entry.child._history = None, history.fork()
                return entry.child
            if isinstance(command, MaskTokens):
                history.mask(command.ranges)
            elif isinstance(command, Truncate):
                history.cut(min(command.num_tokens, len(history)))
            elif isinstance(awaited, RecordedStream):
                history.extend(awaited.record)
            elif isinstance(command, Append) and _is_part(awaited):
                history.extend(command.tokens)
            if awaited is not None and awaited.finished is None and awaited.error is None:
                self._skip_to_end()
        return None

    def _skip_to_end(self) -> None:
        """An operation was cancelled, and with it what was put on the sequence between it and that command."""
        children = []
        while self._entries and not self._entries[0].is_end:
            child = self._take_entry().child
            if child is not None:
                children.append(child)
        _orphan(children)

    def _lose_here(self, error: WeftError) -> None:
        """The sequence is of no use any more."""
        super().lose(error)
        self._fail_awaited(error)

    def _take_children(self) -> list[LastingSequence]:
        """Drop all entries, and return the forks that do not come to be."""
        entries = [self._take_entry() for _ in range(len(self._entries))]
        return [entry.child for entry in entries if entry.child is not None]

    @property
    def _has_awaited(self) -> bool:
        return any(entry.awaited is not None for entry in self._entries)

    def _fail_awaited(self, error: WeftError) -> None:
        for entry in list(self._entries):
            if entry.awaited is not None:
                entry.awaited.fail(error)
                entry.awaited.wake()

    def _lost(self, error: WeftError) -> None:
        """No engine has the sequence any more. Idempotent."""
        if self._is_absent:
            return
        self._is_absent = self._died_with_engine = True
        self._expected = None
        self._take_all()
        if self._is_orphan:
            _orphan([self])
            return
        self._end_given_up()
        for entry in list(self._entries):
            if entry.awaited is not None:
                entry.num_deaths += 1
                if entry.num_deaths > MAX_DEATHS:
                    entry.awaited.fail(error if isinstance(error, EngineDead) else EngineDead(error.message))
                    entry.awaited.wake()
        self._fold()
        if self._has_awaited:
            self._revival.wake(self)

    def _end_given_up(self) -> None:
        """No engine will say how what the program has cancelled has ended."""
        last = max((index for index, entry in enumerate(self._entries) if entry.is_end), default=-1)
        for entry in [entry for index, entry in enumerate(self._entries) if index < last]:
            if entry.awaited is not None:
                entry.awaited.cancel()
                entry.awaited.wake()
        self._fold()

    def _resend(self, command: Append | MaskTokens) -> None:
        """Known tokens or a mask of the history, where there are any."""
        if isinstance(command, MaskTokens) or command.tokens:
            op = self._link.number()
            operation = SilentAppend(op, self.id)
            super()._add(operation, msgspec.structs.replace(command, op=op))

    def _resend_entries(self) -> None:
        """Send what has not ended anew, and that of the forks that it makes."""
        resending = [(self, iter(self._entries))]
        while resending:
            sequence, entries = resending[-1]
            child = sequence._resend_to_fork(entries)
            if child is None:
                resending.pop()
            else:
                resending.append((child, iter(child._entries)))

    def _resend_to_fork(self, entries: Iterator[_Entry]) -> LastingSequence | None:
        for entry in entries:
            operation, command = entry.operation, entry.command
            if entry.child is not None:
                self._link.post(command)
                entry.child._is_absent = entry.child._died_with_engine = False
                return entry.child
            if operation is not None and isinstance(command, Append | Generate | MaskTokens):
                changes: dict[str, int] = {}
                if isinstance(operation, RecordedStream) and operation.record:
                    self._resend(Append(seq=self.id, op=0, tokens=operation.record.tobytes()))
                    changes["num_generated"] = len(operation.record)
                # A late answer to the number that it had is of no meaning now.
                operation.op = self._link.number()
                super()._add(operation, msgspec.structs.replace(command, op=operation.op, **changes))
        return None

    def _give_up(self, command: Command | None) -> None:
        self._revival.forget(self)
        for entry in self._entries:
            operation = entry.awaited
            if operation is not None:
                operation.cancelled_by_program = True
                operation.cancel()
                operation.wake()
        _orphan(self._take_children())
        super()._give_up(None if self._is_absent else command)


def _orphan(sequences: Iterable[LastingSequence]) -> None:
    """The forks that were to make them were given up: an engine says what that means, where there is one. Elsewhere
    they are lost, and so are the forks that they were to make."""
    lost = list(sequences)
    error = InvalidRequest(
        "what ran on the sequence to fork from was ended before it could be forked; fork again", "seq"
    )
    while lost:
        sequence = lost.pop()
        sequence._parent, sequence._is_orphan = None, True
        if sequence._is_absent:
            sequence._lose_here(error)
            lost += sequence._take_children()


def _is_part(awaited: EngineOperation | None) -> bool:
    """Whether the tokens of an append are part of the sequence: a report on them can fail after they were added."""
    return awaited is None or awaited.error is None or isinstance(awaited.error, InvalidLogits)
