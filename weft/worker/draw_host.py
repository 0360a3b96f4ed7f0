"""Drawing tokens on a CPU, row by row in numpy, each row while it is in the cache. See `drawing` for the contract.

numpy gives up the interpreter lock inside its loops, so a few plain threads share the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.step import Bool
from weft.worker.drawing import BLOCK, I64, SMALLEST, Drawing, Draws

Row = npt.NDArray[Any]

MAX_THREADS = 8
"""Between numpy's loops the threads hold the interpreter lock: more of them would wait for it."""
MIN_ELEMENTS_PER_THREAD = 1 << 17
"""Less is done before another thread has started."""


class HostDrawing:
    """`argmax` and `draw` of a `Drawing`, with the threads they use."""

    def __init__(self, threads: int):
        """At most `threads` threads, the calling one included."""
        self._threads = min(threads, MAX_THREADS)
        self._pool = ThreadPoolExecutor(self._threads - 1, "weft-draw") if self._threads > 1 else None

    def argmax(self, logits: Tensor, rows: I64) -> Tensor:
        """The most probable tokens, on the host (`drawing.Argmax`)."""
        values, tokens = logits.numpy(), np.empty(len(rows), np.int64)

        def work(index: range) -> None:
            for i in index:
                tokens[i] = values[rows[i]].argmax()

        self._share(work, len(rows), logits.shape[1])
        return torch.from_numpy(tokens)

    def draw(self, logits: Tensor, rows: I64, draws: Draws) -> Tensor:
        """Sampled tokens, on the host (`drawing.Draw`)."""
        values, tokens = logits.numpy(), np.empty(len(rows), np.int64)

        def work(index: range) -> None:
            scratch = np.zeros(-(-values.shape[1] // BLOCK) * BLOCK, values.dtype)
            floor = np.exp(np.full(BLOCK, SMALLEST, values.dtype))[0]
            for i in index:
                how = (float(draws.temperature[i]), int(draws.top_k[i]), float(draws.top_p[i]), float(draws.min_p[i]))
                tokens[i] = _draw_row(values[rows[i]], scratch, floor, *how, float(draws.uniforms[i]))

        self._share(work, len(rows), logits.shape[1])
        return torch.from_numpy(tokens)

    def _share(self, work: Callable[[range], None], num_rows: int, vocab_size: int) -> None:
        parts = max(1, min(self._threads, num_rows, num_rows * vocab_size // MIN_ELEMENTS_PER_THREAD))
        bounds = [num_rows * i // parts for i in range(parts + 1)]
        ranges = [range(first, last) for first, last in pairwise(bounds)]
        others = [self._pool.submit(work, r) for r in ranges[1:]] if self._pool is not None else []
        work(ranges[0])
        for other in others:
            other.result()


def _draw_row(
    logits: Row,
    scratch: Row,
    floor: np.floating[Any],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """`scratch` has the row's size rounded up to whole blocks, zero beyond the row."""
    largest = logits.max()
    if not np.isfinite(largest):  # also where a logit is NaN
        return int(logits.argmax())
    weights = scratch[: len(logits)]
    np.subtract(logits, largest, out=weights)
    if temperature != 1:
        with np.errstate(over="ignore"):  # -inf is below the floor as well
            np.divide(weights, temperature, out=weights)
    kept = _largest(weights, _kth_largest(weights, top_k), top_k) if top_k else None
    # What is below the floor becomes exactly zero, and to what is well above it the subtraction makes no difference.
    np.maximum(weights, SMALLEST, out=weights)
    np.exp(weights, out=weights)
    np.subtract(weights, floor, out=weights)
    if kept is not None:
        np.multiply(weights, kept, out=weights)
    if top_p < 1:
        _keep_top_p(weights, top_p, float(_ends(scratch)[-1]))
    if min_p > 0:
        weights[weights < min_p] = 0
    ends = _ends(scratch)
    target = uniform * ends[-1]
    block = min(int(ends.searchsorted(target, side="right")), len(ends) - 1)
    inside = scratch[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    if block:
        inside += ends[block - 1]
    offset = int(inside.searchsorted(target, side="right"))
    # The block's sum and this running sum may round differently; then the last token that has weight is the one.
    return block * BLOCK + min(offset, int(inside.searchsorted(inside[-1])))


def _ends(scratch: Row) -> Row:
    """The running sum of the weights at the end of each block."""
    sums: Row = np.add.reduce(scratch.reshape(-1, BLOCK), axis=1, dtype=np.float64)
    return sums.cumsum()


def _kth_largest(values: Row, k: int) -> np.floating[Any]:
    # Each of some groups has a largest value; the k-th of these is a bound from below, and few values reach it.
    # (numpy's partition would be the shorter way, but equal values, of which there are many, make it very slow.)
    height = len(values) // (4 * k)
    if height > 1:
        width = len(values) // height
        tops = np.maximum.reduce(values[: height * width].reshape(height, width), axis=0)
        values = np.compress(values >= np.sort(tops)[-k], values)
    found: np.floating[Any] = np.sort(values)[-k]
    return found


def _keep_top_p(weights: Row, top_p: float, total: float) -> None:
    # All tokens lighter than this weigh less than 1 - p together, so none of them is in the nucleus; the margin is for
    # rounding. A sort has to deal with the others alone.
    lightest = 0.999 * (1 - top_p) * total / len(weights)
    ordered = np.sort(np.compress(weights >= lightest, weights))[::-1]
    mass = ordered.cumsum(dtype=np.float64)
    last = min(int(mass.searchsorted(top_p * total)), len(ordered) - 1)
    np.multiply(weights, _largest(weights, ordered[last], last + 1), out=weights)


def _largest(values: Row, threshold: np.floating[Any], count: int) -> Bool:
    """Which values are the `count` largest, of which `threshold` is the smallest; ties go to the lowest ids."""
    kept: Bool = values >= threshold
    surplus = int(np.count_nonzero(kept)) - count
    if surplus > 0:
        kept[np.flatnonzero(values == threshold)[-surplus:]] = False
    return kept


def host_drawing(threads: int) -> Drawing:
    """Drawing with at most `threads` threads."""
    owner = HostDrawing(threads)
    return Drawing(owner.argmax, owner.draw)
