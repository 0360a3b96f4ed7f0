"""Beam search over forks and next-token distributions. Its algorithm is `weft.sdk.beam_rules`.

beams = await beam_search(ctx, width=4, max_tokens=16)
beams[0].text
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from weft.abi.errors import InvalidRequest
from weft.sdk.beam_rules import MAX_WIDTH, BeamRules, BeamSearch, FoundBeam
from weft.sdk.context import Context
from weft.sdk.model import own_model
from weft.sdk.sequence import Sequence
from weft.sdk.tokens import detokenize


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation that beam search found."""

    tokens: tuple[int, ...]
    """The tokens of the beam, with the end of sequence if the beam ended with it."""
    logprob: float
    """Sum of the tokens' log-probabilities, in nats."""
    score: float
    """`logprob / len(tokens) ** length_penalty`; beams are ordered by it."""
    reason: str
    """`stop` or `length`."""
    text: str = ""


async def beam_search(
    ctx: Context,
    width: int = 4,
    max_tokens: int = 16,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    ignore_eos: bool = False,
) -> list[Beam]:
    """The `width` best continuations, best first. The context stays as it is; `ctx.fill(beam.tokens)` continues with
    one of them.

    A beam's score is the sum of its log-probabilities divided by its length to the power `length_penalty`.
    `early_stopping` says when a search with `width` complete beams ends. True: at once; False: when no live beam scores
    better at its present length; "never": when no live beam can score better at any length.
    """
    model = await own_model()
    rules = BeamRules(
        width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ends=frozenset(() if ignore_eos else model.eos_token_ids),
    )
    if not 1 <= width <= MAX_WIDTH or rules.num_candidates > model.vocab_size:
        raise InvalidRequest(f"width must be between 1 and {MAX_WIDTH} and fit the vocabulary, got {width}", "width")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
    await ctx.flush(add_generation_prompt=True)
    if not ctx.tokens:
        raise InvalidRequest("the context is empty; fill it before a search", "prompt")
    beams = await _search(rules, ctx.sequence.fork())
    return list(await asyncio.gather(*(_beam(beam, rules) for beam in beams)))


async def _search(rules: BeamRules, root: Sequence) -> list[FoundBeam[None]]:
    search: BeamSearch[Sequence, None] = BeamSearch(rules, root)
    try:
        while search.goes_on:
            # All distributions are requested at once, so that they share a batch.
            dists = [beam.branch.next_dist(rules.num_candidates, append=beam.tokens[-1:]) for beam in search.live]
            search.advance(await asyncio.gather(*dists), lambda parent, place: None)
        return search.results()
    finally:
        search.release()


async def _beam(beam: FoundBeam[None], rules: BeamRules) -> Beam:
    text = await detokenize(beam.tokens[:-1] if beam.tokens[-1] in rules.ends else beam.tokens)
    return Beam(beam.tokens, beam.logprob, beam.score, beam.reason, text)
