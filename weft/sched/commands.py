"""`CommandHandler`: commands of clients become sequences and operations; bad ones fail alone.

Handles are (client, number): a forged or foreign number is unknown. Called by `Scheduler.handle`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable

from weft.abi.errors import Draining, InvalidRequest, Overloaded, UnknownHandle, WeftError
from weft.core.grammar import Grammar
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.objectives import check_objective
from weft.core.sampling import check_together
from weft.core.waits import WaitKind, check_wait
from weft.core.wire import (
    Append,
    Cancel,
    Command,
    EndRetain,
    ErrorRecord,
    Expect,
    Failed,
    Fork,
    Generate,
    Hold,
    MaskTokens,
    Open,
    Release,
    ResetPrefixCache,
    ResidencyCommand,
    SetPriority,
    SpaceCommand,
    Truncate,
)
from weft.sched import sequence as ops
from weft.sched.columns import extremes
from weft.sched.masks import cut_masks
from weft.sched.operations import advance, cancel_all, leave_slot
from weft.sched.sequence import QueuePlace, Sequence, SequenceState, StopMonitor, TokenGuide
from weft.sched.state import SchedulerState

MonitorFactory = Callable[[list[bytes]], StopMonitor]
GuideFactory = Callable[[Grammar, str], TokenGuide]
"""(grammar, tenant) -> guide."""
_log = logging.getLogger("weft.engine")
_MASK63 = (1 << 63) - 1


class CommandHandler:
    """Carries out one command at a time on the state of a scheduler."""

    def __init__(self, state: SchedulerState, make_monitor: MonitorFactory, make_guide: GuideFactory):
        self._state = state
        self._make_monitor = make_monitor
        self._make_guide = make_guide
        self._ids = itertools.count(1)
        self.draining = False

    def apply(self, client: int, command: Command, now: float) -> None:
        """Carry out one command. An error becomes a `Failed` event of its client."""
        try:
            match command:
                case Open():
                    self._open(client, command, now)
                case Append():
                    self._append(client, command, now)
                case Generate():
                    self._generate(client, command, now)
                case Fork():
                    self._fork(client, command, now)
                case Truncate():
                    self._truncate(client, command, now)
                case Hold():
                    if not command.ttl_s >= 0:
                        raise InvalidRequest(f"KV is held for 0 seconds or more, got {command.ttl_s}", "ttl_s")
                    how = Release(seq=command.seq, kind=WaitKind.HOLD)
                    self._release((client, command.seq), now, how, hold=command)
                case Release():
                    if command.kind:
                        check_wait(command.kind, command.expected_in_s)
                    self._release((client, command.seq), now, command)
                case Cancel():
                    sequence = self._state.sequences.find(client, command.seq)
                    cancel_all(self._state, sequence, now)
                    leave_slot(self._state, sequence, now)
                case MaskTokens():
                    masked = self._usable(client, command.seq, command.op)
                    if masked is not None:
                        masked.ops.append(ops.SetMask(command.op, command.ranges))
                        advance(self._state, masked, now)
                case Expect():
                    self._state.residency.expect(self._state.sequences.find(client, command.seq), command, now)
                case SetPriority():
                    self._set_priority(self._state.sequences.find(client, command.seq), command.priority)
                case ResetPrefixCache():
                    self._state.spaces.drop_exports(now)
                    self._state.cache.reset(now)
                case ResidencyCommand() | EndRetain():
                    self._state.residency.apply(client, command, now)
                case SpaceCommand():
                    self._state.spaces.apply(client, command, now)
                case _:
                    raise InvalidRequest(f"a scheduler does not handle {type(command).__name__}")
        except WeftError as error:
            self._state.log.end(client, Failed.of(getattr(command, "op", 0), error))
        except Exception as error:  # a bug of ours fails one command of one client, and the engine goes on
            _log.exception("%s of client %d could not be carried out", type(command).__name__, client)
            message = f"the engine could not carry this out: {type(error).__name__}: {error}"
            self._state.log.end(client, Failed.of(getattr(command, "op", 0), WeftError(message)))

    def drop_client(self, client: int, now: float) -> None:
        """A client is gone: release all it held. Its events go nowhere."""
        self._state.residency.drop_client(client, now)
        for key in [key for key in self._state.sequences.open if key[0] == client]:
            self._release(key, now, Release(seq=key[1]))
        self._state.spaces.drop_client(client, now)

    def drain(self) -> None:
        """Refuse new sequences and spaces with `Draining`; open ones go on."""
        self.draining = self._state.spaces.draining = True

    def _register(
        self, client: int, handle: int, like: Open | Sequence, request_id: str, deadline_s: float, now: float
    ) -> Sequence:
        if (client, handle) in self._state.sequences.open:
            raise InvalidRequest(f"sequence {handle} is open already: numbers may be used once", "seq")
        seq = next(self._ids)
        sequence = Sequence(
            seq=seq,
            client=client,
            handle=handle,
            tenant=like.tenant,
            namespace=like.namespace,
            request_id=request_id,
            priority=like.priority,
            objective=like.objective,
            deadline_s=deadline_s,
            place=QueuePlace(now),
            table=self._state.cache.open_table(seq, like.namespace, like.tenant),
            last_active_s=now,
        )
        self._state.sequences.open[client, handle] = sequence
        self._state.services.add(sequence)
        return sequence

    def _open(self, client: int, command: Open, now: float) -> None:
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        check_objective(command.objective, command.deadline_s)
        deadline_s = math.inf if command.deadline_s is None else now + command.deadline_s
        sequence = self._register(client, command.seq, command, command.request_id, deadline_s, now)
        if self._state.log.traces:
            self._state.log.trace(sequence, "queued", now)

    def _append(self, client: int, command: Append, now: float) -> None:
        sequence = self._usable(client, command.seq, command.op)
        if sequence is None:
            return
        if command.outputs is not None:
            command.outputs.validate(self._state.config.vocab_size)
        if not command.tokens and command.outputs is not None and command.outputs.dist is not None:
            sequence.ops.append(ops.AppendOp(command.op, unpack_tokens(b""), now, command.outputs))
            self._arrive(sequence, now)
            return
        is_whole = command.tokens and len(command.tokens) % TOKEN_BYTES == 0
        tokens = unpack_tokens(command.tokens if is_whole else b"")
        low, high = extremes(tokens) if is_whole else (0, 0)
        vocab_size = self._state.config.vocab_size
        if not is_whole or low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            what = f"token {wrong} does not exist; this model has tokens 0 to {vocab_size - 1}"
            if not is_whole:
                what = f"{len(command.tokens)} bytes are not a whole number of int32 token ids"
            error = InvalidRequest(what if command.tokens else "there are no tokens to append", "prompt")
            sequence.failure = (error.kind, error.message)  # what follows would be of another prompt
            raise error
        sequence.ops.append(ops.AppendOp(command.op, tokens, now, command.outputs))
        self._arrive(sequence, now)

    def _generate(self, client: int, command: Generate, now: float) -> None:
        sequence = self._usable(client, command.seq, command.op)
        if sequence is None:
            return
        config = self._state.config
        command.sampling.validate(config.vocab_size)
        command.stop.validate(config.vocab_size)
        check_together(command.sampling, command.stop, config.eos_token_ids)
        queue = self._state.sequences.queue
        others = len(queue) - (sequence.state in (SequenceState.WAITING, SequenceState.DEFERRED))
        # One tenant must not fill the queue for all: one below its share is admitted to a full queue too. When the
        # k-th of the T tenants that wait, in the order of their last admissions, was admitted last, k tenants waited at
        # least. So at most `max_waiting * (1 + 1/2 + ... + 1/T)` generations are admitted, each summand rounded up.
        if others >= config.max_waiting and not queue.has_share(sequence, config.max_waiting):
            wait_s = self._state.places.refused(now)
            raise Overloaded(
                f"{config.max_waiting} requests or more wait for this engine, its limit, and your share of them is "
                f"used; try again in {math.ceil(wait_s)} s",
                retry_after_s=wait_s,
            )
        stop = command.stop
        eos = () if stop.ignore_eos else config.eos_token_ids
        seed = command.sampling.seed
        if seed is None:
            # By the client's own numbers: a generation that is sent again to a restarted engine has the same ones.
            seed = (config.seed * 0x9E3779B97F4A7C15 + sequence.handle * 0xBF58476D1CE4E5B9 + command.stream) & _MASK63
        op = ops.GenerateOp(
            op=command.op,
            sampling=command.sampling,
            stop=stop,
            arrival_s=now,
            seed=seed,
            max_tokens=config.max_context if stop.max_tokens is None else stop.max_tokens,
            stop_ids=frozenset((*eos, *stop.stop_token_ids)),
            monitor=self._make_monitor(stop.stop) if stop.stop else None,
            guide=None if command.grammar is None else self._make_guide(command.grammar, sequence.tenant),
            num_output=command.num_generated,
            tells_start=command.tells_start,
        )
        sequence.ops.append(op)
        may_wait = others or self._state.sequences.running
        if may_wait and config.prefix_cache and not sequence.high_water:
            self._state.interception.closed.inherit(sequence, now)
        self._arrive(sequence, now)

    def _usable(self, client: int, handle: int, op: int) -> Sequence | None:
        """The sequence, unless an earlier failure has made it useless: then `op` fails likewise."""
        sequence = self._state.sequences.find(client, handle)
        if sequence.failure is not None:
            self._state.log.end(client, Failed(op=op, error=ErrorRecord(*sequence.failure)))
            return None
        return sequence

    def _arrive(self, sequence: Sequence, now: float) -> None:
        """A new operation: an idle sequence takes its place in the queue at this moment."""
        if sequence.state is SequenceState.IDLE and len(sequence.ops) == 1:
            config = self._state.config
            interception = self._state.interception
            if sequence.wait is None:
                has_kv = sequence.num_computed > 0 or not sequence.high_water  # else it was discarded
            else:
                has_kv = interception.has_most(sequence, sequence.wait)
            sequence.place.num_known = sequence.high_water
            waited_s = now - sequence.last_active_s
            sequence.place.arrive(now, waited_s, config.return_order, config.aging_s, has_kv=has_kv)
            interception.returned(sequence, now)
        else:
            sequence.wait_kind, sequence.expected_s = WaitKind.PROGRAM, None
        advance(self._state, sequence, now)

    def _fork(self, client: int, command: Fork, now: float) -> None:
        parent = self._state.sequences.find(client, command.seq)
        request_id = command.request_id or parent.request_id
        child = self._register(client, command.child, parent, request_id, parent.deadline_s, now)
        child.unborn = True
        child.parent = parent
        parent.ops.append(ops.ForkInto(child))
        advance(self._state, parent, now)

    def _truncate(self, client: int, command: Truncate, now: float) -> None:
        sequence = self._state.sequences.find(client, command.seq)
        if not 0 <= command.num_tokens <= len(sequence.tokens):
            message = f"cannot cut a sequence of {len(sequence.tokens)} tokens to {command.num_tokens}"
            raise InvalidRequest(message, "num_tokens")
        state, wait = self._state, sequence.wait
        cancel_all(state, sequence, now)
        end = sequence.table.node if wait is None or wait.end is None else wait.end
        is_masked, first_masked = bool(sequence.branches), sequence.num_plain
        del sequence.tokens[command.num_tokens :]
        sequence.masks = cut_masks(sequence.masks, command.num_tokens)
        if is_masked:
            sequence.begin_branch(state.sequences.new_branch())
        sequence.high_water = min(sequence.high_water, command.num_tokens)
        sequence.failure = None
        leave_slot(state, sequence, now)
        if is_masked:  # nothing finds what is cut off of a branch
            num_pages = -(-max(command.num_tokens, first_masked) // state.cache.page_size)
            state.cache.forget_after(end, num_pages, wait)

    def _release(self, key: tuple[int, int], now: float, how: Release, *, hold: Hold | None = None) -> None:
        sequence = self._state.sequences.open.pop(key, None)
        if sequence is None:
            if hold is not None and hold.op:
                raise UnknownHandle(f"sequence {key[1]} is not open, so its KV cannot be held")
            return  # released before, or dropped with its engine: the caller's wish is fulfilled
        state = self._state
        state.services.remove(sequence)
        cancel_all(state, sequence, now)
        sequence.unborn = False
        leave_slot(state, sequence, now)
        state.sequences.close(sequence)
        sequence.kv_epoch += 1
        held = None if hold is None else state.residency.hold(sequence, hold, now)
        state.interception.close(sequence, how, held, now)
        state.cache.close(sequence.table, now)

    def _set_priority(self, sequence: Sequence, priority: int) -> None:
        sequence.priority = priority
        if sequence.state in (SequenceState.WAITING, SequenceState.DEFERRED):
            self._state.sequences.queue.push(sequence)
