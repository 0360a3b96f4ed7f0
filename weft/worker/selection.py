"""Row-wise choices among tokens: the largest, the k largest, the nucleus, the draw.

Owns the arithmetic of picking. Every function treats each row alone and in order of token id, so a row's outcome never
depends on what else is in the batch. Does not know parameters, slots or steps.

The three choices that need an order have two implementations behind `Selection`. `DEVICE` is torch alone, never waits
for the device and suits any; `HOST` looks at the data of CPU tensors row by row, where numpy sorts and partitions ten
times faster than torch does.

Shapes use: n rows, V vocabulary. Weights are not negative, at most 1, and need not sum to anything.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.step import F64
from weft.worker.transfer import upload

I64 = npt.NDArray[np.int64]

BLOCK = 128
"""Tokens whose weights are summed together before the running sum, which so has V / 128 steps instead of V."""
MAX_TOP_K_SELECT = 1024
"""Above this k a sort is faster than a selection on a GPU."""


class Argmax(Protocol):
    """The most probable token of each row."""

    def __call__(self, logits: Tensor, rows: I64) -> Tensor:
        """logits [O, V] and n row numbers -> token ids int64 [n]; ties go to the lowest id."""
        ...


class KeepTopK(Protocol):
    """Top-k (Fan et al., 2018)."""

    def __call__(self, logits: Tensor, k: I64) -> None:
        """Set all but the k[i] largest of row i to -inf, in place; ties go to the lowest ids. 1 <= k < V."""
        ...


class KeepTopP(Protocol):
    """Nucleus sampling (Holtzman et al., 2019)."""

    def __call__(self, weights: Tensor, p: F64) -> None:
        """Zero what is outside the smallest set of largest weights with at least p[i] of row i's sum, in place.

        Ties go to the lowest ids. 0 < p < 1.
        """
        ...


class Selection(NamedTuple):
    """One implementation of the choices that need an order."""

    argmax: Argmax
    keep_top_k: KeepTopK
    keep_top_p: KeepTopP


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
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


# Without looking at the data


def _argmax(logits: Tensor, rows: I64) -> Tensor:
    if len(rows) == logits.shape[0] and (rows == np.arange(len(rows))).all():
        return logits.argmax(-1)
    return logits.index_select(0, upload(rows, logits.device)).argmax(-1)


def _keep_top_k(logits: Tensor, k: I64) -> None:
    most = int(k.max())
    ordered = logits.topk(most, -1).values if most <= MAX_TOP_K_SELECT else logits.sort(-1, descending=True).values
    count = upload(k, logits.device).unsqueeze(1)
    _drop_beyond(logits, ordered.gather(1, count - 1), count, -torch.inf)


def _keep_top_p(weights: Tensor, p: F64) -> None:
    ordered = weights.sort(-1, descending=True).values
    mass = ordered.cumsum(-1, dtype=torch.float64)
    target = upload(p, weights.device).unsqueeze(1) * mass[:, -1:]
    count = torch.searchsorted(mass, target).clamp_(max=weights.shape[1] - 1) + 1
    _drop_beyond(weights, ordered.gather(1, count - 1), count, 0.0)


def _drop_beyond(values: Tensor, threshold: Tensor, count: Tensor, fill: float) -> None:
    """Keep `count` [n, 1] of each row, of which `threshold` [n, 1] is the smallest value."""
    tied = values == threshold
    num_tied_kept = count - (values > threshold).sum(-1, keepdim=True)
    surplus = tied & (tied.cumsum(-1, dtype=torch.int32) > num_tied_kept)
    values.masked_fill_((values < threshold) | surplus, fill)


DEVICE = Selection(_argmax, _keep_top_k, _keep_top_p)


# Looking at the data


def _argmax_host(logits: Tensor, rows: I64) -> Tensor:
    values = logits.numpy()
    return torch.tensor([int(values[row].argmax()) for row in rows], dtype=torch.int64)


def _keep_top_k_host(logits: Tensor, k: I64) -> None:
    for row, count in zip(logits.numpy(), k.tolist(), strict=True):
        threshold = np.partition(row, -count)[-count]
        _drop_beyond_host(row, threshold, count, -np.inf)


def _keep_top_p_host(weights: Tensor, p: F64) -> None:
    for row, share in zip(weights.numpy(), p.tolist(), strict=True):
        total = row.sum(dtype=np.float64)
        if not total > 0:
            continue
        # All tokens lighter than this weigh less than 1 - p together, so none of them is in the nucleus. The margin
        # is for rounding.
        candidates = row[row >= 0.999 * (1 - share) * total / len(row)]
        candidates.sort()
        ordered = candidates[::-1]
        count = min(int(ordered.cumsum(dtype=np.float64).searchsorted(share * total)) + 1, len(ordered))
        _drop_beyond_host(row, ordered[count - 1], count, 0.0)


def _drop_beyond_host(row: npt.NDArray[np.floating], threshold: np.floating, count: int, fill: float) -> None:
    num_tied_kept = count - int(np.count_nonzero(row > threshold))
    surplus = np.flatnonzero(row == threshold)[max(num_tied_kept, 0) :]
    row[row < threshold] = fill
    row[surplus] = fill


HOST = Selection(_argmax_host, _keep_top_k_host, _keep_top_p_host)


def selection_for(device: torch.device) -> Selection:
    """The faster implementation on `device`."""
    return HOST if device.type == "cpu" else DEVICE
