"""`SequenceHandle`: a sequence on an engine as a trusted program holds it, from asyncio.

Owns which of the sequence's operations have not ended, and how each learns that the sequence is gone.
`weft.programs.runtime` opens it. Used from one event loop only.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import ClassVar, Self, overload

from weft.abi.errors import EngineDead, Overloaded, UnknownHandle, WeftError
from weft.core.grammar import Grammar
from weft.core.sampling import SamplingParams, StopParams
from weft.core.waits import WaitKind
from weft.core.wire import (
    Append,
    Cancel,
    Command,
    Expect,
    Fork,
    Generate,
    Hold,
    MaskTokens,
    OperationUsage,
    PromptOutputs,
    Release,
    SetPriority,
    Truncate,
)
from weft.programs.engine_link import EngineLink
from weft.programs.operations import EngineOperation, OnStart, Report, SilentAppend, TokenStream
from weft.programs.types import Caller

MAX_SILENT = 512
"""Operations without an answer before an append asks for one, so that what is remembered of them stays bounded."""
MAX_MASKS = 16384
"""The same, where no append comes."""


class SequenceHandle:
    """A sequence of one program: tokens, their KV on the engine, and operations that run in order.

    Every method but iteration returns at once. After `release`, `hold`, or an engine's death, operations raise.
    """

    _stream_type: ClassVar[type[TokenStream]] = TokenStream

    def __init__(self, link: EngineLink, seq: int, caller: Caller):
        self.caller = caller
        self._id = seq
        self._link = link
        self._open = True
        self._error: WeftError | None = None
        self._died_with_engine = False
        self._operations: dict[int, EngineOperation] = {}
        """Those that report, by their numbers."""
        self._silent: deque[SilentAppend] = deque()
        self._awaited: EngineOperation | None = None
        """The last operation that reports; those before it have ended when it has."""
        self._expected: WaitKind | None = None
        """What the engine was told that the program waits for, since the last operation."""
        self._is_explained = False
        """Whether the program said so itself."""
        link.add_handle(self)

    @classmethod
    def opened(cls, link: EngineLink, caller: Caller) -> SequenceHandle:
        """Open an empty sequence on the engine. The caller releases it; no answer is awaited."""
        seq = cls(link, link.number(), caller)
        link.post(caller.open_command(seq.id))
        return seq

    @property
    def id(self) -> int:
        """The number of the sequence on the engine."""
        return self._id

    @overload
    def append(self, tokens: bytes, outputs: None = None) -> None: ...

    @overload
    def append(self, tokens: bytes, outputs: PromptOutputs) -> Report: ...

    def append(self, tokens: bytes, outputs: PromptOutputs | None = None) -> Report | None:
        """Add known tokens (packed int32). With `outputs`, awaiting the result gives the operation's `Finished`.

        Without, a failure (`ContextTooLong`) surfaces at the operations that follow.
        """
        op = self._begin()
        operation = SilentAppend(op, self.id) if outputs is None else Report(op, self.id)
        if outputs is None and len(self._silent) >= MAX_SILENT:
            outputs = PromptOutputs()  # it is answered, and those before it are forgotten
        self._add(operation, Append(seq=self.id, op=op, tokens=tokens, outputs=outputs))
        return operation if isinstance(operation, Report) else None

    def generate(
        self,
        sampling: SamplingParams | None = None,
        stop: StopParams | None = None,
        grammar: Grammar | None = None,
        *,
        num_generated: int = 0,
        on_start: OnStart | None = None,
    ) -> TokenStream:
        """Sample tokens. Iterate over the result for lists of `Token`, as many as came together.

        The sequence's last `num_generated` tokens count as sampled by this generation, which goes on behind them.
        `on_start` is told when the engine begins, before the first token.
        """
        op = self._begin()
        stream = self._stream_type(op, self.id)
        stream.on_start = on_start
        command = Generate(
            seq=self.id,
            op=op,
            sampling=sampling or SamplingParams(),
            stop=stop or StopParams(),
            grammar=grammar,
            num_generated=num_generated,
            tells_start=on_start is not None,
            stream=op,
        )
        self._add(stream, command)
        return stream

    def fork(self, *, request_id: str = "") -> SequenceHandle:
        """A copy that shares all pages, as of the operations put on this sequence so far."""
        child = SequenceHandle(self._link, self._begin(), self.caller)
        self._link.post(Fork(seq=self.id, child=child.id, request_id=request_id))
        return child

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens past the first `num_tokens`. Ends running operations."""
        self._check()
        self._end_own()
        self._link.post(Truncate(seq=self.id, num_tokens=num_tokens))

    def cancel(self) -> None:
        """End running operations; the sequence keeps the tokens it has."""
        self._check()
        self._end_own()
        self._link.post(Cancel(seq=self.id))

    def mask(self, ranges: bytes) -> None:
        """Hide ranges of tokens (packed int32 pairs: first, past the last) from all that follows; none: nothing more.

        A range that is not there surfaces at the operations that follow.
        """
        op = self._begin()
        if len(self._silent) >= MAX_MASKS:
            raise Overloaded(f"{MAX_MASKS} masks followed each other on this sequence; append or generate between them")
        self._add(SilentAppend(op, self.id), MaskTokens(seq=self.id, op=op, ranges=ranges))

    def set_priority(self, priority: int) -> None:
        """Change how early it runs; lower is earlier."""
        self._check()
        self._link.post(SetPriority(seq=self.id, priority=priority))

    def expect(self, kind: WaitKind, expected_in_s: float | None) -> None:
        """The program says what it waits for when the operations on the sequence are done."""
        self._check()
        self._is_explained = True
        self._link.post(Expect(seq=self.id, kind=kind, expected_in_s=expected_in_s))

    def begin_wait(self, kind: WaitKind, expected_in_s: float | None) -> None:
        """Tell the engine what the program waits for, unless that is an operation of this sequence, or the program said
        it itself. Does nothing where the engine knows."""
        if not self._open or self._error is not None or self._is_explained:
            return
        if (kind is not self._expected or expected_in_s is not None) and (self._awaited is None or self._awaited.ended):
            self._expected = kind
            self._link.post(Expect(seq=self.id, kind=kind, expected_in_s=expected_in_s))

    def hold(self, ttl_s: float) -> Report:
        """Give it up, but have the engine keep its KV for a later sequence that starts with the same tokens. Awaiting
        the result gives the number of pages as the `count` of `Finished`, or raises why they cannot be held."""
        operation = Report(self._begin(), self.id)
        self._give_up(Hold(seq=self.id, ttl_s=ttl_s, op=operation.op))
        self._link.add_operation(operation)
        return operation

    def release(self, kind: str = "", expected_in_s: float | None = None) -> None:
        """Give it up. Running operations end. Does nothing the second time. `kind`, `expected_in_s`: see `Release`."""
        if self._open:
            # Also where it is lost as far as is known here: an engine that lives may hold it, and one that does not
            # know it takes no harm.
            command = Release(seq=self.id, kind=kind, expected_in_s=expected_in_s)
            self._give_up(None if self._died_with_engine else command)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # ---- for EngineLink

    def fail(self, operation: EngineOperation, error: WeftError, usage: OperationUsage) -> None:
        """An operation has failed, and with it what follows on the sequence where the operation was silent."""
        if isinstance(error, UnknownHandle):
            # The program still holds it, so the engine forgot it: it restarted while nothing ran here.
            error = EngineDead("the engine restarted or the lease ended, and this sequence is lost; start again")
            self.lose(error)
        operation.fail(error, usage)
        # An append that failed leaves a hole: what follows on the sequence has no meaning.
        if isinstance(operation, SilentAppend):
            self.lose(error)

    def lose(self, error: WeftError, *, engine_died: bool = False) -> None:
        """Fail everything that waits here, and everything that will be asked. `engine_died`: the engine that held it is
        gone, so that there is nothing to give back."""
        self._error = self._error or error
        self._died_with_engine = self._died_with_engine or engine_died
        for operation in self._take_all():
            operation.fail(error)
            operation.wake()

    def ended(self, operation: EngineOperation) -> None:
        """Forget an operation, and silent ones before it: operations of a sequence run in order."""
        self._operations.pop(operation.op, None)
        while self._silent and self._silent[0].op <= operation.op:
            self._link.remove_operation(self._silent.popleft().op)

    # ---- inside

    def _check(self) -> None:
        if not self._open:
            raise UnknownHandle(f"sequence {self.id} was given up; open or fork another one")
        if self._error is not None:
            raise self._error

    def _begin(self) -> int:
        self._check()
        return self._link.number()

    def _add(self, operation: EngineOperation, command: Command) -> None:
        self._expected, self._is_explained = None, False
        if isinstance(operation, SilentAppend):
            self._silent.append(operation)
        else:
            self._operations[operation.op] = self._awaited = operation
        self._link.add_operation(operation)
        self._link.post(command)

    def _end_own(self) -> None:
        """Note that the program itself ends what runs, so that `Cancelled` is an end and not an error."""
        for operation in (*self._operations.values(), *self._silent):
            operation.cancelled_by_program = True

    def _take_all(self) -> list[EngineOperation]:
        """Forget all operations, and return them."""
        operations = [*self._operations.values(), *self._silent]
        self._operations.clear()
        self._silent.clear()
        for operation in operations:
            self._link.remove_operation(operation.op)
        return operations

    def _give_up(self, command: Command | None) -> None:
        self._open = False
        for operation in self._take_all():
            operation.cancelled_by_program = True
            operation.cancel()
            operation.wake()
        self._link.remove_handle(self)
        if command is not None:
            self._link.post(command)
