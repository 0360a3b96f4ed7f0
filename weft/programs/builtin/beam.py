"""Beam search as a program: the likeliest continuations, by forks and distributions.

Each beam is a sequence; a step asks every beam for its next tokens, keeps the best of all, and forks the beams they
extend. What beams share is computed and kept once. The rules are those of transformers' beam search.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from weft.abi.errors import ContextTooLong, InvalidRequest, WeftError
from weft.core.ids import TOKEN_BYTES, pack_tokens
from weft.core.sampling import MAX_LOGPROBS, StopParams
from weft.core.wire import (
    MAX_DIST,
    EngineInfo,
    Finished,
    FinishReason,
    PromptOutputs,
    Token,
    TokenLogprobs,
    Usage,
)
from weft.programs.builtin.choice import ChoiceText
from weft.programs.runtime import Runtime
from weft.programs.sequence import SequenceHandle as Branch
from weft.programs.types import BeamScore, Caller, Chunk

MAX_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0
"""Either way: beyond it, powers of a long beam's length leave the range of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamArgs:
    """The arguments of a beam search."""

    prompt: bytes
    """Packed token ids, at least one."""
    width: int = 4
    """Beams that are followed at once."""
    n: int | None = None
    """Beams that are given back, the best ones; None: all."""
    max_tokens: int = 16
    min_tokens: int = 0
    """No beam is complete before it has so many tokens, and one that ends it."""
    length_penalty: float = 1.0
    """A beam's score is the sum of its log-probabilities divided by its length to this power: above 0, longer beams
    gain."""
    early_stopping: bool | Literal["never"] = False
    """When `width` beams are complete, the search ends: True: at once; False: when no other would be better at its
    present length; "never": when no other can become better at any length."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that complete a beam, as the end of sequence does."""
    logprobs: int | None = None
    """None: none. k >= 0: the log-probabilities of each beam's tokens, and of the k most probable ones there."""
    include_stop: bool = False
    """Whether a beam's text keeps the token that completed it."""
    skip_special_tokens: bool = True

    @property
    def num_results(self) -> int:
        """Beams that are given back."""
        return self.width if self.n is None else self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One continuation that the search found."""

    tokens: tuple[int, ...]
    """The end of sequence included, where it ended so."""
    logprob: float
    """Of all tokens together, in nats."""
    score: float
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamResult:
    """Beams by falling score, and what the search cost."""

    beams: list[Beam]
    usage: Usage


class _Step(NamedTuple):
    """A token of a beam, and those before it: beams that part share what they have in common."""

    before: _Step | None
    token: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class _Live:
    """A beam that goes on."""

    branch: Branch
    pending: bytes
    """Packed tokens that are not in its sequence yet."""
    last: _Step | None
    logprob: float


class _Complete(NamedTuple):
    """A beam that does not go on."""

    score: float
    logprob: float
    last: _Step | None
    reason: FinishReason


class _Candidate(NamedTuple):
    """A beam and the token that would extend it."""

    logprob: float
    """Of the beam with the token."""
    token: int
    parent: _Live
    report: Finished
    place: int
    """Of the token in the parent's distribution, from 0."""


async def chunks(args: BeamArgs, caller: Caller, rt: Runtime) -> AsyncGenerator[Chunk, None]:
    """The beams that are given back as choices, best first, one chunk each: nothing of them is certain before the end.

    The search starts again when the engine dies. Raises as `main` and `Recovery.stream` do.
    """
    found = await rt.recovery.run(lambda: main(args, caller, rt), caller.request_id)
    for index, beam in enumerate(found.beams):
        yield _chunk(index, beam, found.usage, args, rt)


