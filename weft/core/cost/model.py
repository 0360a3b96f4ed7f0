"""What a step costs, as small models that a person can read.

Owns the quantities of a step that its time depends on (`StepShape`), the fitted models of forwards and swaps, and
`CostModel`, which predicts with them and corrects itself by what steps really took. Does not know how models are
fitted (`fit`) or kept (`profile`), and has no clock: measured times are arguments, in seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from weft.core.step import F64, ForwardBatch

SATURATED = 0.9
"""Part of the best throughput from which a step counts as saturated."""
GAIN = 0.05
"""How much of a step's deviation the correction takes over."""
LARGEST_DEVIATION = math.log(1.5)
"""What a single step may say, as a logarithm: one that took a hundred times as long moves the factor by 2 %."""
LARGEST_FACTOR = math.log(32.0)
FAR = 1e9
"""More tokens than a step ever has: the last slope holds up to there."""


MOST_PAGES = 2**31 - 1
"""Page ids are int32."""


class StepShape(NamedTuple):
    """What the time of a forward depends on."""

    num_tokens: int
    """Query tokens: the work of everything but attention."""
    num_rows: int
    num_outputs: int
    """Output rows: the language-model head, and sampling."""
    decode_kv: int
    """KV entries of rows of one query token: read once for it."""
    chunk_kv: int
    """KV entries of longer rows: read once for several."""
    chunk_pairs: int
    """Pairs of a query token of those rows and a KV entry that it sees, were every row causal."""

    @classmethod
    def of(cls, forward: ForwardBatch) -> StepShape:
        """The shape of a batch. Vectorised: a few microseconds."""
        num_rows, num_tokens = len(forward.kv_lens), len(forward.token_ids)
        whole = int(np.add.reduce(forward.kv_lens, dtype=np.int64))
        if num_rows == num_tokens:
            return cls(num_tokens, num_rows, len(forward.output_tokens), whole, 0, 0)
        bounds, kv = forward.q_indptr, forward.kv_lens.astype(np.float64)
        lengths = bounds[1:] - bounds[:-1]
        longer = lengths * (lengths > 1.0)
        chunk_kv = int(kv @ (longer > 0))
        pairs = longer @ (kv + kv - longer + 1.0) / 2
        return cls(num_tokens, num_rows, len(forward.output_tokens), whole - chunk_kv, chunk_kv, int(pairs))

    @classmethod
    def chunk(cls, num_tokens: int, kv_before: int = 0, num_outputs: int = 0) -> StepShape:
        """`num_tokens` of one prompt, of which `kv_before` tokens have KV."""
        after = kv_before + num_tokens
        if num_tokens == 1:
            return cls(1, 1, num_outputs, after, 0, 0)
        pairs = num_tokens * (2 * after - num_tokens + 1) // 2
        return cls(num_tokens, 1, num_outputs, 0, after, pairs)

    @classmethod
    def decodes(cls, num_rows: int, kv_tokens: int) -> StepShape:
        """One token each of `num_rows` sequences with `kv_tokens` KV entries between them, the new ones included."""
        return cls(num_rows, num_rows, num_rows, kv_tokens, 0, 0)

    def plus(self, other: StepShape) -> StepShape:
        """The shape of one step that does the work of both."""
        return StepShape(*(a + b for a, b in zip(self, other, strict=True)))


class ForwardModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a forward: a sum of what is read and computed, piecewise linear in the query tokens.

    No term is negative, so no prediction is, and none falls when a step grows.
    """

    base_s: float
    """Of any step: weights are read, kernels launched."""
    head_s: float
    """Of a step that has output rows at all: the head's weights are read, sampling begins."""
    per_row_s: float
    per_output_s: float
    per_decode_kv_s: float
    per_chunk_kv_s: float
    per_chunk_pair_s: float
    knots: tuple[int, ...]
    """Query tokens at which the cost of one more changes; increasing."""
    slopes: tuple[float, ...]
    """[len(knots) + 1] seconds per query token, below, between and above the knots."""

    @property
    def fixed(self) -> tuple[float, ...]:
        """The coefficients before `knots`, in the order of the fields."""
        return (
            self.base_s,
            self.head_s,
            self.per_row_s,
            self.per_output_s,
            self.per_decode_kv_s,
            self.per_chunk_kv_s,
            self.per_chunk_pair_s,
        )

    def tokens_s(self, num_tokens: float) -> float:
        """The part that grows with the query tokens alone."""
        seconds, start = 0.0, 0.0
        for knot, slope in zip(self.knots, self.slopes, strict=False):
            if num_tokens <= knot:
                return seconds + (num_tokens - start) * slope
            seconds += (knot - start) * slope
            start = knot
        return seconds + (num_tokens - start) * self.slopes[-1]

    def predict_s(self, shape: StepShape) -> float:
        """Seconds that a forward of this shape holds the device."""
        return (
            self.base_s
            + self.tokens_s(shape.num_tokens)
            + (self.head_s if shape.num_outputs else 0.0)
            + self.per_row_s * shape.num_rows
            + self.per_output_s * shape.num_outputs
            + self.per_decode_kv_s * shape.decode_kv
            + self.per_chunk_kv_s * shape.chunk_kv
            + self.per_chunk_pair_s * shape.chunk_pairs
        )

    def predict_added_s(self, beside: StepShape, num_tokens: F64, kv_before: F64) -> F64:
        """[n] seconds by which one chunk each lengthens a step of shape `beside`: `num_tokens` [n] of a prompt of which
        `kv_before` [n] tokens have KV.

        The differences of `predict_s`, in one pass over arrays. A chunk may have a fraction of a token; one of a single
        token is costed as a longer row is.
        """
        knots, seconds = [0.0], [self.per_row_s - self.tokens_s(beside.num_tokens)]
        for knot, slope in zip((*self.knots, FAR), self.slopes, strict=True):
            seconds.append(seconds[-1] + (knot - knots[-1]) * slope)
            knots.append(knot)
        if not beside.num_rows:
            seconds = [self.base_s + value for value in seconds]
        kv = kv_before + num_tokens
        added = np.interp(num_tokens + beside.num_tokens, knots, seconds)
        added += self.per_chunk_kv_s * kv
        kv += kv_before + 1.0
        added += (self.per_chunk_pair_s / 2) * (kv * num_tokens)
        return added

    def saturation_tokens(self, most: int) -> int:
        """The saturation point S (APIServe, section 4.2): the fewest query tokens per step, up to `most`, at which a
        device computes prompt tokens at `SATURATED` of the best rate that it has.

        Below it more tokens are nearly free, above it the time of a step grows in proportion. Attention is left out:
        it grows with the context, not with the step.
        """
        tokens = np.arange(1, max(1, most) + 1)
        fixed_s = self.base_s + self.head_s + self.per_row_s + self.per_output_s
        rates = tokens / (fixed_s + self._curve(tokens) + 1e-12)
        return int(tokens[np.argmax(rates >= SATURATED * rates.max())])

    def _curve(self, tokens: npt.NDArray[np.int64]) -> F64:
        return np.array([self.tokens_s(int(n)) for n in tokens])


class SwapModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of moving pages between the device and the host, in one direction."""

    base_s: float
    per_page_s: float

    def predict_s(self, num_pages: int) -> float:
        """Seconds for `num_pages` pages in one step; none for none."""
        return self.base_s + self.per_page_s * num_pages if num_pages > 0 else 0.0


HIDDEN_SHARE = 0.03
"""Part by which moving pages may lengthen steps on average and still be said to be free."""
SHORTEST_S = 1e-9
"""Of a step's time: shorter ones are taken for so long where they divide."""


class MoveBudget(NamedTuple):
    """Pages that a step may move. If one of so many steps does so, steps are longer by a given part on average."""

    pages: int
    steps: int


def _pages_within(seconds: float, out: SwapModel, into: SwapModel, factor: float) -> int:
    """How many pages move in `seconds`, some out and some in, at `factor` times what the models say."""
    left_s = seconds - factor * (out.base_s + into.base_s)
    per_page_s = factor * max(out.per_page_s, into.per_page_s)
    if left_s < 0.0:
        return 0
    return MOST_PAGES if left_s >= per_page_s * MOST_PAGES else int(left_s / per_page_s)


