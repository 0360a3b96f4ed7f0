"""What it wastes to preserve, recompute or swap KV: equations 1 to 5 of APIServe (Abhyankar et al., 2024).

First the equations as they are printed, for numbers or arrays. Then what they come to for the runs of a snapshot, with
times of a cost model. The unit is the token-second: the KV of one token held for one second, M of the paper being 1.

The paper gives up whole contexts. Here a context of C tokens goes run by run, tail first; a run has r tokens and the
C - r before it stay. What is said of a run is such that the values of the runs of a context add up to the paper's value
of the whole: the time of a forward is the time that it *adds* to a step that is computed anyway (the running sequences,
or the first new token of the one that returns), and while r tokens come back page by page, all C - r before them and
half of them are held: (C - r) + r / 2 = (2C - r) / 2, which is the C / 2 of equation 4 for r = C. T_fwd(C) of
equation 4 is the time of all chunks together, for as long as that is the memory held.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from weft.cache.runs import PageRuns
from weft.core.cost.model import StepShape
from weft.core.step import F64, I64
from weft.sched.policies.runs import Load

Number = TypeVar("Number", float, F64)

PROBE_PAGES = 257
"""Pages of the larger of two transfers whose difference gives the time per page."""


def waste_discard(forward_s: Number, context: Number, other: float) -> Number:
    """Equation 1: recomputing `context` tokens in one forward of `forward_s`, while `other` tokens wait."""
    return forward_s * context + forward_s * other


def waste_preserve(remaining_s: Number, context: Number) -> Number:
    """Equation 2: holding `context` tokens for the `remaining_s` that the wait still takes."""
    return remaining_s * context


def waste_swap(swap_s: Number, batch: Number) -> Number:
    """Equation 3: moving a context out and in, `swap_s` each, while all `batch` tokens on the device wait."""
    return 2.0 * swap_s * batch


def waste_chunked_discard(
    forward_s: Number, num_chunks: Number, chunk_s: Number, context: Number, other: float
) -> Number:
    """Equation 4: recomputing `context` tokens, which take one forward of `forward_s`, in `num_chunks` chunks that
    lengthen a step by `chunk_s` each, while `other` tokens wait."""
    return forward_s * context / 2.0 + num_chunks * chunk_s * other


def least_waste(preserve: F64, chunked_discard: F64) -> F64:
    """Equation 5: what a wait costs when the cheaper of preserving and discarding is done."""
    return np.minimum(preserve, chunked_discard)


class RunSizes(NamedTuple):
    """Tokens of runs, each [n]."""

    held: F64
    """Tokens that its device pages have room for: the memory that preserving it takes."""
    tokens: F64
    """r: tokens of the run, which may end within its last page."""
    before: F64
    """C - r: tokens of the sequence before it."""
    while_returning: F64
    """(2C - r) / 2: tokens that are held, on average, while the run comes back page by page."""

    @classmethod
    def of(cls, runs: PageRuns, load: Load) -> RunSizes:
        """From pages and context. A run whose context ends within a page has that page as its last."""
        held = runs.num_pages * load.page_size
        tokens = np.minimum(held - -runs.num_tokens % load.page_size, runs.num_tokens).astype(np.float64)
        context = runs.num_tokens.astype(np.float64)
        return cls(held.astype(np.float64), tokens, context - tokens, context - tokens / 2.0)

    def with_behind(self, num_behind: I64) -> RunSizes:
        """The sizes of runs together with so many tokens behind each that only the host has."""
        tokens = self.tokens + num_behind
        return RunSizes(self.held, tokens, self.before, self.before + tokens / 2.0)


def chunk_tokens(load: Load) -> float:
    """Largest chunk of a recomputation: S minus what the running sequences compute, at least a page; inf without S."""
    if load.saturation_tokens is None:
        return np.inf
    return float(max(load.saturation_tokens - load.running_rows, load.page_size))


def recompute_waste(sizes: RunSizes, load: Load) -> F64:
    """[n] equation 4: the waste of computing runs again, in as few chunks of equal size as `chunk_tokens` allows."""
    num_chunks = np.maximum(np.ceil(sizes.tokens / chunk_tokens(load)), 1.0)
    chunk = sizes.tokens / num_chunks
    if load.costs is None:
        # A second per token: an order by these values is that of any other constant time per token.
        chunk_s = chunk
    else:
        beside = StepShape.decodes(max(load.running_rows, 1), load.running_tokens)
        # Chunks read more KV one after the other; the time is linear in it, so all take that of the one in the middle.
        chunk_s = load.costs.predict_added_s(beside, chunk, sizes.while_returning - chunk / 2.0)
    held = 2.0 * sizes.while_returning
    return waste_chunked_discard(num_chunks * chunk_s, num_chunks, chunk_s, held, load.running_tokens)


def swap_waste(runs: PageRuns, sizes: RunSizes, load: Load, chance: F64 | float = 1.0) -> F64:
    """[n] the waste of giving up runs by way of the host: out where there is no copy yet, and in with the `chance` that
    they are needed again.

    Equation 3 with two differences. Running sequences wait only for what is not hidden behind forwards. And while a run
    comes back page by page, its sequence holds what is there already, as in equation 4; out, nothing is held for it,
    since the step that moves pages may write them. Where transfers were not measured they count as taking no time.
    """
    page_out_s, page_in_s = _page_s(load, out=True), _page_s(load, out=False)
    stalled = (1.0 - load.swap_hidden) * load.running_tokens
    per_page = (sizes.while_returning + stalled) * page_in_s * chance
    if page_out_s > 0.0:
        per_page += np.where(runs.has_copy, 0.0, stalled * page_out_s)
    return per_page * runs.num_pages


def _page_s(load: Load, *, out: bool) -> float:
    """Seconds that one more page of a transfer takes."""
    if load.costs is None:
        return 0.0
    few, many = (
        load.costs.predict_swap_s(num_out=n) if out else load.costs.predict_swap_s(num_in=n) for n in (1, PROBE_PAGES)
    )
    return 0.0 if few is None or many is None else (many - few) / (PROBE_PAGES - 1)