async def main(args: BeamArgs, caller: Caller, rt: Runtime) -> BeamResult:
    """Search. Raises `InvalidRequest` (`ContextTooLong` among them) before anything is computed."""
    info = rt.engine.info
    check(args, info)
    ends = _ends(args, info)
    count = args.width * (1 + len(ends))
    complete: list[_Complete] = []
    usage = Usage()
    live = [_Live(rt.open(caller), args.prompt, None, 0.0)]
    try:
        for length in range(1, args.max_tokens + 1):
            reports = await _ask(live, min(max(count, args.logprobs or 0), info.vocab_size))
            if length == 1:
                usage = reports[0].usage
            banned = ends if length <= args.min_tokens else frozenset[int]()
            grown: list[_Candidate] = []
            for rank, candidate in enumerate(_best(live, reports, banned, count)):
                if candidate.token not in ends:
                    grown.append(candidate)
                elif rank < args.width:
                    complete.append(_complete(_step(candidate, args), length, candidate.logprob, args, "stop"))
                if len(grown) == args.width:
                    break
            complete = _ranked(complete)[: args.width]
            live = _grow(live, grown, args)
            if _is_over(complete, live, length, args):
                break
        if length == args.max_tokens and (len(complete) < args.width or args.early_stopping is not True):
            complete += [_complete(beam.last, length, beam.logprob, args, "length") for beam in live]
        beams = [_beam(one) for one in _ranked(complete)[: args.num_results]]
        return BeamResult(beams=beams, usage=_total(usage, args, beams))
    finally:
        for beam in live:
            beam.branch.release()


def check(args: BeamArgs, info: EngineInfo) -> None:
    """Raise `InvalidRequest`, naming the field, for what this engine could not carry out."""
    if not args.prompt or len(args.prompt) % TOKEN_BYTES:
        raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
    tokens = np.frombuffer(args.prompt, dtype="<i4")
    if tokens.min() < 0 or tokens.max() >= info.vocab_size:
        raise InvalidRequest(f"the prompt has token ids outside 0 to {info.vocab_size - 1}", "prompt")
    if not 1 <= args.width <= MAX_WIDTH:
        raise InvalidRequest(f"beam_width must be between 1 and {MAX_WIDTH}, got {args.width}", "beam_width")
    if not 1 <= args.num_results <= args.width:
        raise InvalidRequest(f"n must be between 1 and the {args.width} beams there are, got {args.n}", "n")
    if args.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {args.max_tokens}", "max_tokens")
    if not -MAX_LENGTH_PENALTY <= args.length_penalty <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"length_penalty must be between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}, "
            f"got {args.length_penalty:g}",
            "length_penalty",
        )
    if args.logprobs is not None and not 0 <= args.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {args.logprobs}", "logprobs")
    stop = StopParams(max_tokens=args.max_tokens, min_tokens=args.min_tokens, stop_token_ids=list(args.stop_token_ids))
    stop.validate(info.vocab_size)
    if args.width * (1 + len(_ends(args, info))) > min(info.vocab_size, MAX_DIST):
        raise InvalidRequest(f"this model's vocabulary is too small for {args.width} beams", "beam_width")
    if len(tokens) + args.max_tokens > info.max_context:
        raise ContextTooLong(
            f"the prompt has {len(tokens)} tokens and {args.max_tokens} more are asked for, but this model takes "
            f"{info.max_context} in all; shorten the prompt or lower max_tokens",
            "prompt",
        )


def _ends(args: BeamArgs, info: EngineInfo) -> frozenset[int]:
    """Tokens that complete a beam."""
    return frozenset(() if args.ignore_eos else info.eos_token_ids) | frozenset(args.stop_token_ids)


async def _ask(live: Sequence[_Live], count: int) -> list[Finished]:
    """What may follow each beam. All are asked before any is waited for, so that they share a batch."""
    outputs = PromptOutputs(dist=count)
    reports = [beam.branch.append(beam.pending, outputs) for beam in live]
    return [await report for report in reports]


def _best(live: Sequence[_Live], reports: Sequence[Finished], banned: frozenset[int], count: int) -> list[_Candidate]:
    """The likeliest extensions of all beams, best first, without banned tokens; ties go to the earlier beam."""
    candidates = (
        _Candidate(beam.logprob + logprob, token, beam, report, place)
        for beam, report in zip(live, reports, strict=True)
        if report.dists is not None
        for place, (token, logprob) in enumerate(zip(report.dists.ids, report.dists.logprobs, strict=True))
        if token not in banned
    )
    return heapq.nlargest(count, candidates, key=lambda candidate: candidate.logprob)


