"""What a completed step means: tokens learned, pages written, operations ended.

The second half of the state. Results of a sequence whose epoch has moved on since the launch are void: its
operation was ended or cancelled meanwhile, and a token that turns out to be late is dropped. Likewise what was written
for a sequence whose KV was given back or cut since (`kv_epoch`).
"""

from __future__ import annotations

import numpy as np

from weft.abi.errors import InvalidLogits, InvalidRequest
from weft.core.step import INVALID_NUMBERS, StepResult, TopTokens, is_invalid
from weft.core.wire import Dists, Failed, Finished, FinishReason, Token, TokenLogprobs
from weft.sched.in_flight import InFlight
from weft.sched.operations import end_operation, finish_append, leave_slot, usage_of
from weft.sched.sequence import AppendOp, GenerateOp, Sequence, SequenceState, StopVerdict, finish_decodes
from weft.sched.state import SchedulerState

_NOTHING = StopVerdict()


def update(state: SchedulerState, flight: InFlight, result: StepResult, now: float) -> None:
    """Take in the result of a step, in launch order."""
    state.cache.tiers.step_completed(flight.step_id)
    if is_invalid(result):
        state.log.is_invalid = True
        _fail_invalid(state, flight, result, now)
    _take_scores(flight, result)
    _take_hidden(flight, result)
    _take_distributions(flight, result)
    _take_decodes(state, flight, now)
    _take_writes(state, flight, now)
    _take_tokens(state, flight, result, now)
    state.spaces.take_in(flight, result, now)


def _take_decodes(state: SchedulerState, flight: InFlight, now: float) -> None:
    """What the decoding sequences have written; most steps fill no page of most of them."""
    page_size = state.cache.page_size
    for sequence, end in finish_decodes(flight.decoded, page_size):
        if sequence.num_written < end:
            continue  # cut meanwhile
        if end // page_size > sequence.table.num_indexed:
            _index(state, sequence, end, now)
        if not sequence.decoding:
            _end_if_filled(state, sequence, now)


def _take_writes(state: SchedulerState, flight: InFlight, now: float) -> None:
    page_size = state.cache.page_size
    for sequence, epoch, end in flight.written:
        if sequence.kv_epoch != epoch:
            continue
        sequence.finish_kv(end)
        _index(state, sequence, end, now)
        has_ended = not sequence.decoding and _end_if_filled(state, sequence, now)
        if not has_ended and end % page_size:
            state.cache.publish_tail(sequence.table, sequence.index_keys, end)


def _index(state: SchedulerState, sequence: Sequence, end: int, now: float) -> None:
    """Let others find the pages that are full with the first `end` tokens."""
    table = sequence.table
    known = min(end, len(sequence.tokens))
    if known // state.cache.page_size > table.num_indexed and table.indexable:
        state.cache.commit(table, sequence.index_keys, known, now)
        if table.announced:
            state.sequences.queue.progressed(sequence.seq, table.num_indexed)
        else:
            state.sequences.queue.gave_up(sequence.seq)


def _end_if_filled(state: SchedulerState, sequence: Sequence, now: float) -> bool:
    """End the operation under way if all that was known is computed and nothing is to be sampled. Whether it ended:
    then the sequence has left its slot, and keeps its last page to itself until it goes on."""
    if sequence.state is not SequenceState.RUNNING or sequence.num_written < sequence.target:
        return False
    head = sequence.head
    if isinstance(head, GenerateOp):
        return False
    if isinstance(head, AppendOp):
        finish_append(state, sequence, head, now)
    else:
        leave_slot(state, sequence, now)
    return True


def _take_tokens(state: SchedulerState, flight: InFlight, result: StepResult, now: float) -> None:
    send = state.log.messages.append
    count = 0
    # The tokens of one-off samplers come after those of sequences.
    for index, ((sequence, epoch), token) in enumerate(zip(flight.sampled, result.tokens.tolist(), strict=False)):
        if sequence.epoch != epoch:
            continue
        op = sequence.ops[0]
        if not isinstance(op, GenerateOp):
            raise TypeError(f"sequence {sequence.seq} sampled without a generate")
        if token < 0:
            _fail(state, sequence, op, now)
            continue
        sequence.tokens.append(token)
        op.num_output += 1
        count += 1
        if op.first_token_s is None:
            op.first_token_s = now
            if state.log.traces:
                state.log.trace(sequence, "first_token", now)
        if not op.is_plain:
            _take_watched(state, sequence, op, token, result, index, now)
            continue
        send((sequence.client, Token(op.op, token)))
        if token in op.stop_ids or op.num_output >= op.max_tokens:
            _end_if_over(state, sequence, op, token, _NOTHING, False, now)
    state.log.counters.generated_tokens += count


