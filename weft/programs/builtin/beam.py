"""Beam search as a program: the likeliest continuations, by forks and distributions.

Each beam is a sequence; a step asks every beam for its next tokens, keeps the best of all, and forks the beams they
extend. What beams share is computed and kept once. The rules are those of transformers' beam search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.errors import ContextTooLong, InvalidRequest
from weft.core.ids import TOKEN_BYTES, pack_tokens
from weft.core.wire import MAX_DIST, EngineInfo, Finished, FinishReason, PromptOutputs, Usage
from weft.programs.runtime import Runtime
from weft.programs.runtime import Sequence as Branch
from weft.programs.types import Caller

MAX_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamArgs:
    """What to search for."""

    prompt: bytes
    """Packed token ids, at least one."""
    width: int = 4
    """Beams that are followed at once, and results."""
    max_tokens: int = 16
    length_penalty: float = 1.0
    """A beam's score is the sum of its log-probabilities divided by its length to this power: above 0, longer beams
    gain."""
    early_stopping: bool = False
    """End with the first `width` beams that are complete, instead of when no other can be better any more."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One continuation."""

    tokens: tuple[int, ...]
    """The end of sequence included, where it ended so."""
    logprob: float
    """Of all tokens together, in nats."""
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamResult:
    """Beams by falling score, and what the search cost."""

    beams: list[Beam]
    usage: Usage


@dataclass(slots=True)
class _Live:
    """A beam that goes on; its last token is not in its sequence yet."""

    branch: Branch
    tokens: tuple[int, ...]
    logprob: float


async def main(args: BeamArgs, caller: Caller, rt: Runtime) -> BeamResult:
    """Search. Raises `InvalidRequest` (`ContextTooLong` among them) before anything is computed."""
    info = rt.engine.info
    check(args, info)
    ends = frozenset() if args.ignore_eos else frozenset(info.eos_token_ids)
    complete: list[Beam] = []
    cached = 0
    root = rt.open(caller)
    live = [_Live(root, (), 0.0)]
    try:
        root.append(args.prompt)
        for length in range(1, args.max_tokens + 1):
            reports = await _ask(live, min(args.width * (1 + len(ends)), info.vocab_size))
            if length == 1:
                cached = reports[0].usage.num_cached_tokens
            grown: list[tuple[float, int, _Live]] = []
            for rank, (logprob, token, parent) in enumerate(_best(live, reports, args.width * (1 + len(ends)))):
                if token not in ends:
                    grown.append((logprob, token, parent))
                elif rank < args.width:
                    complete.append(_beam((*parent.tokens, token), logprob, args, "stop"))
                if len(grown) == args.width:
                    break
            complete = sorted(complete, key=lambda beam: -beam.score)[: args.width]
            live = _grow(live, grown)
            if not live or _is_over(complete, live, args):
                break
        if len(complete) < args.width or not args.early_stopping:
            complete += [_beam(beam.tokens, beam.logprob, args, "length") for beam in live if _at_end(beam, args)]
        beams = sorted(complete, key=lambda beam: -beam.score)[: args.width]
        usage = Usage(
            num_prompt_tokens=len(args.prompt) // TOKEN_BYTES,
            num_cached_tokens=cached,
            num_output_tokens=sum(len(beam.tokens) for beam in beams),
        )
        return BeamResult(beams=beams, usage=usage)
    finally:
        for beam in live:
            beam.branch.release()


def check(args: BeamArgs, info: EngineInfo) -> None:
    """Raise `InvalidRequest`, naming the field, for what this engine could not carry out."""
    if not args.prompt or len(args.prompt) % TOKEN_BYTES:
        raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
    if not 1 <= args.width <= MAX_WIDTH:
        raise InvalidRequest(f"beam_width must be between 1 and {MAX_WIDTH}, got {args.width}", "beam_width")
    if args.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {args.max_tokens}", "max_tokens")
    if args.width * (1 + len(info.eos_token_ids)) > min(info.vocab_size, MAX_DIST):
        raise InvalidRequest(f"this model's vocabulary is too small for {args.width} beams", "beam_width")
    length = len(args.prompt) // TOKEN_BYTES
    if length + args.max_tokens > info.max_context:
        raise ContextTooLong(
            f"the prompt has {length} tokens and {args.max_tokens} more are asked for, but this model takes "
            f"{info.max_context} in all; shorten the prompt or lower max_tokens",
            "prompt",
        )


async def _ask(live: Sequence[_Live], count: int) -> list[Finished]:
    """What may follow each beam. All are asked at once, so that they share a batch."""
    outputs = PromptOutputs(dist=count)
    return list(await asyncio.gather(*(_report(beam, outputs) for beam in live)))


async def _report(beam: _Live, outputs: PromptOutputs) -> Finished:
    return await beam.branch.append(pack_tokens(beam.tokens[-1:]), outputs)


def _best(live: Sequence[_Live], reports: Sequence[Finished], count: int) -> list[tuple[float, int, _Live]]:
    """The likeliest (log-probability, token, parent) of all beams, best first; ties go to the earlier beam."""
    grown = [
        (beam.logprob + logprob, token, beam)
        for beam, report in zip(live, reports, strict=True)
        if report.dists is not None
        for token, logprob in zip(report.dists.ids, report.dists.logprobs, strict=True)
    ]
    return sorted(grown, key=lambda candidate: -candidate[0])[:count]


def _grow(live: Sequence[_Live], grown: Sequence[tuple[float, int, _Live]]) -> list[_Live]:
    """The beams of the next step. A beam's last heir takes its sequence over; the others get forks."""
    heirs: dict[int, int] = {}
    for _, _, parent in grown:
        heirs[parent.branch.id] = heirs.get(parent.branch.id, 0) + 1
    for beam in live:
        if beam.branch.id not in heirs:
            beam.branch.release()
    following = []
    for logprob, token, parent in grown:
        heirs[parent.branch.id] -= 1
        branch = parent.branch.fork() if heirs[parent.branch.id] else parent.branch
        following.append(_Live(branch, (*parent.tokens, token), logprob))
    return following


def _beam(tokens: tuple[int, ...], logprob: float, args: BeamArgs, reason: FinishReason) -> Beam:
    score = logprob / len(tokens) ** args.length_penalty
    return Beam(tokens=tokens, logprob=logprob, score=score, finish_reason=reason)


def _is_over(complete: Sequence[Beam], live: Sequence[_Live], args: BeamArgs) -> bool:
    """Whether no beam that goes on can still be among the best: log-probabilities only fall."""
    if len(complete) < args.width:
        return False
    longest = args.max_tokens if args.length_penalty > 0 else len(live[0].tokens)
    best = max(beam.logprob for beam in live) / longest**args.length_penalty
    return args.early_stopping or best <= complete[-1].score


def _at_end(beam: _Live, args: BeamArgs) -> bool:
    return len(beam.tokens) == args.max_tokens
