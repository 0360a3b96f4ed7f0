"""Log-probabilities of the model itself, before any sampling parameter touches the logits.

Owns what is reported: a token's log-probability and rank, and the most probable tokens. Ranks and tops order tokens by
logit, ties by the lowest id, so the two always agree. Never waits for the device.

Shapes use: O output rows, n of them that are asked about, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.worker.draw_device import row_sums

MAX_BLOCK_ELEMENTS = 1 << 22
"""Logits looked at together: bounds the memory of intermediate results to a few times as many words."""


class TokenScores(NamedTuple):
    """How probable given tokens are."""

    logprobs: Tensor
    """[n] float."""
    ranks: Tensor
    """[n] int64, 1 for the most probable."""


class Top(NamedTuple):
    """The most probable tokens, most probable first; k is cut to the vocabulary."""

    ids: Tensor
    """[n, k] int64."""
    logprobs: Tensor
    """[n, k] float."""


def score_tokens(logits: Tensor, rows: Tensor, tokens: Tensor) -> TokenScores:
    """logits [O, V], rows int64 [n], tokens int64 [n] -> the log-probability and rank of each row's token."""
    blocks = zip(_split(logits, rows), _split(logits, tokens), strict=True)
    parts = [_score_block(logits.index_select(0, r), t) for r, t in blocks]
    return TokenScores(torch.cat([p.logprobs for p in parts]), torch.cat([p.ranks for p in parts]))


def top_tokens(logits: Tensor, rows: Tensor, k: int) -> Top:
    """logits [O, V], rows int64 [n] -> the k most probable tokens of each."""
    parts = [_top_block(logits.index_select(0, r), min(k, logits.shape[1])) for r in _split(logits, rows)]
    return Top(torch.cat([p.ids for p in parts]), torch.cat([p.logprobs for p in parts]))


def _split(logits: Tensor, per_row: Tensor) -> tuple[Tensor, ...]:
    return torch.split(per_row, max(1, MAX_BLOCK_ELEMENTS // logits.shape[1]))


def _score_block(logits: Tensor, tokens: Tensor) -> TokenScores:
    token = tokens.unsqueeze(1)
    value = logits.gather(1, token)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > value) | ((logits == value) & (ids < token))
    return TokenScores((value - _log_total(logits)).squeeze(1), ahead.sum(-1) + 1)


def _top_block(logits: Tensor, k: int) -> Top:
    if logits.dtype == torch.float64:
        ids = logits.sort(stable=True, dim=-1, descending=True).indices[:, :k]
    else:
        ids = _order_keys(logits).topk(k, -1).indices
    return Top(ids, logits.gather(1, ids) - _log_total(logits))


def _log_total(logits: Tensor) -> Tensor:
    """[n, V] -> log-sum-exp [n, 1], bit for bit the same for every n."""
    largest = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    return largest + row_sums((logits - largest).exp_()).clamp_(min=torch.finfo(torch.float64).tiny).log_().to(
        logits.dtype
    ).unsqueeze(1)


def _order_keys(logits: Tensor) -> Tensor:
    """float32 [n, V] -> int64 keys, all different within a row, in the order of (logit, lower id first).

    The bits of a float, read as an integer, are in the order of the float but for negative ones, which are reversed.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 the same number as 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return (ordered.to(torch.int64) << 32) | ids
