"""Reported log-probabilities against torch.log_softmax, with ties everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.worker import logprobs
from weft.worker.logprobs import score_tokens, top_tokens

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def tied_logits(dtype: torch.dtype, rows: int = 7, vocab_size: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64) * 3).round()
    logits[0] = 0.0
    logits[0, 100:] = -0.0  # the same number as 0.0, with other bits
    logits[1, ::2] = -torch.inf
    return logits.to(dtype)


def order_of(row: torch.Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda v: (-float(row[v]), v))


@DTYPES
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_tops_and_ranks_order_ties_by_id(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "MAX_BLOCK_ELEMENTS", block)
    logits = tied_logits(dtype)
    rows = torch.tensor([6, 0, 1, 1, 3])
    top = top_tokens(logits, rows, 250)
    expected = logits.log_softmax(-1)
    for i, row in enumerate(rows.tolist()):
        order = order_of(logits[row])
        assert top.ids[i].tolist() == order[:250]
        torch.testing.assert_close(top.logprobs[i], expected[row, order[:250]])
        for position in (0, 1, 39, 200):
            scores = score_tokens(logits, rows[i : i + 1], torch.tensor([order[position]]))
            assert scores.ranks.item() == position + 1
            torch.testing.assert_close(scores.logprobs[0], expected[row, order[position]])


@DTYPES
def test_a_row_is_reported_the_same_in_any_company(dtype: torch.dtype):
    logits = torch.randn(50, 33_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.arange(50) * 7
    together = score_tokens(logits, torch.arange(50), tokens)
    for i in (0, 31, 49):
        alone = score_tokens(logits[i : i + 1], torch.tensor([0]), tokens[i : i + 1])
        assert alone.logprobs.item() == together.logprobs[i].item()


def test_k_is_cut_to_the_vocabulary_and_may_be_nothing():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert top_tokens(logits, torch.tensor([0]), 9).ids.tolist() == [[1, 2, 0]]
    assert top_tokens(logits, torch.tensor([0]), 0).ids.shape == (1, 0)


def test_a_row_of_minus_infinity_is_not_a_number_nowhere():
    scores = score_tokens(torch.full((1, 4), -torch.inf), torch.tensor([0]), torch.tensor([2]))
    assert scores.ranks.tolist() == [3]
    assert not np.isnan(scores.logprobs.numpy()).any()
