"""Beam search over forks and next-token distributions, by the rules of transformers' beam search.

beams = await beam_search(ctx, width=4, max_tokens=16)
beams[0].text
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.abi.errors import InvalidRequest
from weft.sdk.context import Context
from weft.sdk.dist import Dist
from weft.sdk.model import own_model
from weft.sdk.sequence import Sequence as Branch
from weft.sdk.tokens import detokenize

MAX_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation that beam search found."""

    tokens: tuple[int, ...]
    """Its tokens; the end of sequence is among them where it ended with it."""
    logprob: float
    """Sum over all tokens, in nats."""
    score: float
    """`logprob / len(tokens) ** length_penalty`; beams are ordered by it."""
    reason: str
    """`stop` or `length`."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Rules:
    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    ends: frozenset[int]

    def beam(self, tokens: tuple[int, ...], logprob: float, reason: str) -> Beam:
        return Beam(tokens, logprob, logprob / len(tokens) ** self.length_penalty, reason)

    def is_over(self, complete: Sequence[Beam], live: Sequence[_Live]) -> bool:
        """Whether no live beam can still be among the best, by the rule of `early_stopping`."""
        if len(complete) < self.width or self.early_stopping is True:
            return len(complete) >= self.width
        at_any_length = self.early_stopping == "never" and self.length_penalty > 0
        longest = self.max_tokens if at_any_length else len(live[0].tokens)
        best: float = max(beam.logprob for beam in live) / longest**self.length_penalty
        return best <= complete[-1].score


@dataclass(slots=True)
class _Live:
    """A beam under way; its last token is not in its sequence yet."""

    branch: Branch
    tokens: tuple[int, ...]
    logprob: float


async def beam_search(
    ctx: Context,
    width: int = 4,
    max_tokens: int = 16,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    ignore_eos: bool = False,
) -> list[Beam]:
    """The `width` best continuations, by falling score. The context stays as it is; `ctx.fill(beam.tokens)` goes on
    with one.

    A beam's score is the sum of its log-probabilities divided by its length to the power `length_penalty`.
    `early_stopping` says when a search with `width` complete beams ends. True: at once; False: when no other would be
    better at its present length; "never": when no other can become better at any length.
    """
    model = await own_model()
    rules = _Rules(
        width, max_tokens, length_penalty, early_stopping, frozenset(() if ignore_eos else model.eos_token_ids)
    )
    if not 1 <= width <= MAX_WIDTH or width * (1 + len(rules.ends)) > model.vocab_size:
        raise InvalidRequest(f"width must be between 1 and {MAX_WIDTH} and fit the vocabulary, got {width}", "width")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
    await ctx.flush(add_generation_prompt=True)
    if not ctx.tokens:
        raise InvalidRequest("the context is empty; fill it before a search", "prompt")
    beams = await _search(ctx.sequence.fork(), rules)
    texts = await asyncio.gather(*(_text(beam, rules) for beam in beams))
    return [replace(beam, text=text) for beam, text in zip(beams, texts, strict=True)]


async def _search(root: Branch, rules: _Rules) -> list[Beam]:
    complete: list[Beam] = []
    live = [_Live(root, (), 0.0)]
    count = rules.width * (1 + len(rules.ends))
    try:
        for _ in range(rules.max_tokens):
            dists = await _ask(live, count)
            grown: list[tuple[float, int, _Live]] = []
            for rank, (logprob, token, parent) in enumerate(_best(live, dists, count)):
                if token not in rules.ends:
                    grown.append((logprob, token, parent))
                elif rank < rules.width:
                    complete.append(rules.beam((*parent.tokens, token), logprob, "stop"))
                if len(grown) == rules.width:
                    break
            complete = sorted(complete, key=lambda beam: -beam.score)[: rules.width]
            live = _grow(live, grown)
            if not live or rules.is_over(complete, live):
                break
        if len(complete) < rules.width or rules.early_stopping is not True:
            at_end = [beam for beam in live if len(beam.tokens) == rules.max_tokens]
            complete += [rules.beam(beam.tokens, beam.logprob, "length") for beam in at_end]
        return sorted(complete, key=lambda beam: -beam.score)[: rules.width]
    finally:
        for beam in live:
            beam.branch.release()


async def _ask(live: Iterable[_Live], k: int) -> list[Dist]:
    """The distribution after each beam. All are asked at once, so that they share a batch."""
    return await asyncio.gather(*[beam.branch.next_dist(k, append=beam.tokens[-1:]) for beam in live])


def _best(live: Sequence[_Live], dists: Sequence[Dist], count: int) -> list[tuple[float, int, _Live]]:
    """The likeliest (log-probability, token, parent) of all beams, best first; ties go to the earlier beam."""
    grown = [
        (beam.logprob + logprob, token, beam) for beam, dist in zip(live, dists, strict=True) for token, logprob in dist
    ]
    return sorted(grown, key=lambda candidate: -candidate[0])[:count]


def _grow(live: Sequence[_Live], grown: Sequence[tuple[float, int, _Live]]) -> list[_Live]:
    """The beams of the next step. The last continuation of a beam takes over its sequence; the others get forks."""
    heirs: dict[int, int] = {}
    for _, _, parent in grown:
        heirs[parent.branch.number] = heirs.get(parent.branch.number, 0) + 1
    for beam in live:
        if beam.branch.number not in heirs:
            beam.branch.release()
    following = []
    for logprob, token, parent in grown:
        heirs[parent.branch.number] -= 1
        branch = parent.branch.fork() if heirs[parent.branch.number] else parent.branch
        following.append(_Live(branch, (*parent.tokens, token), logprob))
    return following


async def _text(beam: Beam, rules: _Rules) -> str:
    tokens = beam.tokens[:-1] if beam.tokens[-1] in rules.ends else beam.tokens
    return await detokenize(tokens)
