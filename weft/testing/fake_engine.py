"""An engine without a model: real sequences and operations, tokens from a script or a hash. For tests only.

Implements the observable contract of `EngineClient` (order of operations, ends, one envelope per step) without pages,
batches or time. By default it steps by itself on the event loop; with `auto=False` a test calls `step()`. A test can
make it fail, die and restart.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from weft.abi.errors import ContextTooLong, EngineDead, UnknownHandle
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.wire import (
    Append,
    Cancel,
    Cancelled,
    Command,
    EndRetain,
    EngineInfo,
    EngineStats,
    Envelope,
    ErrorRecord,
    Event,
    Expect,
    Failed,
    Finished,
    Fork,
    Generate,
    Hold,
    Open,
    OperationUsage,
    Release,
    ResidencyCommand,
    SessionInfo,
    Sessions,
    SetPriority,
    Started,
    Truncate,
    answered_op,
)
from weft.engine.client import OnEnvelope
from weft.testing.fake_sequence import FakeModel, FakeSequence

DEFAULT_EOS = 256
DEFAULT_INFO = EngineInfo(
    model="fake",
    vocab_size=264,
    hidden_size=8,
    page_size=16,
    num_device_pages=4096,
    num_host_pages=0,
    max_context=4096,
    max_running=256,
    max_step_tokens=8192,
    eos_token_ids=[DEFAULT_EOS],
    device="fake",
    dtype="float32",
    bytes_per_page=1024,
)
"""Fits `weft.testing.byte_tokenizer`: tokens 0 to 255 are bytes, 256 ends a text."""


class FakeEngine:
    """An `EngineClient` in memory.

    `alphabet` are the tokens drawn when there is no script: a hash of the sequence's tokens, and of the seed unless
    sampling is greedy, picks one. `token_bytes` says what stop strings see; by default tokens 0 to 255 are bytes.
    """

    def __init__(
        self,
        info: EngineInfo = DEFAULT_INFO,
        *,
        alphabet: Sequence[int] = range(97, 123),
        token_bytes: Sequence[bytes] | None = None,
        auto: bool = True,
    ):
        self.sent: list[Command] = []
        """Every command received, in order."""
        self.messages: list[list[Command]] = []
        """The same, as they came in one `send`."""
        self.sequences: dict[int, FakeSequence] = {}
        """Open sequences by number. Empty when everything was released."""
        self.held: list[tuple[list[int], float]] = []
        """Tokens and time to live of sequences given up with `Hold`."""
        self.steps = 0
        self.appended_tokens = 0
        """Tokens that arrived by `Append`: what a model would have to compute, once per prompt."""
        self.closed = False
        self._info = info
        self._model = FakeModel(info, alphabet, token_bytes)
        self._auto = auto
        self._on_envelope: OnEnvelope = _drop
        self._used: set[int] = set()
        self._open: set[int] = set()
        """Operations whose end has not been published."""
        self._scripts: deque[deque[int]] = deque()
        self._failures: deque[ErrorRecord] = deque()
        self._ready = asyncio.Event()
        self._ready.set()
        self._emptied = asyncio.Event()
        self._scheduled = False
        self._generated = 0
        self._endings: dict[str, int] = {}

    # ---- what tests do to it

    def script(self, *outputs: Iterable[int]) -> None:
        """Queue outputs: each `Generate` that starts takes the next one, then ends with end-of-sequence."""
        self._scripts.extend(deque(tokens) for tokens in outputs)

    def fail_next(
        self, kind: str, message: str = "made to fail", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """Make the next operation that starts fail with an error of this kind."""
        self._failures.append(ErrorRecord(kind, message, param, retry_after_s=retry_after_s))

    def die(self, message: str = "the engine process crashed; it is being restarted") -> None:
        """Crash: open operations fail with `engine_dead`, sequences are gone, `send` raises until `restart`."""
        self._ready.clear()
        self.sequences.clear()
        self._emptied.set()
        self._publish([Failed.of(op, EngineDead(message)) for op in sorted(self._open) or [0]], step_id=0)

    def restart(self) -> None:
        """Restart the engine without any sequences; it knows no numbers that were used before."""
        self._used.clear()
        self._ready.set()

    def step(self, count: int = 1) -> None:
        """Let every sequence advance by one token, `count` times; each time, publish what happened."""
        for _ in range(count):
            self.steps += 1
            events: list[Event] = []
            for seq in list(self.sequences.values()):
                self._advance(seq, events)
            self._publish(events, step_id=self.steps)

    @property
    def idle(self) -> bool:
        """Whether no operation is under way."""
        return not any(seq.operations for seq in self.sequences.values())

    # ---- EngineClient

    @property
    def info(self) -> EngineInfo:
        """The description that the engine was given."""
        return self._info

    @property
    def ready(self) -> bool:
        """Whether the engine is alive."""
        return self._ready.is_set()

    async def wait_ready(self) -> EngineInfo:
        """Wait for `restart` where it died."""
        await self._ready.wait()
        return self._info

    def subscribe(self, on_envelope: OnEnvelope) -> None:
        """Set the receiver of events."""
        self._on_envelope = on_envelope

    def send(self, commands: Sequence[Command]) -> None:
        """Carry commands out. Raises `EngineDead` while dead, `ValueError` for a number used twice."""
        if not self.ready:
            raise EngineDead("the engine is down; it is being restarted, try again shortly")
        self.messages.append(list(commands))
        events: list[Event] = []
        for command in commands:
            self.sent.append(command)
            op = answered_op(command)
            if op is not None:
                self._open.add(op)
            self._accept(command, events)
        if events:
            asyncio.get_running_loop().call_soon(self._publish, events, 0)
        self._schedule()

    latest_stats: EngineStats | None = None
    num_restarts = 0

    async def stats(self) -> EngineStats:
        """The counters, as set by the test."""
        if not self.ready:
            raise EngineDead("the engine is down; it is being restarted, try again shortly")
        running = sum(1 for seq in self.sequences.values() if seq.operations)
        return EngineStats(
            num_running=running,
            num_sequences=len(self.sequences),
            num_held=len(self.held),
            steps=self.steps,
            prompt_tokens=self.appended_tokens,
            prefill_tokens=self.appended_tokens,
            generated_tokens=self._generated,
            device_pages_total=self._info.num_device_pages,
            device_pages_free=self._info.num_device_pages,
            finished=dict(self._endings),
        )

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        """Open sequences of a tenant without operations, as if each had waited for a second."""
        if not self.ready:
            raise EngineDead("the engine is down; it is being restarted, try again shortly")
        waiting = [seq for seq in self.sequences.values() if seq.tenant == tenant and not seq.operations]
        found = [
            SessionInfo(
                id=seq.id,
                request_id=seq.request_id,
                state="intercepted",
                kind="program",
                num_tokens=len(seq.tokens),
                device_tokens=len(seq.tokens),
                host_tokens=0,
                gone_tokens=0,
                waited_s=1.0,
            )
            for seq in waiting[:limit]
        ]
        return Sessions(query=0, sessions=found, total=len(waiting))

    async def drain(self) -> None:
        """Wait until the last sequence is gone."""
        while self.sequences:
            self._emptied.clear()
            await self._emptied.wait()

    async def close(self) -> None:
        """Release all sequences and stop."""
        self.closed = True
        self.sequences.clear()
        self._emptied.set()

    # ---- inside

    def _accept(self, command: Command, events: list[Event]) -> None:
        if isinstance(command, Open):
            self._claim(command.seq)
            self.sequences[command.seq] = FakeSequence(
                command.seq, command.namespace, command.tenant, command.priority, command.request_id
            )
            return
        if isinstance(command, ResidencyCommand | EndRetain):
            events.append(Finished(op=command.op))  # it has no KV to keep or move
            return
        number = getattr(command, "seq", None)
        seq = self.sequences.get(number) if number is not None else None
        if isinstance(command, Append | Generate):
            self._claim(-command.op)
            if seq is None:
                message = f"sequence {command.seq} is not open"
                events.append(Failed.of(command.op, UnknownHandle(message)))
                return
        if seq is None:
            if isinstance(command, Expect | Hold) and command.op:
                events.append(Failed.of(command.op, UnknownHandle(f"sequence {command.seq} is not open")))
            return
        match command:
            case Append() | Generate():
                seq.operations.append(command)
            case Fork():
                self._claim(command.child)
                # The child takes commands at once; its tokens arrive when the fork's turn comes.
                self.sequences[command.child] = FakeSequence(
                    command.child, seq.namespace, seq.tenant, seq.priority, command.request_id or seq.request_id
                )
                seq.operations.append(command)
                if len(seq.operations) > 1:
                    self.sequences[command.child].operations.append(command)
                else:
                    self._run_fork(seq, command)
            case Truncate():
                self._cancel(seq, events)
                del seq.tokens[command.num_tokens :]
            case Cancel():
                self._cancel(seq, events)
            case Expect():
                if command.op:
                    events.append(Finished(op=command.op))
            case SetPriority():
                seq.priority = command.priority
            case Release() | Hold():
                self._cancel(seq, events)
                if isinstance(command, Hold):
                    self.held.append((seq.tokens, command.ttl_s))
                    if command.op:
                        events.append(Finished(op=command.op, count=1))
                del self.sequences[seq.id]
                if not self.sequences:
                    self._emptied.set()

    def _claim(self, number: int) -> None:
        if number in self._used:
            raise ValueError(f"number {abs(number)} was used twice")
        self._used.add(number)

    def _cancel(self, seq: FakeSequence, events: list[Event]) -> None:
        for op in list(seq.operations):
            if isinstance(op, Fork):
                if op.seq == seq.id:
                    self._run_fork(seq, op)
            elif isinstance(op, Append) and op.outputs is None:
                # Known tokens belong to the sequence from the moment they arrive.
                seq.tokens += unpack_tokens(op.tokens)
                self.appended_tokens += len(op.tokens) // TOKEN_BYTES
            else:
                self._count("cancelled")
                usage = seq.usage() if op is seq.operations[0] else OperationUsage()
                events.append(Cancelled(op=op.op, usage=usage))
        seq.operations.clear()
        seq.end()

    def _run_fork(self, seq: FakeSequence, fork: Fork) -> None:
        if fork in seq.operations:
            seq.operations.remove(fork)
        child = self.sequences.get(fork.child)
        if child is not None:
            child.tokens = list(seq.tokens)
            if fork in child.operations:
                child.operations.remove(fork)

    def _advance(self, seq: FakeSequence, events: list[Event]) -> None:
        """Run what costs no step, then at most one token or one report."""
        while seq.operations:
            op = seq.operations[0]
            if isinstance(op, Fork):
                if op.child == seq.id:
                    return
                self._run_fork(seq, op)
            elif isinstance(op, Append):
                if self._append(seq, op, events):
                    return
            else:
                self._generate(seq, op, events)
                return

    def _append(self, seq: FakeSequence, op: Append, events: list[Event]) -> bool:
        """Whether it ended with an event."""
        seq.operations.popleft()
        tokens = list(unpack_tokens(op.tokens))
        if self._fail(op.op, events):
            return True
        num_tokens = len(seq.tokens) + len(tokens)
        if num_tokens > self._info.max_context:
            message = f"{num_tokens} tokens exceed the context of {self._info.max_context}"
            events.append(Failed.of(op.op, ContextTooLong(message)))
            self._count("failed")
            return True
        seq.tokens += tokens
        self.appended_tokens += len(tokens)
        if op.outputs is None:
            return False
        events.append(self._model.report(seq, op.op, op.outputs, tokens))
        self._count("stop")
        return True

    def _generate(self, seq: FakeSequence, op: Generate, events: list[Event]) -> None:
        if seq.generating != op.op:
            if self._fail(op.op, events):
                seq.operations.popleft()
                return
            seq.begin(op, self._scripts.popleft() if self._scripts else None, self._model)
            if op.tells_start:
                events.append(Started(op=op.op, num_prompt_tokens=seq.num_prompt))
        events.append(self._model.generate(seq, op))
        self._generated += 1
        ending = self._model.ending(seq, op)
        if ending is not None:
            reason, stop, cut = ending
            events.append(Finished(op=op.op, reason=reason, stop=stop, cut_bytes=cut, usage=seq.usage()))
            self._count(reason)
            seq.operations.popleft()
            seq.end()

    def _fail(self, op: int, events: list[Event]) -> bool:
        if not self._failures:
            return False
        events.append(Failed(op=op, error=self._failures.popleft()))
        self._count("failed")
        return True

    def _count(self, ending: str) -> None:
        self._endings[ending] = self._endings.get(ending, 0) + 1

    def _publish(self, events: list[Event], step_id: int) -> None:
        if events:
            self._open -= {event.op for event in events if isinstance(event, Finished | Failed | Cancelled)}
            self._on_envelope(Envelope(step_id, events))

    def _schedule(self) -> None:
        if self._auto and not self._scheduled and not self.idle:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._auto_step)

    def _auto_step(self) -> None:
        self._scheduled = False
        self.step()
        self._schedule()


def _drop(envelope: Envelope) -> None:
    """Receiver of events before there is one."""