def _take_watched(
    state: SchedulerState, sequence: Sequence, op: GenerateOp, token: int, result: StepResult, index: int, now: float
) -> None:
    """A token whose bytes a stop string or a grammar follows, or whose log-probability the request asks for."""
    complete = op.guide is not None and op.guide.push(token)
    if op.guide is not None and op.guide.error:
        # The token was drawn although the grammar left none, so it is not told, and not of the sequence.
        sequence.tokens.pop()
        op.num_output -= 1
        error = InvalidRequest(op.guide.error, "grammar")
        usage = usage_of(sequence, op, now)
        failed = Failed.of(op.op, error, usage)
        end_operation(state, sequence, failed, now)
        return
    past_minimum = op.num_output >= op.stop.min_tokens
    verdict = _NOTHING if op.monitor is None else op.monitor.push(token, past_minimum)
    logprobs = None if op.sampling.logprobs is None else _logprobs(result, index, op.sampling.logprobs)
    state.log.send(sequence.client, Token(op.op, token, verdict.hold_bytes, logprobs))
    _end_if_over(state, sequence, op, token, verdict, complete, now)


def _end_if_over(
    state: SchedulerState,
    sequence: Sequence,
    op: GenerateOp,
    token: int,
    verdict: StopVerdict,
    complete: bool,
    now: float,
) -> None:
    """End a generation whose last token ends it; `complete` says that its grammar allows no more."""
    if token in op.stop_ids:
        stop = None if token in state.config.eos_token_ids else token
        _finish(state, sequence, op, "stop", stop, 0, now)
    elif verdict.stop is not None:
        _finish(state, sequence, op, "stop", verdict.stop, verdict.cut_bytes, now)
    elif complete:
        _finish(state, sequence, op, "stop", None, 0, now)
    elif op.num_output >= op.max_tokens:
        _finish(state, sequence, op, "length", None, 0, now)


def _fail(state: SchedulerState, sequence: Sequence, op: AppendOp | GenerateOp, now: float) -> None:
    """End an operation for which the model computed no finite numbers, unless it has ended."""
    if sequence.head is not op:
        return
    error = InvalidLogits(INVALID_NUMBERS)
    failed = Failed.of(op.op, error, usage_of(sequence, op, now))
    end_operation(state, sequence, failed, now)


def _fail_invalid(state: SchedulerState, flight: InFlight, result: StepResult, now: float) -> None:
    """End the appends whose reports are not finite. Sampled tokens say so themselves."""
    position = 0
    for sequence, epoch, op, _, num in flight.scored:
        scores = result.score_logprobs
        if sequence.kv_epoch == epoch and scores is not None and np.isnan(scores[position : position + num]).any():
            _fail(state, sequence, op, now)
        position += num
    for group, (sequence, epoch, op, _) in enumerate(flight.hidden_sums):
        sums = result.hidden_sums
        if sequence.kv_epoch == epoch and sums is not None and not np.isfinite(sums[group]).all():
            _fail(state, sequence, op, now)
    for index, (sequence, epoch, op) in enumerate(flight.distributions):
        if sequence.kv_epoch == epoch and result.dist is not None and np.isnan(result.dist.logprobs[index]).any():
            _fail(state, sequence, op, now)


def _finish(
    state: SchedulerState,
    sequence: Sequence,
    op: GenerateOp,
    reason: FinishReason,
    stop: str | int | None,
    cut_bytes: int,
    now: float,
) -> None:
    state.sequences.queue.order.charge(sequence, op.num_output)
    event = Finished(op=op.op, reason=reason, stop=stop, cut_bytes=cut_bytes, usage=usage_of(sequence, op, now))
    end_operation(state, sequence, event, now)


def _take_scores(flight: InFlight, result: StepResult) -> None:
    position = 0
    for sequence, epoch, op, first, num in flight.scored:
        if sequence.kv_epoch == epoch and result.score_logprobs is not None and result.score_ranks is not None:
            top = op.outputs.logprobs if op.outputs is not None and op.outputs.logprobs is not None else 0
            for offset in range(num):
                index = position + offset
                ids, values = _top(result.score_top, index, top)
                op.scores[first + offset] = TokenLogprobs(
                    float(result.score_logprobs[index]), int(result.score_ranks[index]), ids, values
                )
        position += num


def _take_hidden(flight: InFlight, result: StepResult) -> None:
    for group, (sequence, epoch, op, num) in enumerate(flight.hidden_sums):
        if sequence.kv_epoch != epoch or result.hidden_sums is None:
            continue
        total = result.hidden_sums[group].astype(np.float64)
        if op.hidden is not None:
            total = total + np.array(op.hidden) * op.hidden_done
        op.hidden_done += num
        op.hidden = (total / op.hidden_done).tolist()


def _take_distributions(flight: InFlight, result: StepResult) -> None:
    for index, (sequence, epoch, op) in enumerate(flight.distributions):
        if sequence.kv_epoch == epoch and op.outputs is not None and op.outputs.dist is not None:
            op.dist = _dist(result, index, op.outputs.dist)


def _dist(result: StepResult, index: int, count: int) -> Dists | None:
    if result.dist is None:
        return None
    return Dists(result.dist.ids[index, :count].tobytes(), result.dist.logprobs[index, :count].tobytes())


def _logprobs(result: StepResult, index: int, top: int) -> TokenLogprobs | None:
    if result.logprobs is None or result.ranks is None:
        return None
    ids, values = _top(result.top, index, top)
    return TokenLogprobs(float(result.logprobs[index]), int(result.ranks[index]), ids, values)


def _top(top: TopTokens | None, index: int, count: int) -> tuple[list[int], list[float]]:
    if top is None or count == 0:
        return [], []
    return top.ids[index, :count].tolist(), top.logprobs[index, :count].tolist()
