"""The operations of sequences: what begins when the one before it is over, and how each ends.

`advance` is called whenever a sequence's queue of operations may move: a command came in, or an operation ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.abi.errors import ContextTooLong, InvalidRequest
from weft.core.wire import Cancelled, ErrorRecord, Failed, Finished, OperationUsage, OpEvent, Started, TokenLogprobs
from weft.sched.masks import Mask, add_mask, unpack_ranges
from weft.sched.sequence import AppendOp, ForkInto, GenerateOp, Op, Sequence, SequenceState, SetMask
from weft.sched.state import SchedulerState


def advance(state: SchedulerState, sequence: Sequence, now: float) -> None:
    """Begin what can begin. The sequence, and the forks that come to be by that, end up where they belong: running,
    waiting, or idle."""
    parents: list[Sequence] = []  # a fork goes first, and chains of forks may be longer than Python's stack
    while True:
        is_placed = sequence.unborn
        while sequence.ops and not is_placed:
            op = sequence.ops[0]
            if isinstance(op, ForkInto):
                sequence.ops.popleft()
                if op.child.state is not SequenceState.CLOSED:  # else it was released before it came to be
                    _fork(state, sequence, op.child, now)
                    parents.append(sequence)
                    sequence = op.child
            elif isinstance(op, SetMask):
                sequence.ops.popleft()
                _set_mask(state, sequence, op)
            elif isinstance(op, AppendOp):
                if op.outputs is None or not op.begun:
                    _begin_append(state, sequence, op, now)
                if sequence.ops and sequence.ops[0] is op:
                    done = sequence.num_written if op.reads_results else sequence.num_computed
                    if done < sequence.target:
                        break
                    finish_append(state, sequence, op, now)
                    is_placed = True
            elif _begin_generate(state, sequence, op, now):
                break
        if is_placed:
            pass
        elif sequence.state in (SequenceState.IDLE, SequenceState.WAITING, SequenceState.DEFERRED):
            state.sequences.enqueue_or_idle(sequence, now)
            if sequence.wait is not None and sequence.state is SequenceState.IDLE and not sequence.ops:
                state.interception.became_idle(sequence, sequence.wait)
        elif sequence.state is SequenceState.RUNNING and not sequence.has_work and not sequence.ops:
            leave_slot(state, sequence, now)
        if not parents:
            return
        sequence = parents.pop()


def _begin_append(state: SchedulerState, sequence: Sequence, op: AppendOp, now: float) -> None:
    op.begun = True
    length = len(sequence.tokens) + len(op.tokens)
    if length == 0:
        empty = InvalidRequest("a sequence without tokens has no next one: append at least one", "tokens")
        sequence.ops.popleft()
        fail_sequence(state, sequence, op.op, empty.kind, empty.message)
        return
    if length > state.config.max_context:
        error = ContextTooLong(
            f"the sequence would have {length} tokens; this model serves at most {state.config.max_context}. "
            "Shorten the prompt, or start the server with a larger max_context if the model allows it"
        )
        sequence.ops.popleft()
        fail_sequence(state, sequence, op.op, error.kind, error.message)
        return
    if op.outputs is not None and (op.outputs.logprobs is not None or not op.tokens):
        # A token's score comes from the row of the token before it, so that one has to be computed as well.
        state.sequences.rewind(sequence, now)
    op.start = len(sequence.tokens)
    sequence.tokens.extend(op.tokens)
    sequence.total = len(sequence.tokens)
    if op.outputs is None:
        sequence.ops.popleft()
        return
    if op.outputs.logprobs is not None:
        sequence.reuse_limit = max(op.start - 1, 0)
    elif op.outputs.hidden is not None:
        sequence.reuse_limit = op.start


def _begin_generate(state: SchedulerState, sequence: Sequence, op: GenerateOp, now: float) -> bool:
    """Whether it began; otherwise it has failed and the next operation is first."""
    if op.num_prompt:
        return True
    length = len(sequence.tokens)
    error: InvalidRequest | None = None
    if length == 0:
        error = InvalidRequest("the prompt has no tokens: append at least one before generating", "prompt")
    elif length >= state.config.max_context:
        error = ContextTooLong(
            f"the prompt has {length} tokens and leaves no room to generate in a context of "
            f"{state.config.max_context}. Shorten the prompt"
        )
    elif not 0 <= op.num_output < min(length, op.max_tokens):
        error = InvalidRequest(
            f"num_generated is {op.num_output} in a sequence of {length} tokens, for at most {op.max_tokens} in all",
            "num_generated",
        )
    if error is not None:
        sequence.ops.popleft()
        fail_sequence(state, sequence, op.op, error.kind, error.message)
        return False
    state.sequences.rewind(sequence, now)
    op.num_prompt = sequence.num_prompt = length - op.num_output
    op.max_tokens = min(op.max_tokens, state.config.max_context - op.num_prompt)
    state.log.counters.prompt_tokens += op.num_prompt
    if op.num_output:
        _follow(op, sequence.tokens[op.num_prompt :])
    return True


def _follow(op: GenerateOp, tokens: Iterable[int]) -> None:
    """Bring the stop strings and the grammar of a generation to where the tokens sampled elsewhere have left them."""
    for index, token in enumerate(tokens, 1):
        if op.monitor is not None:
            op.monitor.push(token, index >= op.stop.min_tokens)
        if op.guide is not None:
            op.guide.push(token)


def _set_mask(state: SchedulerState, sequence: Sequence, op: SetMask) -> None:
    length = len(sequence.tokens)
    try:
        mask = Mask(length, unpack_ranges(op.ranges, length))
    except InvalidRequest as error:
        fail_sequence(state, sequence, op.op, error.kind, error.message)
        return
    sequence.masks = add_mask(sequence.masks, mask)
    sequence.begin_branch(state.sequences.new_branch())


def _fork(state: SchedulerState, parent: Sequence, child: Sequence, now: float) -> None:
    """Make `child`, registered and possibly with operations queued already, a copy of `parent`."""
    child.unborn = False
    child.parent = None
    child.failure = parent.failure
    child.tokens = parent.tokens[:]
    child.total = len(child.tokens)
    child.masks = list(parent.masks)
    if child.masks:
        child.branches = list(parent.branches)
        child.begin_branch(state.sequences.new_branch())
    leader = parent
    if (
        parent.state is SequenceState.PENDING_FORK
        and parent.parent is not None
        and parent.fork_point == len(parent.tokens)
    ):
        leader = parent.parent
    busy = leader.state in (SequenceState.WAITING, SequenceState.DEFERRED, SequenceState.RUNNING)
    if busy and leader.has_work:
        child.parent = leader
        child.fork_point = len(child.tokens)
        child.move_to(SequenceState.PENDING_FORK)
        leader.pending_forks.append(child)
    elif parent.state is not SequenceState.PENDING_FORK:
        state.cache.close(child.table, now)
        child.table = state.cache.fork(parent.table, child.seq)
        child.adopt_kv(parent.num_computed, parent.num_written)
        # A parent that is parked has no KV of its own, but its tokens have had it.
        child.high_water = max(parent.num_computed, min(parent.high_water, len(child.tokens)))
        child.last_step = parent.last_step  # which may still write a page that a step of the child would copy
        child.sources.settle(parent.num_computed)
        state.sequences.trim(child, now)


def fail_sequence(state: SchedulerState, sequence: Sequence, op: int, kind: str, message: str) -> None:
    """`op` could not be carried out: it fails, and so does everything put on the sequence from now on."""
    sequence.failure = (kind, message)
    state.log.end(sequence.client, Failed(op=op, error=ErrorRecord(kind, message)))
    end_all(state, sequence, _failed(kind, message))


def finish_append(state: SchedulerState, sequence: Sequence, op: AppendOp, now: float) -> None:
    """End an append that reports about its tokens."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    if op.outputs is not None and op.outputs.logprobs is not None:
        prompt_logprobs = [op.scores.get(op.start + i) for i in range(len(op.tokens))]
    found = sequence.sources.counts(len(sequence.tokens))
    usage = OperationUsage(
        num_prompt_tokens=len(sequence.tokens),
        num_cached_tokens=found.cached,
        num_host_tokens=found.host,
        num_recomputed_tokens=found.recomputed,
        first_different_token=sequence.first_different,
        num_continued_tokens=found.continued,
        num_prefill_tokens=sequence.sources.num_prefilled,
        total_s=now - op.arrival_s,
    )
    event = Finished(op=op.op, usage=usage, prompt_logprobs=prompt_logprobs, hidden=op.hidden, dists=op.dist)
    end_operation(state, sequence, event, now)
    if not sequence.ops:
        state.log.answered.append((sequence.client, sequence.handle))


