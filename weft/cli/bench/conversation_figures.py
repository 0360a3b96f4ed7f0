"""Figures of whole conversations: latency without their pauses, returns, and what was computed again. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weft.cli.bench.conversation import HeldConversation
from weft.cli.bench.measure import Timing, distribution
from weft.sim.bounds import TimedTurn, working_set


def conversation_figures(held: Sequence[HeldConversation]) -> dict[str, float]:
    """Figures of a run's conversations.

    `normalized_ms_per_token`: (end to end - pauses) / output tokens, of those that completed, without turns that stand
    for what came before a window (`num_before`); `return_ttft_ms`: time to
    first token of all turns but the first; `return_ms_per_token`: of these turns, from when one is due to its end, per
    output token; `recomputed_tokens`: of prompts, tokens that were computed or generated for
    the previous turn and not found in the cache, if the server reports `cached_tokens`; `live_tokens`: mean over time
    of the context tokens of conversations under way, and `peak_live_tokens`.
    """
    per_token = [value for value in map(normalized_s, held) if value is not None]
    returned = [outcome for one in held for outcome in one.outcomes[1:] if isinstance(outcome, Timing)]
    figures = distribution("normalized_ms_per_token", per_token)
    figures |= distribution("return_ttft_ms", [one.first_s for one in returned])
    figures |= distribution("return_ms_per_token", [one.total_s / one.num_output_tokens for one in returned])
    figures |= {"completed_conversations": sum(map(is_completed, held)), "conversations": len(held)}
    if (again := recomputed_tokens(held)) is not None:
        figures["recomputed_tokens"] = again
    turns = [turn for number, one in enumerate(held) for turn in _timed(number, one)]
    if turns and max(turn.end_s for turn in turns) > min(turn.begin_s for turn in turns):
        live = working_set(turns)
        figures |= {"live_tokens": live.mean, "peak_live_tokens": live.peak}
    return figures


def is_completed(one: HeldConversation) -> bool:
    """Whether all turns were answered."""
    return all(isinstance(outcome, Timing) for outcome in one.outcomes)


def normalized_s(one: HeldConversation) -> float | None:
    """(End to end - pauses) / output tokens in seconds; None for a conversation that did not complete, or has no turns
    but those that stand for what came before a window."""
    if not is_completed(one):
        return None
    timings = _timings(one)
    before, turns = timings[: one.num_before], timings[one.num_before :]
    if not turns:
        return None
    active_s = one.end_s - one.due_s - one.waited_s - sum(timing.total_s for timing in before)
    return active_s / sum(timing.num_output_tokens for timing in turns)


def recomputed_tokens(held: Sequence[HeldConversation]) -> int | None:
    """Tokens of prompts whose KV existed after the previous turn and was not found; None if no turn reports what was.

    A turn that reports nothing found nothing if others report: vLLM leaves a count of 0 out. Tokens that an operation
    computed again after it was preempted are not in it: clients cannot see them.
    """
    pairs = [pair for one in held for pair in zip(_timed(0, one), _timings(one), strict=True)]
    if all(timing.num_cached_tokens is None for _, timing in pairs):
        return None
    return sum(max(0, turn.known_tokens - (timing.num_cached_tokens or 0)) for turn, timing in pairs)


def _timings(one: HeldConversation) -> list[Timing]:
    return [outcome for outcome in one.outcomes if isinstance(outcome, Timing)]


def _timed(number: int, one: HeldConversation) -> Iterator[TimedTurn]:
    """The turns that were answered."""
    timings = _timings(one)
    known = 0
    for index, timing in enumerate(timings):
        turn = TimedTurn(
            session=number,
            kind=one.kind,
            begin_s=timing.due_s,
            end_s=timing.due_s + timing.total_s,
            prompt_tokens=timing.num_prompt_tokens,
            output_tokens=timing.num_output_tokens,
            known_tokens=min(known, timing.num_prompt_tokens),
            shared_tokens=0,
            next_s=timings[index + 1].due_s if index + 1 < len(timings) else math.inf,
        )
        known = turn.kept_tokens
        yield turn