def _grow(live: Sequence[_Live], grown: Sequence[_Candidate], args: BeamArgs) -> list[_Live]:
    """The beams of the next step. A beam's last heir takes its sequence over; the others get forks."""
    heirs: dict[int, int] = {}
    for candidate in grown:
        number = candidate.parent.branch.id
        heirs[number] = heirs.get(number, 0) + 1
    for beam in live:
        if beam.branch.id not in heirs:
            beam.branch.release()
    following: list[_Live] = []
    try:
        for candidate in grown:
            branch = candidate.parent.branch
            heirs[branch.id] -= 1
            own = branch.fork() if heirs[branch.id] else branch
            following.append(_Live(own, pack_tokens([candidate.token]), _step(candidate, args), candidate.logprob))
    except WeftError:
        # The engine was lost meanwhile: the caller knows of the parents alone.
        for beam in following:
            beam.branch.release()
        raise
    return following


def _step(candidate: _Candidate, args: BeamArgs) -> _Step:
    dists = candidate.report.dists
    if args.logprobs is None or dists is None:
        return _Step(candidate.parent.last, candidate.token, None)
    logprobs = dists.logprobs
    entry = TokenLogprobs(
        logprobs[candidate.place], candidate.place + 1, dists.ids[: args.logprobs], logprobs[: args.logprobs]
    )
    return _Step(candidate.parent.last, candidate.token, entry)


def _complete(last: _Step | None, length: int, logprob: float, args: BeamArgs, reason: FinishReason) -> _Complete:
    return _Complete(logprob / length**args.length_penalty, logprob, last, reason)


def _ranked(complete: Iterable[_Complete]) -> list[_Complete]:
    """Best first; of equals, the one that was complete first."""
    return sorted(complete, key=lambda one: -one.score)


def _beam(complete: _Complete) -> Beam:
    steps: list[_Step] = []
    step = complete.last
    while step is not None:
        steps.append(step)
        step = step.before
    steps.reverse()
    return Beam(
        tokens=tuple(step.token for step in steps),
        logprob=complete.logprob,
        score=complete.score,
        finish_reason=complete.reason,
        logprobs=tuple(step.logprobs for step in steps if step.logprobs is not None),
    )


def _is_over(complete: Sequence[_Complete], live: Sequence[_Live], length: int, args: BeamArgs) -> bool:
    """Whether no beam that goes on is taken for one that could still be among the best: log-probabilities only fall."""
    if len(complete) < args.width or args.early_stopping is True:
        return len(complete) >= args.width
    longest = args.max_tokens if args.early_stopping == "never" and args.length_penalty > 0 else length
    best: float = max(beam.logprob for beam in live) / longest**args.length_penalty
    return best <= complete[-1].score


def _total(first: Usage, args: BeamArgs, beams: Iterable[Beam]) -> Usage:
    """Of the search: its prompt, as the first step found it, and the tokens that are given back."""
    return Usage(
        num_prompt_tokens=len(args.prompt) // TOKEN_BYTES,
        num_cached_tokens=first.num_cached_tokens,
        num_output_tokens=sum(len(beam.tokens) for beam in beams),
        queued_s=first.queued_s,
    )


def _chunk(index: int, beam: Beam, usage: Usage, args: BeamArgs, rt: Runtime) -> Chunk:
    """All there is to say of one beam."""
    choice = ChoiceText(index, args, rt)
    logprobs = beam.logprobs or (None,) * len(beam.tokens)
    tokens = [Token(0, token, 0, entry) for token, entry in zip(beam.tokens, logprobs, strict=True)]
    last = beam.tokens[-1]
    stop = last if beam.finish_reason == "stop" and last in args.stop_token_ids else None
    chunk = choice.chunk(tokens, Finished(op=0, reason=beam.finish_reason, stop=stop, usage=usage))
    return replace(chunk, score=BeamScore(beam.logprob, beam.score))
