"""What a trusted program holds: sequences on an engine, and operations on them, from asyncio.

Owns the numbers of sequences and operations, the queue of commands of the current event-loop turn (one `send` a turn),
and the way of each event to the task that waits for it (one dictionary lookup). It does not know text, HTTP, or how an
engine works. Used from one event loop only. Built-in programs and the offline API call it.

A sequence is a resource: `async with rt.open(caller) as seq` gives it back however the block ends. Nothing here needs
an `await` to release, so it also works while a task is being cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self, overload

from weft.abi.errors import EngineDead, InvalidRequest, UnknownHandle, WeftError, from_kind
from weft.core.grammar import Grammar
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import (
    Append,
    Cancel,
    Cancelled,
    Command,
    Envelope,
    Event,
    Failed,
    Finished,
    Fork,
    Generate,
    Hold,
    MaskTokens,
    Open,
    PromptOutputs,
    Release,
    SetPriority,
    Token,
    Truncate,
)
from weft.engine.client import EngineClient
from weft.programs.operations import Generation, Operation, Report, SilentAppend
from weft.programs.recovery import Recovery
from weft.programs.space import Space
from weft.programs.types import Caller
from weft.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]


class Runtime:
    """Opens sequences on one engine. The only subscriber of its `EngineClient`.

    `on_event` receives events that belong to no operation (trace spans).
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        on_event: OnEvent | None = None,
        engine_wait_s: float = 0.0,
    ):
        """`engine_wait_s`: how long built-in programs wait for the restart of a dead engine; 0: they fail with it."""
        self.engine = engine
        self.recovery = Recovery(engine, engine_wait_s)
        self.tokenizer = tokenizer
        self._on_event = on_event
        # Sequences and operations share one counter: a number in a log is unambiguous.
        self._numbers = itertools.count(1)
        self._operations: dict[int, Operation] = {}
        self._sequences: dict[int, Sequence] = {}
        self._spaces: dict[int, Space] = {}
        self._queue: list[Command] = []
        engine.subscribe(self._on_envelope)

    @property
    def num_sequences(self) -> int:
        """Sequences that programs hold now."""
        return len(self._sequences)

    @property
    def num_operations(self) -> int:
        """Operations that have not ended."""
        return len(self._operations)

    def open(self, caller: Caller) -> Sequence:
        """A new, empty sequence. Raises `EngineDead` where the engine is known to be down."""
        if not self.engine.ready:
            raise EngineDead("the engine is starting or restarting; try again in a moment")
        seq = Sequence(self, self.number(), caller)
        self._sequences[seq.id] = seq
        self.post(
            Open(
                seq=seq.id,
                tenant=caller.tenant,
                namespace=caller.namespace,
                priority=caller.priority,
                request_id=caller.request_id,
            )
        )
        return seq

    def open_space(self, caller: Caller, reserve_pages: int = 0) -> Space:
        """A new, empty space of explicit pages, `reserve_pages` of which are its own at once. Raises `EngineDead` where
        the engine is known to be down."""
        if not self.engine.ready:
            raise EngineDead("the engine is starting or restarting; try again in a moment")
        space = Space(self, self.number(), caller, reserve_pages)
        self._spaces[space.id] = space
        return space

    # ---- for Sequence and Space

    def number(self) -> int:
        """A number for a sequence or an operation; never the same again."""
        return next(self._numbers)

    def post(self, command: Command) -> None:
        """Queue a command. All commands of one turn of the event loop leave as one message."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self.flush)
        self._queue.append(command)

    def flush(self) -> None:
        """Send what is queued now, instead of at the end of this turn."""
        if not self._queue:
            return
        commands, self._queue = self._queue, []
        try:
            self.engine.send(commands)
        except EngineDead as error:
            self._lose_all(error)
        except Exception:
            # One of them cannot be encoded: it fails alone, since the others may be of other programs.
            for command in commands:
                self._send_alone(command)

    def _send_alone(self, command: Command) -> None:
        try:
            self.engine.send([command])
        except EngineDead as error:
            self._lose_all(error)
        except Exception as error:
            logger.exception("a command cannot be sent: %s", type(command).__name__)
            op = getattr(command, "op", 0)
            refused = InvalidRequest(f"the engine cannot be told this: {error}")
            self._on_envelope(Envelope(0, [Failed(op=op, kind=refused.kind, message=refused.message)]))

    def add_sequence(self, seq: Sequence) -> None:
        """Register a sequence that a fork made."""
        self._sequences[seq.id] = seq

    def remove_sequence(self, seq: Sequence) -> None:
        """Forget a sequence that was given up. Its later events go nowhere."""
        self._sequences.pop(seq.id, None)

    def remove_space(self, space: Space) -> None:
        """Forget a space that was given up."""
        self._spaces.pop(space.id, None)

    def add_operation(self, operation: Operation) -> None:
        """Route events of this number to the operation."""
        self._operations[operation.op] = operation

    def remove_operation(self, op: int) -> None:
        """Stop routing events to an operation."""
        self._operations.pop(op, None)

    # ---- events

    def _on_envelope(self, envelope: Envelope) -> None:
        """Hand each event to its operation; wake each waiting task once, after the last of them."""
        operations = self._operations
        touched: list[Operation] = []
        for event in envelope.events:
            # By far the most frequent, hence first and with nothing in its way.
            if type(event) is Token:
                operation = operations.get(event.op)
                if operation is not None and operation.put(event):
                    touched.append(operation)
            elif isinstance(event, Finished | Failed | Cancelled):
                operation = operations.pop(event.op, None)
                if operation is not None:
                    self._end(operation, event)
                    touched.append(operation)
                elif isinstance(event, Failed) and event.op > 0:
                    # Late news of an operation that was given up: its program no longer cares.
                    logger.debug("operation %d failed after its end: %s: %s", event.op, event.kind, event.message)
            elif self._on_event is not None:
                self._on_event(event)
        for operation in touched:
            operation.wake()

    def _end(self, operation: Operation, event: Finished | Failed | Cancelled) -> None:
        # Sequences and spaces are numbered by one counter.
        space = self._spaces.get(operation.seq_id)
        if space is not None:
            self._end_in_space(space, operation, event)
            return
        seq = self._sequences.get(operation.seq_id)
        if isinstance(event, Failed):
            error = from_kind(event.kind, event.message, param=event.param, retry_after_s=event.retry_after_s)
            if isinstance(error, UnknownHandle) and seq is not None:
                # The program still holds it, so the engine forgot it: it restarted while nothing ran here.
                error = EngineDead("the engine restarted or the lease ended, and this sequence is lost; start again")
                seq.lose(error)
            operation.fail(error, event.usage)
            # An append that failed leaves a hole: what follows on the sequence has no meaning.
            if isinstance(operation, SilentAppend) and seq is not None:
                seq.lose(error)
            # Sequences without an operation under way are gone too, and no event says so.
            if event.kind == EngineDead.kind:
                self._lose_all(error)
        elif isinstance(event, Finished):
            operation.finish(event)
        else:
            operation.cancel(event.usage)
        if seq is not None:
            seq.ended(operation)

    def _end_in_space(self, space: Space, operation: Operation, event: Finished | Failed | Cancelled) -> None:
        if isinstance(event, Failed):
            operation.fail(from_kind(event.kind, event.message, param=event.param, retry_after_s=event.retry_after_s))
            if event.kind == EngineDead.kind:
                self._lose_all(EngineDead(event.message))
        elif isinstance(event, Finished):
            operation.finish(event)
        else:
            operation.cancel(event.usage)
        space.ended(operation)

    def _lose_all(self, error: WeftError) -> None:
        """The engine has died, and all sequences and spaces with it."""
        for space in list(self._spaces.values()):
            space.lose(error, engine_died=True)
        for seq in list(self._sequences.values()):
            seq.lose(error, engine_died=True)


class Sequence:
    """A sequence of one program: tokens, their KV on the engine, and operations that run in order.

    Every method but iteration returns at once. After `release`, `hold`, or an engine's death, operations raise.
    """

    def __init__(self, runtime: Runtime, seq: int, caller: Caller):
        self.id = seq
        self.caller = caller
        self._runtime = runtime
        self._open = True
        self._error: WeftError | None = None
        self._died_with_engine = False
        self._operations: dict[int, Operation] = {}

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
        self._add(operation, Append(seq=self.id, op=op, tokens=tokens, outputs=outputs))
        return operation if isinstance(operation, Report) else None

    def generate(
        self,
        sampling: SamplingParams | None = None,
        stop: StopParams | None = None,
        grammar: Grammar | None = None,
        *,
        num_generated: int = 0,
    ) -> Generation:
        """Sample tokens. Iterate over the result for lists of `Token`, as many as came together.

        The sequence's last `num_generated` tokens count as sampled by this generation, which goes on behind them.
        """
        op = self._begin()
        generation = Generation(op, self.id)
        command = Generate(
            seq=self.id,
            op=op,
            sampling=sampling or SamplingParams(),
            stop=stop or StopParams(),
            grammar=grammar,
            num_generated=num_generated,
        )
        self._add(generation, command)
        return generation

    def next_tokens(self, k: int = 256) -> Report:
        """The `k` most probable tokens to follow: the `dist` of the awaited `Finished`. One round trip to the engine.

        To append tokens and ask in one trip, `append` with `PromptOutputs(dist=k)`.
        """
        return self.append(b"", PromptOutputs(dist=k))

    def fork(self, *, request_id: str = "") -> Sequence:
        """A copy that shares all pages, as of the operations put on this sequence so far."""
        child = Sequence(self._runtime, self._begin(), self.caller)
        self._runtime.add_sequence(child)
        self._runtime.post(Fork(seq=self.id, child=child.id, request_id=request_id))
        return child

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens past the first `num_tokens`. Ends running operations."""
        self._check()
        self._end_own()
        self._runtime.post(Truncate(seq=self.id, num_tokens=num_tokens))

    def cancel(self) -> None:
        """End running operations; the sequence keeps the tokens it has."""
        self._check()
        self._end_own()
        self._runtime.post(Cancel(seq=self.id))

    def mask(self, ranges: bytes) -> None:
        """Hide ranges of tokens (packed int32 pairs: first, past the last) from all that follows; none: nothing more.

        A range that is not there surfaces at the operations that follow.
        """
        op = self._begin()
        self._add(SilentAppend(op, self.id), MaskTokens(seq=self.id, op=op, ranges=ranges))

    def set_priority(self, priority: int) -> None:
        """Change how early it runs; lower is earlier."""
        self._check()
        self._runtime.post(SetPriority(seq=self.id, priority=priority))

    def hold(self, ttl_s: float) -> None:
        """Give it up, but have the engine keep its KV for a later sequence that starts with the same tokens."""
        self._check()
        self._give_up(Hold(seq=self.id, ttl_s=ttl_s))

    def release(self) -> None:
        """Give it up. Running operations end. Does nothing the second time."""
        if self._open:
            # Also where it is lost as far as is known here: an engine that lives may hold it, and one that does not
            # know it takes no harm.
            self._give_up(None if self._died_with_engine else Release(seq=self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # ---- for Runtime

    def lose(self, error: WeftError, *, engine_died: bool = False) -> None:
        """Fail everything that waits here, and everything that will be asked. `engine_died`: the engine that held it is
        gone, so that there is nothing to give back."""
        self._error = self._error or error
        self._died_with_engine = self._died_with_engine or engine_died
        for operation in list(self._operations.values()):
            self._runtime.remove_operation(operation.op)
            operation.fail(error)
            operation.wake()
        self._operations.clear()

    def ended(self, operation: Operation) -> None:
        """Forget an operation, and silent ones before it: operations of a sequence run in order."""
        self._operations.pop(operation.op, None)
        for op in [
            op for op, other in self._operations.items() if op < operation.op and isinstance(other, SilentAppend)
        ]:
            del self._operations[op]
            self._runtime.remove_operation(op)

    # ---- inside

    def _check(self) -> None:
        if not self._open:
            raise UnknownHandle(f"sequence {self.id} was given up; open or fork another one")
        if self._error is not None:
            raise self._error

    def _begin(self) -> int:
        self._check()
        return self._runtime.number()

    def _add(self, operation: Operation, command: Command) -> None:
        self._operations[operation.op] = operation
        self._runtime.add_operation(operation)
        self._runtime.post(command)

    def _end_own(self) -> None:
        """Note that the program itself ends what runs, so that `Cancelled` is an end and not an error."""
        for operation in self._operations.values():
            operation.cancelled_by_program = True

    def _give_up(self, command: Command | None) -> None:
        self._open = False
        for operation in self._operations.values():
            self._runtime.remove_operation(operation.op)
            operation.cancelled_by_program = True
            operation.cancel()
            operation.wake()
        self._operations.clear()
        self._runtime.remove_sequence(self)
        if command is not None:
            self._runtime.post(command)
