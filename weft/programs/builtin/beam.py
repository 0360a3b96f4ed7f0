"""Beam search as a program: the likeliest continuations, by forks and distributions.

Each beam is a sequence, so what beams share is computed and kept once. The algorithm is `weft.sdk.beam_rules`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES, pack_tokens
from weft.core.sampling import StopParams, check_logprobs
from weft.core.wire import MAX_DIST, EngineInfo, Finished, OperationUsage, PromptOutputs, Token, TokenLogprobs
from weft.programs.builtin.choice import ChoiceText
from weft.programs.builtin.completion import check_prompt, check_room
from weft.programs.runtime import Runtime
from weft.programs.sequence import SequenceHandle
from weft.programs.types import BeamScore, Caller, Chunk
from weft.sdk.beam_rules import MAX_WIDTH, BeamRules, BeamSearch, FoundBeam, LiveBeam

MAX_LENGTH_PENALTY = 10.0
"""Either way: beyond it, powers of a long beam's length leave the range of numbers."""
Dist = tuple[list[int], list[float]]
"""Token ids, most probable first, and their log-probabilities."""


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
class BeamResult:
    """Beams by falling score, and what the search cost."""

    beams: list[FoundBeam[TokenLogprobs | None]]
    """The details of a token are its log-probabilities, where asked for."""
    usage: OperationUsage


async def chunks(args: BeamArgs, caller: Caller, rt: Runtime) -> AsyncGenerator[Chunk, None]:
    """The beams that are given back as choices, best first, one chunk each: nothing of them is certain before the end.

    The search starts again when the engine dies. Raises as `main` and `Recovery.stream` do.
    """
    attempts = rt.recovery.stream(lambda: _steps(args, caller, rt), caller.request_id, resumes=False)
    async with aclosing(attempts) as steps:
        async for found in steps:
            if found is not None:
                for index, beam in enumerate(found.beams):
                    yield _chunk(index, beam, found.usage, args, rt)


async def main(args: BeamArgs, caller: Caller, rt: Runtime) -> BeamResult:
    """Search. Raises `InvalidRequest` (`ContextTooLong` among them) before anything is computed."""
    async with aclosing(_steps(args, caller, rt)) as steps:
        [found] = [step async for step in steps if step is not None]
    return found


async def _steps(args: BeamArgs, caller: Caller, rt: Runtime) -> AsyncGenerator[BeamResult | None, None]:
    """None after each step of the search, which tells `Recovery` of its progress; at last what it found."""
    info = rt.engine.info
    check(args, info)
    rules = _rules(args, info)
    count = min(max(rules.num_candidates, args.logprobs or 0), info.vocab_size)
    usage: OperationUsage | None = None
    search: BeamSearch[SequenceHandle, TokenLogprobs | None] = BeamSearch(rules, rt.open(caller))
    try:
        while search.goes_on:
            reports = await _ask(search.live, args.prompt, count)
            usage = usage or reports[0].usage
            dists = [_dist(report) for report in reports]
            entry = functools.partial(_entry, dists, args.logprobs)
            search.advance([zip(*dist, strict=True) for dist in dists], entry)
            yield None
        beams = search.results()[: args.num_results]
    finally:
        search.release()
    yield BeamResult(beams=beams, usage=_total(usage or OperationUsage(), args, beams))


def check(args: BeamArgs, info: EngineInfo) -> None:
    """Raise `InvalidRequest`, naming the field, for what this engine could not carry out."""
    check_prompt(args.prompt, info)
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
    if args.logprobs is not None:
        check_logprobs(args.logprobs, "logprobs")
    stop = StopParams(max_tokens=args.max_tokens, min_tokens=args.min_tokens, stop_token_ids=list(args.stop_token_ids))
    stop.validate(info.vocab_size)
    if _rules(args, info).num_candidates > min(info.vocab_size, MAX_DIST):
        raise InvalidRequest(f"this model's vocabulary is too small for {args.width} beams", "beam_width")
    check_room(args.prompt, args.max_tokens, info)


def _rules(args: BeamArgs, info: EngineInfo) -> BeamRules:
    return BeamRules(
        width=args.width,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        length_penalty=args.length_penalty,
        early_stopping=args.early_stopping,
        ends=frozenset(() if args.ignore_eos else info.eos_token_ids) | frozenset(args.stop_token_ids),
    )


async def _ask(
    live: Iterable[LiveBeam[SequenceHandle, TokenLogprobs | None]], prompt: bytes, count: int
) -> list[Finished]:
    """What may follow each beam. All are asked before any is waited for, so that they share a batch."""
    outputs = PromptOutputs(dist=count)
    asked = [beam.branch.append(pack_tokens(beam.tokens[-1:]) if beam.tokens else prompt, outputs) for beam in live]
    return [await report for report in asked]


def _dist(report: Finished) -> Dist:
    return ([], []) if report.dists is None else (report.dists.ids, report.dists.logprobs)


def _entry(dists: list[Dist], num_tops: int | None, parent: int, place: int) -> TokenLogprobs | None:
    """Log-probabilities of a token of the distribution after beam `parent`, where asked for."""
    if num_tops is None:
        return None
    ids, logprobs = dists[parent]
    return TokenLogprobs(logprobs[place], place + 1, ids[:num_tops], logprobs[:num_tops])


def _total(first: OperationUsage, args: BeamArgs, beams: Iterable[FoundBeam[TokenLogprobs | None]]) -> OperationUsage:
    """Of the search: its prompt, as the first step found it, and the tokens that are given back."""
    usage = OperationUsage(
        num_prompt_tokens=len(args.prompt) // TOKEN_BYTES,
        num_output_tokens=sum(len(beam.tokens) for beam in beams),
        queued_s=first.queued_s,
    )
    return usage.with_prompt_of(first)


def _chunk(
    index: int, beam: FoundBeam[TokenLogprobs | None], usage: OperationUsage, args: BeamArgs, rt: Runtime
) -> Chunk:
    """All there is to say of one beam."""
    choice = ChoiceText(index, args, rt)
    tokens = [Token(0, token, 0, entry) for token, entry in zip(beam.tokens, beam.details, strict=True)]
    last = beam.tokens[-1]
    stop = last if beam.reason == "stop" and last in args.stop_token_ids else None
    chunk = choice.chunk(tokens, Finished(op=0, reason=beam.reason, stop=stop, usage=usage))
    return msgspec.structs.replace(chunk, score=BeamScore(beam.logprob, beam.score))