class CostModel:
    """Predictions for decisions by time, in seconds of the device: from fitted models, corrected by one factor that
    follows what steps take now.

    The factor is the exponentially weighted geometric mean of measured to predicted time. A deviation counts up to
    `LARGEST_DEVIATION`, so that one step that was interrupted says next to nothing and a lasting change is followed
    within some dozens of steps. Swaps are not corrected: the link does not slow down with the processor.

    A step that computes and moves pages takes

        max(T_fwd + T_beside_out(pages out) + T_beside_in(pages in), T_swap(pages out, pages in)):

    the link works beside the forward (APIServe, section 4.1: pages are free up to T_swap(N) = T_fwd(B)), and moving
    lengthens the forward by what it takes of the same cores and the same memory. On a CPU that is nearly all of
    T_swap, unless the link is throttled; on a GPU it is the gathering and spreading of pages. Both are measured.
    """

    def __init__(
        self,
        forward: ForwardModel,
        swap_out: SwapModel | None,
        swap_in: SwapModel | None,
        saturation_tokens: int,
        beside_out: SwapModel | None = None,
        beside_in: SwapModel | None = None,
    ):
        """`swap_out`, `swap_in`: of steps that only move pages; `beside_out`, `beside_in`: by how much a forward takes
        longer in whose step pages move. None: not measured."""
        self._forward = forward
        self._swap_out = swap_out
        self._swap_in = swap_in
        self._saturation_tokens = saturation_tokens
        self._beside_out = beside_out
        self._beside_in = beside_in
        self._log_factor = 0.0
        self._factor = 1.0

    @property
    def forward(self) -> ForwardModel:
        """The fitted model of forwards, not corrected."""
        return self._forward

    @property
    def factor(self) -> float:
        """What predictions of the profile are multiplied by."""
        return self._factor

    @property
    def saturation_tokens(self) -> int:
        """Query tokens per step from which more cost in proportion, as profiled: a factor on all times moves no
        knee."""
        return self._saturation_tokens

    def predict_forward_s(self, shape: StepShape) -> float:
        """Seconds that a forward of this shape holds the device."""
        return self._factor * self._forward.predict_s(shape)

    def predict_added_s(self, beside: StepShape, num_tokens: F64, kv_before: F64) -> F64:
        """[n] seconds by which a chunk of `num_tokens` [n], after `kv_before` [n] with KV, lengthens a forward of
        `beside`."""
        return self._factor * self._forward.predict_added_s(beside, num_tokens, kv_before)

    def predict_swap_s(self, num_out: int = 0, num_in: int = 0) -> float | None:
        """Seconds to move pages to and from the host; None where that was not measured."""
        seconds = 0.0
        for count, model in ((num_out, self._swap_out), (num_in, self._swap_in)):
            if count > 0:
                if model is None:
                    return None
                seconds += model.predict_s(count)
        return seconds

    def predict_step_s(self, shape: StepShape, num_out: int = 0, num_in: int = 0) -> float | None:
        """Seconds of a step with a forward of this shape that moves pages; None where that was not measured."""
        link_s = self.predict_swap_s(num_out, num_in)
        busy_s = self._busy_s(shape, num_out, num_in)
        return None if link_s is None or busy_s is None else max(busy_s, link_s)

    def free_pages(self, shape: StepShape, fraction: float) -> int | None:
        """The most pages, out plus in, with which `predict_step_s` is at most (1 + `fraction`) times that without.

        Any split into out and in keeps to it. At most `MOST_PAGES`; 0 where one page is too many; None where moving
        pages was not measured.
        """
        models = (self._swap_out, self._swap_in, self._beside_out, self._beside_in)
        swap_out, swap_in, beside_out, beside_in = models
        if swap_out is None or swap_in is None or beside_out is None or beside_in is None:
            return None
        forward_s = self.predict_forward_s(shape)
        allowed_s = (1 + fraction) * forward_s
        busy = _pages_within(allowed_s - forward_s, beside_out, beside_in, self._factor)
        link = _pages_within(allowed_s, swap_out, swap_in, 1.0)
        return min(busy, link)

    def move_budget(self, shape: StepShape, fraction: float) -> MoveBudget | None:
        """How many pages a step of this shape may move, out plus in, and in how many steps one may do so, if steps are
        to be longer by `fraction` on average. None where moving pages was not measured.

        The `free_pages` of every step, at least one, unless their fixed time is longer than what their number takes.

        Then so many pages that both are equal, and so many steps that these may together be longer by the time of such
        a transfer.
        """
        pages = self.free_pages(shape, fraction)
        out, into = self._beside_out, self._beside_in
        if pages is None or out is None or into is None:
            return None
        fixed_s, per_page_s = out.base_s + into.base_s, max(out.per_page_s, into.per_page_s)
        least = max(1, math.ceil(fixed_s / per_page_s)) if per_page_s > 0.0 else 1
        if pages >= least or least == 1:
            return MoveBudget(max(1, pages), 1)
        forward_s, link_s = self.predict_forward_s(shape), self.predict_swap_s(least) or 0.0
        longer_s = max(self._factor * (fixed_s + least * per_page_s), link_s - forward_s)
        return MoveBudget(least, max(1, math.ceil(longer_s / max(fraction * forward_s, SHORTEST_S))))

    def observe(self, shape: StepShape, measured_s: float, num_out: int = 0, num_in: int = 0) -> float | None:
        """Correct the factor by a step with a forward; returns measured to predicted time.

        None, and no correction, where that means nothing: the time is none, moving pages was not measured, or the link
        decides how long the step takes.
        """
        predicted_s = self._busy_s(shape, num_out, num_in)
        link_s = self.predict_swap_s(num_out, num_in)
        if predicted_s is None or link_s is None or link_s > predicted_s:
            return None
        if not (predicted_s > 0.0 and 0.0 < measured_s < math.inf):
            return None
        ratio = measured_s / predicted_s
        deviation = max(-LARGEST_DEVIATION, min(LARGEST_DEVIATION, math.log(ratio)))
        moved = self._log_factor + GAIN * deviation
        self._log_factor = max(-LARGEST_FACTOR, min(LARGEST_FACTOR, moved))
        self._factor = math.exp(self._log_factor)
        return ratio

    def _busy_s(self, shape: StepShape, num_out: int, num_in: int) -> float | None:
        """Seconds that a forward of this shape holds the device while pages move."""
        seconds = self._forward.predict_s(shape)
        for count, model in ((num_out, self._beside_out), (num_in, self._beside_in)):
            if count > 0:
                if model is None:
                    return None
                seconds += model.predict_s(count)
        return self._factor * seconds