def end_operation(state: SchedulerState, sequence: Sequence, event: OpEvent, now: float) -> None:
    """End the operation under way with its one terminal event, and go on with the next."""
    if isinstance(sequence.ops.popleft(), GenerateOp):
        state.places.freed(now)
    how = state.log.end(sequence.client, event)
    if state.log.traces:
        state.log.trace(sequence, how, now, len(sequence.tokens))
    _settle(sequence)
    leave_slot(state, sequence, now)


def _settle(sequence: Sequence) -> None:
    """What the sequence has is what its next operation finds."""
    sequence.reuse_limit = None
    sequence.sources.settle(min(sequence.num_computed, len(sequence.tokens)))
    sequence.first_different = None


def leave_slot(state: SchedulerState, sequence: Sequence, now: float) -> None:
    """Take the slot of a sequence whose operation is over; what it has to do next may start at once."""
    sequence.epoch += 1
    sequence.total = len(sequence.tokens)
    state.sequences.stop_running(sequence)
    state.sequences.queue.remove(sequence)
    if sequence.pending_forks:
        state.sequences.release_pending_forks(sequence, now)
    if sequence.parent is not None:
        stop_pending(sequence)
    if sequence.continues is not None:
        state.interception.closed.let_go(sequence)
    state.sequences.trim(sequence, now)
    sequence.move_to(SequenceState.IDLE)
    advance(state, sequence, now)


