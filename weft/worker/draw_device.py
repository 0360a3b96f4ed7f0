"""Drawing tokens with torch alone: batched, on any device, without ever waiting for it. See `drawing` for the contract.

Works in blocks of rows, so that memory is bounded for every size of batch.

Shapes use: n rows, V vocabulary. Weights are in [0, 1] and need not sum to anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.worker.drawing import BLOCK, I64, SMALLEST, Drawing, Draws
from weft.worker.transfer import upload, upload_all

MAX_ELEMENTS = 1 << 25
"""Logits of a block of rows: enough to fill a GPU, at 128 MiB for each intermediate result."""
MAX_SELECTED = 1024
"""Up to so many of the largest are found by selection; beyond, a sort is faster on a GPU."""


def argmax(logits: Tensor, rows: I64) -> Tensor:
    """The most probable tokens, on the device (`drawing.Argmax`)."""
    if len(rows) == logits.shape[0] and (rows == np.arange(len(rows))).all():
        return logits.argmax(-1)
    return logits.index_select(0, upload(rows, logits.device)).argmax(-1)


def draw(logits: Tensor, rows: I64, draws: Draws) -> Tensor:
    """Sampled tokens, on the device (`drawing.Draw`)."""
    size = max(1, MAX_ELEMENTS // logits.shape[1])
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    return torch.cat([_draw_block(logits, rows[part], draws.part(part)) for part in parts])


def _draw_block(logits: Tensor, rows: I64, draws: Draws) -> Tensor:
    limited, nucleus = np.flatnonzero(draws.top_k > 0), np.flatnonzero(draws.top_p < 1)
    arrays = (rows, draws.temperature, draws.min_p, draws.uniforms)
    limits = (limited, draws.top_k[limited], nucleus, draws.top_p[nucleus])
    chosen, temperature, min_p, uniforms, *on_device = upload_all((*arrays, *limits), logits.device)
    limited_rows, k, nucleus_rows, p = on_device
    x = logits.index_select(0, chosen)
    # One pass more for rows that should not exist: to branch on the data would be to wait for the device.
    largest, fallback = x.max(-1, keepdim=True)
    x.sub_(largest).div_(_column(temperature, x))
    if len(limited):
        _change_rows(x, limited_rows, lambda part: _keep_top_k(part, k, int(draws.top_k.max())))
    weights = weigh(x)
    if len(nucleus):
        _change_rows(weights, nucleus_rows, lambda part: _keep_top_p(part, p))
    if (draws.min_p > 0).any():
        # The largest weight is 1, so this is `min_p` of the most probable token.
        weights.masked_fill_(weights < _column(min_p, x), 0.0)
    tokens = invert(weights, uniforms)
    return torch.where(largest.isfinite(), tokens.unsqueeze(1), fallback).squeeze(1)


def weigh(relative: Tensor) -> Tensor:
    """Log-weights, each row's largest 0 -> weights in (0, 1], in place; 0 below `SMALLEST`.

    Such a token is too rare ever to be drawn, and processors handle numbers of that size a hundred times slower.
    """
    weights = relative.clamp_(min=SMALLEST - 1).exp_()
    return torch.threshold_(weights, math.exp(SMALLEST), 0.0)


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, in order of token id, at uniforms float64 [n] in [0, 1).

    weights [n, V] -> token ids int64 [n]: the first token whose cumulative weight exceeds `uniform * total`, with sums
    in float64. A token of weight 0 is drawn only when all are 0.
    """
    vocab_size = weights.shape[1]
    blocks = _blocks(weights)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = uniforms.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = F.pad(ends, (1, 0)).gather(1, block)
    chosen = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1)
    inside = chosen.to(torch.float64).cumsum(-1).add_(before)
    offset = torch.searchsorted(inside, target, right=True)
    # The block's sum and this running sum may round differently; then the last token that has weight is the one.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    tokens = block * BLOCK + torch.minimum(offset, last)
    return tokens.squeeze(1).clamp_(max=vocab_size - 1)


def row_sums(weights: Tensor) -> Tensor:
    """weights [n, V] -> float64 [n], added in an order that does not depend on n."""
    return _blocks(weights).sum(-1, dtype=torch.float64).cumsum(-1)[:, -1]


def _blocks(weights: Tensor) -> Tensor:
    padding = -weights.shape[1] % BLOCK
    padded = F.pad(weights, (0, padding)) if padding else weights
    return padded.view(weights.shape[0], -1, BLOCK)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).unsqueeze(1)


def _change_rows(x: Tensor, index: Tensor, change: Callable[[Tensor], None]) -> None:
    """Apply an in-place change to rows `index` of x, in order, all different."""
    if len(index) == x.shape[0]:
        change(x)
    else:
        part = x.index_select(0, index)
        change(part)
        x.index_copy_(0, index, part)


def _keep_top_k(logits: Tensor, k: Tensor, most: int) -> None:
    ordered = logits.topk(most, -1).values if most <= MAX_SELECTED else logits.sort(-1, descending=True).values
    count = k.unsqueeze(1)
    _drop_beyond(logits, ordered.gather(1, count - 1), count, -torch.inf)


def _keep_top_p(weights: Tensor, p: Tensor) -> None:
    ordered = weights.sort(-1, descending=True).values
    mass = ordered.cumsum(-1, dtype=torch.float64)
    target = p.unsqueeze(1) * mass[:, -1:]
    count = torch.searchsorted(mass, target).clamp_(max=weights.shape[1] - 1) + 1
    _drop_beyond(weights, ordered.gather(1, count - 1), count, 0.0)


def _drop_beyond(values: Tensor, threshold: Tensor, count: Tensor, fill: float) -> None:
    """Keep `count` [n, 1] of each row, of which `threshold` [n, 1] is the smallest value."""
    tied = values == threshold
    num_tied_kept = count - (values > threshold).sum(-1, keepdim=True)
    surplus = tied & (tied.cumsum(-1, dtype=torch.int32) > num_tied_kept)
    values.masked_fill_((values < threshold) | surplus, fill)


DEVICE = Drawing(argmax, draw)