def stop_pending(sequence: Sequence) -> None:
    """Stop waiting for a parent."""
    if sequence.parent is not None and sequence in sequence.parent.pending_forks:
        sequence.parent.pending_forks.remove(sequence)
    sequence.parent = None


def end_all(state: SchedulerState, sequence: Sequence, event: Callable[[int], OpEvent]) -> None:
    """End every operation, under way and queued, with the event made of its number. Forks that do not come to be fail,
    and all that was put on them."""
    # Not `UnknownHandle`: that says to a client that the engine does not hold the sequence.
    error = InvalidRequest(
        "what ran on the sequence to fork from was ended before it could be forked; fork again", "seq"
    )
    ending = [(sequence, event)]
    while ending:
        current, make = ending[-1]
        if not current.ops:
            ending.pop()
            continue
        op = current.ops.popleft()
        if isinstance(op, ForkInto):
            op.child.unborn = False
            op.child.failure = (error.kind, error.message)
            ending.append((op.child, _failed(error.kind, error.message)))
        elif isinstance(op, GenerateOp) or (isinstance(op, AppendOp) and op.outputs is not None):
            state.log.end(current.client, make(op.op))


def cancel_all(state: SchedulerState, sequence: Sequence, now: float) -> None:
    """End every operation, under way and queued, because the client gave them up."""
    if isinstance(sequence.head, GenerateOp):
        state.places.freed(now)
    end_all(state, sequence, _cancelled(sequence, now))
    _settle(sequence)


def _cancelled(sequence: Sequence, now: float) -> Callable[[int], OpEvent]:
    """Makes the `Cancelled` events of a sequence's operations, with what the one under way has cost."""
    head = sequence.head

    def event(op: int) -> OpEvent:
        usage = usage_of(sequence, head, now) if head is not None and _number(head) == op else OperationUsage()
        return Cancelled(op=op, usage=usage)

    return event


def usage_of(sequence: Sequence, op: Op, now: float) -> OperationUsage:
    """What an operation has cost until `now`."""
    if not isinstance(op, GenerateOp):
        return OperationUsage()
    first_launch = op.first_launch_s
    if first_launch is None:  # the prompt was being computed already, or it has not begun
        first_launch = now if op.first_token_s is None else op.arrival_s
    found = sequence.sources.counts(op.num_prompt)
    return OperationUsage(
        num_prompt_tokens=op.num_prompt,
        num_cached_tokens=found.cached,
        num_host_tokens=found.host,
        num_recomputed_tokens=found.recomputed,
        first_different_token=sequence.first_different,
        num_continued_tokens=found.continued,
        num_prefill_tokens=sequence.sources.num_prefilled,
        num_output_tokens=op.num_output,
        num_preemptions=op.num_preemptions,
        queued_s=first_launch - op.arrival_s,
        first_token_s=0.0 if op.first_token_s is None else op.first_token_s - op.arrival_s,
        total_s=now - op.arrival_s,
    )


def tell_start(state: SchedulerState, sequence: Sequence, op: GenerateOp, now: float) -> None:
    """Tell the client that a generation has begun, and what of its prompt has KV."""
    op.tells_start = False
    usage = usage_of(sequence, op, now)
    started = Started(
        op=op.op,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_continued_tokens=usage.num_continued_tokens,
        queued_s=usage.queued_s,
    )
    state.log.send(sequence.client, started)


def _failed(kind: str, message: str) -> Callable[[int], OpEvent]:
    return lambda op: Failed(op=op, error=ErrorRecord(kind, message))


def _number(op: Op) -> int:
    return 0 if isinstance(op, ForkInto) else op.op
